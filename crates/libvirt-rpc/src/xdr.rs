//! XDR (RFC 4506): integers, opaque data, strings and optional values in units of four bytes.

use crate::error::RpcError;

/// Reads the fields of a payload in order.
pub(crate) struct Reader<'a> {
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(payload: &'a [u8]) -> Self {
        Self { left: payload }
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, RpcError> {
        let mut word = [0; 4];
        word.copy_from_slice(self.take(4, what)?);
        Ok(u32::from_be_bytes(word))
    }

    pub(crate) fn i32(&mut self, what: &'static str) -> Result<i32, RpcError> {
        Ok(self.u32(what)?.cast_signed())
    }

    /// Skips an integer or a float of eight bytes.
    pub(crate) fn skip_u64(&mut self, what: &'static str) -> Result<(), RpcError> {
        self.take(8, what).map(drop)
    }

    /// A number that is only 0 or 1 on the wire: a boolean, or whether an optional value follows.
    pub(crate) fn flag(&mut self, what: &'static str) -> Result<bool, RpcError> {
        match self.u32(what)? {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(RpcError::BadValue { what, found: found.into() }),
        }
    }

    /// Variable-length opaque data of at most `limit` bytes, and its padding to four bytes.
    pub(crate) fn opaque(&mut self, limit: u32, what: &'static str) -> Result<&'a [u8], RpcError> {
        let bytes = self.u32(what)?;
        if bytes > limit {
            return Err(RpcError::TooLong { what, found: bytes.into(), limit: limit.into() });
        }
        let padded = u64::from(bytes).next_multiple_of(4);
        let field = self.take(padded, what)?;
        let (data, padding) = field.split_at(bytes as usize);
        if let Some(found) = padding.iter().find(|byte| **byte != 0) {
            return Err(RpcError::BadValue { what, found: (*found).into() });
        }
        Ok(data)
    }

    /// A string of at most `limit` bytes: UTF-8 without NUL, so that libvirt reads all of it.
    pub(crate) fn string(&mut self, limit: u32, what: &'static str) -> Result<&'a str, RpcError> {
        text(self.opaque(limit, what)?, what)
    }

    /// Demands that nothing follows.
    pub(crate) fn end(self) -> Result<(), RpcError> {
        match self.left.len() {
            0 => Ok(()),
            bytes => Err(RpcError::Leftover { bytes: bytes as u64 }),
        }
    }

    fn take(&mut self, bytes: u64, what: &'static str) -> Result<&'a [u8], RpcError> {
        let left = self.left.len() as u64;
        let at = usize::try_from(bytes).ok();
        let Some((field, rest)) = at.and_then(|at| self.left.split_at_checked(at)) else {
            return Err(RpcError::Truncated { what, needed: bytes, left });
        };
        self.left = rest;
        Ok(field)
    }
}

/// Demands UTF-8 without NUL.
pub(crate) fn text<'a>(bytes: &'a [u8], what: &'static str) -> Result<&'a str, RpcError> {
    let text = str::from_utf8(bytes)
        .map_err(|_| RpcError::NotText { what, found: "bytes that are not UTF-8" })?;
    if text.contains('\0') {
        return Err(RpcError::NotText { what, found: "NUL" });
    }
    Ok(text)
}

/// Appends a word.
pub(crate) fn put_u32(bytes: &mut Vec<u8>, word: u32) {
    bytes.extend_from_slice(&word.to_be_bytes());
}

/// Appends a string with its length and padding. The string must be shorter than 4 GiB.
pub(crate) fn put_string(bytes: &mut Vec<u8>, text: &str) {
    put_u32(bytes, text.len() as u32);
    bytes.extend_from_slice(text.as_bytes());
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reader_reads_what_was_put() {
        let mut bytes = Vec::new();
        put_u32(&mut bytes, 0xffff_fffe);
        for text in ["", "a", "abc", "abcd", "abcde"] {
            put_string(&mut bytes, text);
        }
        put_u32(&mut bytes, 1);
        let mut reader = Reader::new(&bytes);
        assert_eq!(reader.i32("number"), Ok(-2));
        for text in ["", "a", "abc", "abcd", "abcde"] {
            assert_eq!(reader.string(5, "text"), Ok(text));
        }
        assert_eq!(reader.flag("flag"), Ok(true));
        assert_eq!(reader.end(), Ok(()));
    }

    #[test]
    fn opaque_refuses_lengths_beyond_the_packet_or_the_limit() {
        let what = "data";
        let read = |bytes: &[u8], limit| Reader::new(bytes).opaque(limit, what).map(<[u8]>::to_vec);
        assert_eq!(read(&[0, 0], 9), Err(RpcError::Truncated { what, needed: 4, left: 2 }));
        let five = [0, 0, 0, 5, 1, 2, 3, 4, 5, 0, 0];
        assert_eq!(read(&five, 9), Err(RpcError::Truncated { what, needed: 8, left: 7 }));
        assert_eq!(read(&five, 4), Err(RpcError::TooLong { what, found: 5, limit: 4 }));
        let all = [0xff; 8];
        let error = RpcError::Truncated { what, needed: 1 << 32, left: 4 };
        assert_eq!(read(&all, u32::MAX), Err(error));
    }

    #[test]
    fn opaque_refuses_padding_that_is_not_zero() {
        let bytes = [0, 0, 0, 1, b'x', 0, 0, 9];
        let error = RpcError::BadValue { what: "data", found: 9 };
        assert_eq!(Reader::new(&bytes).opaque(9, "data"), Err(error));
    }

    #[test]
    fn string_refuses_nul_and_other_encodings() {
        let what = "text";
        let nul = [0, 0, 0, 2, b'x', 0, 0, 0];
        let found = "NUL";
        assert_eq!(Reader::new(&nul).string(9, what), Err(RpcError::NotText { what, found }));
        let latin = [0, 0, 0, 1, 0xe9, 0, 0, 0];
        let found = "bytes that are not UTF-8";
        assert_eq!(Reader::new(&latin).string(9, what), Err(RpcError::NotText { what, found }));
    }

    #[test]
    fn flag_refuses_other_numbers() {
        let error = RpcError::BadValue { what: "flag", found: 2 };
        assert_eq!(Reader::new(&[0, 0, 0, 2]).flag("flag"), Err(error));
    }

    #[test]
    fn end_refuses_leftover_bytes() {
        assert_eq!(Reader::new(&[1]).end(), Err(RpcError::Leftover { bytes: 1 }));
    }
}
