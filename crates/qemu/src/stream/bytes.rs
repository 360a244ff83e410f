//! Parsing of bytes that may not have arrived yet.

/// Unwraps a value that was found, or returns `Short` or `Other` from the caller.
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

/// The result of looking for something at a position of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found<T> {
    /// It was found.
    Whole(T),
    /// Too few bytes to decide.
    Short,
    /// Something else is there.
    Other,
}

impl<T> Found<T> {
    /// Converts the value that was found.
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

/// A length in one byte, and a name of that length. A name is printable and not empty.
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

/// Whether these bytes are there.
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

/// The number of bytes taken, or `Short` if it is 0.
pub(super) fn some(taken: usize) -> Found<usize> {
    if taken == 0 { Found::Short } else { Found::Whole(taken) }
}
