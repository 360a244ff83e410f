//! The content of a call: gRPC messages of one protobuf type, `Packet` of `docs/vmferry.proto`.
//!
//! A gRPC library encodes each message into one buffer and decodes it from another, which copies
//! every byte twice more than the socket and the cipher do. This module copies data once, when it
//! is written after its header, and returns received data in the pieces that HTTP/2 delivers.

use bytes::{Buf, Bytes};

/// Maximum length of a message: gRPC's default limit of 4 MiB.
const MAX_MESSAGE_BYTES: u64 = 4 << 20;

/// Maximum length before the data of a message: gRPC's flag and length, the field's tag, and the
/// data's length.
pub const HEADER_BYTES: usize = 5 + 1 + 5;

/// `bytes data = 1`.
const DATA: u8 = 1 << 3 | 2;
/// `uint64 taken = 2`.
const TAKEN: u8 = 2 << 3;
/// `bool end = 3`.
const END: u8 = 3 << 3;

/// Appends the header of a message with `bytes` bytes of data.
pub fn put_data_header(message: &mut Vec<u8>, bytes: usize) {
    let mut field = [0; HEADER_BYTES];
    field[0] = DATA;
    let length = 1 + varint(bytes as u64, &mut field[1..]);
    put_prefix(message, length + bytes);
    message.extend_from_slice(&field[..length]);
}

/// A message that acknowledges `bytes` bytes, counted since the channel began.
pub fn taken(bytes: u64) -> Vec<u8> {
    let mut field = [0; 11];
    field[0] = TAKEN;
    let length = 1 + varint(bytes, &mut field[1..]);
    let mut message = Vec::with_capacity(5 + length);
    put_prefix(&mut message, length);
    message.extend_from_slice(&field[..length]);
    message
}

/// A message that announces the end of the data.
pub fn end() -> Vec<u8> {
    vec![0, 0, 0, 0, 2, END, 1]
}

/// Appends gRPC's prefix: the flag "not compressed" and the length of the message.
fn put_prefix(message: &mut Vec<u8>, length: usize) {
    message.push(0);
    let length = u32::try_from(length).expect("a message is at most a chunk long");
    message.extend_from_slice(&length.to_be_bytes());
}

fn varint(mut value: u64, into: &mut [u8]) -> usize {
    let mut length = 0;
    while value >= 0x80 {
        into[length] = (value & 0x7f) as u8 | 0x80;
        value >>= 7;
        length += 1;
    }
    into[length] = value as u8;
    length + 1
}

/// A decoded part of a call.
#[derive(Debug, PartialEq, Eq)]
pub enum Part {
    /// A part of a message's data.
    Data(Bytes),
    /// Total bytes that the peer's reader has consumed since the channel began.
    Taken(u64),
    /// No more data follows.
    End,
}

/// Bytes that are not a valid message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The message is compressed, although this side did not offer decompression.
    #[error("a message has the flag {flag}, and 0 is expected")]
    Flag {
        /// The flag that was sent.
        flag: u8,
    },
    /// The message is longer than gRPC allows.
    #[error("a message of {bytes} bytes is longer than 4 MiB")]
    TooLong {
        /// The announced length.
        bytes: u64,
    },
    /// The message is not a `Packet`.
    #[error("a message is not a vmferry.v1.Packet: {what}")]
    NoPacket {
        /// The problem.
        what: &'static str,
    },
    /// Data after the announced end.
    #[error("data follows the end")]
    AfterEnd,
}

/// Decodes messages from a stream of arbitrary pieces.
#[derive(Debug, Default)]
pub struct Decoder {
    step: Step,
    ended: bool,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// In the five bytes before a message.
    Prefix { read: u8, length: u32 },
    /// Before the tag of a message with `left` bytes.
    Tag { left: u32 },
    /// In the number after a tag.
    Number { tag: u8, left: u32, value: u64, shift: u32 },
    /// In the data.
    Data { left: u32 },
}

impl Default for Step {
    fn default() -> Self {
        Self::Prefix { read: 0, length: 0 }
    }
}

impl Decoder {
    /// The next part in `input`, or `None` when all of it was consumed.
    ///
    /// # Errors
    /// See [`MessageError`]. Decoding cannot continue after an error.
    pub fn next(&mut self, input: &mut Bytes) -> Result<Option<Part>, MessageError> {
        while !input.is_empty() {
            if let Step::Data { left } = self.step {
                let piece = input.split_to(input.len().min(left as usize));
                let left = left - piece.len() as u32;
                self.step = if left == 0 { Step::default() } else { Step::Data { left } };
                return Ok(Some(Part::Data(piece)));
            }
            if let Some(part) = self.header_byte(input.get_u8())? {
                return Ok(Some(part));
            }
        }
        Ok(None)
    }

    fn header_byte(&mut self, byte: u8) -> Result<Option<Part>, MessageError> {
        let no_packet = |what| MessageError::NoPacket { what };
        match self.step {
            Step::Prefix { read: 0, .. } => match byte {
                0 => self.step = Step::Prefix { read: 1, length: 0 },
                flag => return Err(MessageError::Flag { flag }),
            },
            Step::Prefix { read, length } => {
                let length = length << 8 | u32::from(byte);
                self.step = match read {
                    4 if u64::from(length) > MAX_MESSAGE_BYTES => {
                        return Err(MessageError::TooLong { bytes: length.into() });
                    }
                    4 if length == 0 => return Err(no_packet("it is empty")),
                    4 => Step::Tag { left: length },
                    _ => Step::Prefix { read: read + 1, length },
                };
            }
            Step::Tag { left } => match byte {
                // Acknowledgements concern the other direction.
                DATA | END if self.ended => return Err(MessageError::AfterEnd),
                DATA | TAKEN | END if left > 1 => {
                    self.step = Step::Number { tag: byte, left: left - 1, value: 0, shift: 0 };
                }
                DATA | TAKEN | END => return Err(no_packet("a field has no value")),
                _ => return Err(no_packet("unknown field")),
            },
            Step::Number { tag, left, value, shift } => {
                let digit = u64::from(byte & 0x7f);
                if shift > 63 || (shift == 63 && digit > 1) {
                    return Err(no_packet("a number has more than 64 bits"));
                }
                let (value, left) = (value | digit << shift, left - 1);
                if byte & 0x80 == 0 {
                    return self.number(tag, value, left);
                }
                if left == 0 {
                    return Err(no_packet("a number is truncated"));
                }
                self.step = Step::Number { tag, left, value, shift: shift + 7 };
            }
            Step::Data { .. } => unreachable!("data is handed out before headers are looked at"),
        }
        Ok(None)
    }

    /// Handles a complete number. `left` bytes of the message follow it.
    fn number(&mut self, tag: u8, value: u64, left: u32) -> Result<Option<Part>, MessageError> {
        let no_packet = |what| Err(MessageError::NoPacket { what });
        if tag == DATA {
            if value != u64::from(left) {
                return no_packet("its data does not fill the message");
            }
            self.step = if left == 0 { Step::default() } else { Step::Data { left } };
            return Ok(None);
        }
        if left > 0 {
            return no_packet("it has more than one field");
        }
        self.step = Step::default();
        match (tag, value) {
            (TAKEN, bytes) => Ok(Some(Part::Taken(bytes))),
            (_, 1) => {
                self.ended = true;
                Ok(Some(Part::End))
            }
            _ => no_packet("the value of its end is not 1"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn data(bytes: &[u8]) -> Vec<u8> {
        let mut message = Vec::new();
        put_data_header(&mut message, bytes.len());
        message.extend_from_slice(bytes);
        message
    }

    fn decode(mut bytes: &[u8], piece: usize) -> Result<Vec<Part>, MessageError> {
        let (mut decoder, mut parts) = (Decoder::default(), Vec::new());
        while !bytes.is_empty() {
            let (head, tail) = bytes.split_at(bytes.len().min(piece));
            let mut input = Bytes::copy_from_slice(head);
            while let Some(part) = decoder.next(&mut input)? {
                match (parts.last_mut(), part) {
                    (Some(Part::Data(before)), Part::Data(more)) => {
                        *before = [&before[..], &more].concat().into();
                    }
                    (_, part) => parts.push(part),
                }
            }
            bytes = tail;
        }
        Ok(parts)
    }

    #[test]
    fn encoding_is_that_of_protobuf_and_grpc() {
        assert_eq!(data(b"abc"), b"\0\0\0\0\x05\x0a\x03abc");
        assert_eq!(data(&[7; 300])[..8], [0, 0, 0, 1, 47, 0x0a, 0xac, 2]);
        assert_eq!(taken(300), [0, 0, 0, 0, 3, 0x10, 0xac, 2]);
        assert_eq!(end(), [0, 0, 0, 0, 2, 0x18, 1]);
        assert_eq!(taken(u64::MAX).len(), 16);
    }

    proptest! {
        #[test]
        fn decoder_returns_what_was_encoded_for_any_piece_size(
            first in prop::collection::vec(any::<u8>(), 1..600),
            count: u64,
            piece in 1..700_usize,
        ) {
            let bytes =
                [data(&first), taken(count), data(b""), data(b"x"), end(), taken(7)].concat();
            let expected =
                [
                    Part::Data(first.into()),
                    Part::Taken(count),
                    Part::Data("x".into()),
                    Part::End,
                    Part::Taken(7),
                ];
            prop_assert_eq!(decode(&bytes, piece).unwrap(), expected);
        }

        #[test]
        fn decoder_never_panics(
            bytes in prop::collection::vec(any::<u8>(), 0..64),
            piece in 1..9_usize,
        ) {
            let _ = decode(&bytes, piece);
            let _ = decode(&[&[0, 0, 0, 0][..], &bytes].concat(), piece);
        }
    }

    #[test]
    fn decoder_refuses_invalid_packets() {
        for (bytes, expected) in [
            (&[1, 0, 0, 0, 2, END, 1][..], "flag 1"),
            (&[0, 0xff, 0, 0, 0], "longer than 4 MiB"),
            (&[0, 0, 0, 0, 0], "it is empty"),
            (&[0, 0, 0, 0, 2, 0x20, 1], "unknown field"),
            (&[0, 0, 0, 0, 1, DATA], "no value"),
            (&[0, 0, 0, 0, 3, DATA, 2, 0], "does not fill"),
            (&[0, 0, 0, 0, 3, END, 1, 0], "more than one field"),
            (&[0, 0, 0, 0, 2, END, 0], "the value of its end is not 1"),
            (&[0, 0, 0, 0, 2, TAKEN, 0x80], "truncated"),
            (&[0, 0, 0, 0, 2, END, 1, 0, 0, 0, 0, 2, DATA, 0], "follows the end"),
            (
                &[0, 0, 0, 0, 11, TAKEN, 255, 255, 255, 255, 255, 255, 255, 255, 255, 2],
                "more than 64 bits",
            ),
        ] {
            let error = decode(bytes, 1).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
