//! Fields after a message's body, since protocol version 2. A release can add fields without a new
//! version of the protocol.
//!
//! ```text
//!  0        2        6
//!  +--------+--------+---------+
//!  | number | length | content |     number: the low 15 bits; the top bit: mandatory
//!  +--------+--------+---------+
//! ```
//! Fields are in ascending order of their numbers, at most one per number, up to the end of the
//! body. The specification of each field says whether it is mandatory, so the same fields have
//! exactly one encoding. A reader ignores an unknown optional field, and rejects a message with an
//! unknown mandatory one.

use crate::control::Buffer;
use crate::error::WireError;
use crate::field;

/// The first version of the protocol whose messages may have fields.
pub(crate) const FIELDS_SINCE: u16 = 2;

/// Set in the number of a field that a reader must not ignore.
const MANDATORY: u16 = 1 << 15;

const HEAD_BYTES: usize = 6;

/// Whether a reader may ignore a field that it does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Optional,
    Mandatory,
}

impl std::fmt::Display for Need {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Optional => "optional",
            Self::Mandatory => "mandatory",
        })
    }
}

/// Appends a field that a reader may ignore. The caller must append fields in ascending order.
pub(crate) fn put_optional(into: &mut impl Buffer, number: u16, content: &[u8]) {
    put(into, number & !MANDATORY, content);
}

/// Appends a field that a reader must know.
pub(crate) fn put_mandatory(into: &mut impl Buffer, number: u16, content: &[u8]) {
    put(into, number | MANDATORY, content);
}

fn put(into: &mut impl Buffer, number: u16, content: &[u8]) {
    // The peer's limit rejects a message whose length does not fit here.
    let length = u32::try_from(content.len()).unwrap_or(u32::MAX);
    into.append(&number.to_le_bytes());
    into.append(&length.to_le_bytes());
    into.append(content);
}

/// Reads all fields of a message. `take` gets the number and content of each field; it returns
/// whether the field is optional or mandatory, or `None` if it does not know the number. Returns
/// the numbers of the ignored fields.
///
/// # Errors
/// [`WireError::UnknownField`] for a mandatory field that `take` does not know.
/// [`WireError::BadBody`] for fields that are truncated, out of order, repeated, marked mandatory
/// although they are optional (or the reverse), and for contents that `take` rejects.
pub(crate) fn read<'a>(
    message: &'static str,
    mut rest: &'a [u8],
    mut take: impl FnMut(u16, &'a [u8]) -> Result<Option<Need>, String>,
) -> Result<Vec<u16>, WireError> {
    let bad = |detail: String| WireError::BadBody { message, detail };
    let mut ignored = Vec::new();
    let mut last = None;
    while !rest.is_empty() {
        let Some((head, after_head)) = rest.split_at_checked(HEAD_BYTES) else {
            return Err(bad(format!("{} bytes are left over", rest.len())));
        };
        let tagged = u16::from_le_bytes(field(head, 0));
        let number = tagged & !MANDATORY;
        if last.is_some_and(|last| number <= last) {
            return Err(bad(format!("field {number} is out of order or repeated")));
        }
        last = Some(number);
        let length = u32::from_le_bytes(field(head, 2)) as usize;
        let Some((content, after_content)) = after_head.split_at_checked(length) else {
            let left = after_head.len();
            return Err(bad(format!("field {number} has {length} bytes, but {left} are left")));
        };
        let known =
            take(number, content).map_err(|detail| bad(format!("field {number}: {detail}")))?;
        let found = if tagged & MANDATORY == 0 { Need::Optional } else { Need::Mandatory };
        match (known, found) {
            (Some(known), found) if known != found => {
                return Err(bad(format!("field {number} is {found} and must be {known}")));
            }
            (Some(_), _) => {}
            (None, Need::Optional) => ignored.push(number),
            (None, Need::Mandatory) => {
                return Err(WireError::UnknownField { message, field: number });
            }
        }
        rest = after_content;
    }
    Ok(ignored)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reads fields with a reader that knows only field 3.
    fn read_all(bytes: &[u8]) -> Result<(Vec<u8>, Vec<u16>), WireError> {
        let mut third = Vec::new();
        let ignored = read("TEST", bytes, |number, content| {
            if number == 3 {
                third = content.to_vec();
            }
            Ok((number == 3).then_some(Need::Optional))
        })?;
        Ok((third, ignored))
    }

    /// Frozen with version 2.
    #[test]
    fn golden_bytes() {
        let mut bytes = Vec::new();
        put_optional(&mut bytes, 3, b"abc");
        put_mandatory(&mut bytes, 0x0104, b"");
        assert_eq!(bytes, b"\x03\x00\x03\x00\x00\x00abc\x04\x81\x00\x00\x00\x00");
        let error = read_all(&bytes).unwrap_err();
        assert_eq!(error, WireError::UnknownField { message: "TEST", field: 0x0104 });
        assert_eq!(read_all(&bytes[..9]), Ok((b"abc".to_vec(), vec![])));
    }

    #[test]
    fn read_refuses_fields_out_of_order_or_truncated() {
        let fields = |numbers: &[u16]| {
            let mut bytes = Vec::new();
            numbers.iter().for_each(|&number| put(&mut bytes, number, b"12"));
            bytes
        };
        assert_eq!(read_all(&fields(&[1, 3, 9])), Ok((b"12".to_vec(), vec![1, 9])));
        // The top bit is not part of the number.
        for numbers in [&[3, 1][..], &[3, 3], &[3, 3 | MANDATORY], &[5 | MANDATORY, 4], &[1, 1]] {
            let error = read_all(&fields(numbers)).unwrap_err().to_string();
            assert!(error.contains("field"), "{numbers:?}: {error}");
        }
        let whole = fields(&[3]);
        for cut in 1..whole.len() {
            assert!(matches!(read_all(&whole[..cut]), Err(WireError::BadBody { .. })), "{cut}");
        }
        let error = read_all(b"\x03\x00\xff\xff\xff\xff").unwrap_err().to_string();
        assert_eq!(error, "bad TEST: field 3 has 4294967295 bytes, but 0 are left");
    }

    #[test]
    fn read_checks_the_mandatory_bit() {
        let mut bytes = Vec::new();
        put_mandatory(&mut bytes, 3, b"abc");
        let error = read_all(&bytes).unwrap_err().to_string();
        assert_eq!(error, "bad TEST: field 3 is mandatory and must be optional");
    }

    proptest! {
        #[test]
        fn any_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = read_all(&bytes);
        }
    }
}
