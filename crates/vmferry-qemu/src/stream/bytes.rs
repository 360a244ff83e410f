//! Reading what may not have come yet.

/// Goes on with what was looked for, or returns that it was not found.
macro_rules! found {
    ($found:expr) => {
        match $found {
            Found::Whole(value) => value,
            Found::Short => return Found::Short,
            Found::Other => return Found::Other,
        }
    };
}

pub(super) use found;

/// What stands at a place of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found<T> {
    /// What was looked for.
    Whole(T),
    /// Too few bytes to tell.
    Short,
    /// Something else.
    Other,
}

impl<T> Found<T> {
    /// The same of something else.
    pub fn map<U>(self, make: impl FnOnce(T) -> U) -> Found<U> {
        Found::Whole(make(found!(self)))
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Found<[u8; N]> {
    match bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        Some(&value) => Found::Whole(value),
        None => Found::Short,
    }
}

pub(super) fn byte(bytes: &[u8], at: usize) -> Found<u8> {
    let [value] = found!(array(bytes, at));
    Found::Whole(value)
}

pub(super) fn be16(bytes: &[u8], at: usize) -> Found<u16> {
    Found::Whole(u16::from_be_bytes(found!(array(bytes, at))))
}

pub(super) fn be32(bytes: &[u8], at: usize) -> Found<u32> {
    Found::Whole(u32::from_be_bytes(found!(array(bytes, at))))
}

pub(super) fn be64(bytes: &[u8], at: usize) -> Found<u64> {
    Found::Whole(u64::from_be_bytes(found!(array(bytes, at))))
}

/// A length in one byte and a name of so many bytes; a name is printable and not empty.
pub(super) fn name(bytes: &[u8], at: usize) -> Found<&[u8]> {
    let length = usize::from(found!(byte(bytes, at)));
    let there = &bytes[at + 1..];
    let name = &there[..length.min(there.len())];
    if length == 0 || !name.iter().all(|c| (b' '..=b'~').contains(c)) {
        Found::Other
    } else if name.len() < length {
        Found::Short
    } else {
        Found::Whole(name)
    }
}

/// Whether these bytes stand there.
pub(super) fn expect(bytes: &[u8], at: usize, expected: &[u8]) -> Found<()> {
    let there = bytes.get(at..).unwrap_or_default();
    let compared = there.len().min(expected.len());
    if there[..compared] != expected[..compared] {
        Found::Other
    } else if compared < expected.len() {
        Found::Short
    } else {
        Found::Whole(())
    }
}

/// So many bytes taken; without any, more must come first.
pub(super) fn some(taken: usize) -> Found<usize> {
    if taken == 0 { Found::Short } else { Found::Whole(taken) }
}
