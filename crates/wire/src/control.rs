//! The header of a control message, and the encoding and decoding of whole messages.

use std::io::Write;
use std::ops::DerefMut;

use vmferry_memory::GuestBytes;

use crate::error::WireError;
use crate::message::{ControlMessage, name_of};
use crate::number::FINAL;
use crate::{crc32c, field};

/// Length of the header before every control message.
pub const CONTROL_HEADER_BYTES: usize = 12;
/// Maximum body length of every message except FINAL.
pub const MAX_BODY_BYTES: u32 = 64 << 10;
/// Maximum body length of FINAL, which carries the device state. QEMU's device state is under 1
/// MiB; a machine with 1024 vCPUs and AMX state also fits.
pub const MAX_FINAL_BYTES: u32 = 64 << 20;

/// A checked header.
///
/// ```text
///  0            4      6   8                 12
///  +------------+------+---+-----------------+
///  | body bytes | type | 0 | CRC-32C of body |
///  +------------+------+---+-----------------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlHeader {
    body_bytes: u32,
    number: u16,
    checksum: u32,
}

impl ControlHeader {
    /// Parses a header and checks the body length against the limit of its type, before anything is
    /// allocated for the body.
    ///
    /// # Errors
    /// An unknown type, reserved bits, or a body that is too long.
    pub fn parse(bytes: &[u8; CONTROL_HEADER_BYTES]) -> Result<Self, WireError> {
        let header = Self {
            body_bytes: u32::from_le_bytes(field(bytes, 0)),
            number: u16::from_le_bytes(field(bytes, 4)),
            checksum: u32::from_le_bytes(field(bytes, 8)),
        };
        let message = name_of(header.number).ok_or(WireError::UnknownMessage(header.number))?;
        if bytes[6..8] != [0, 0] {
            return Err(WireError::Reserved("a control header"));
        }
        let limit = if header.number == FINAL { MAX_FINAL_BYTES } else { MAX_BODY_BYTES };
        if header.body_bytes > limit {
            return Err(WireError::TooLong {
                message,
                bytes: header.body_bytes.into(),
                limit: limit.into(),
            });
        }
        Ok(header)
    }

    /// The type's [number](crate::number).
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }

    /// The type's name, as in `docs/protocol.md`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        name_of(self.number).unwrap_or("UNKNOWN")
    }

    /// Length of the body in bytes.
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.body_bytes as usize
    }

    /// Decodes the message from its whole body. `version` is the protocol version that the
    /// channel's greeting negotiated.
    ///
    /// # Errors
    /// A checksum mismatch, a body that is not exactly this message, or an unknown mandatory field.
    pub fn decode(&self, version: u16, body: &[u8]) -> Result<Decoded, WireError> {
        self.check(body)?;
        let (message, ignored) = ControlMessage::decode_body(self.number, version, body)?;
        Ok(Decoded { message, ignored })
    }

    /// Like [`decode`](Self::decode), but consumes the body and keeps the state of FINAL in its
    /// memory, so that the state is never copied.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn decode_whole(&self, version: u16, body: GuestBytes) -> Result<Decoded, WireError> {
        self.check(&body)?;
        let (message, ignored) = ControlMessage::decode_whole(self.number, version, body)?;
        Ok(Decoded { message, ignored })
    }

    fn check(&self, body: &[u8]) -> Result<(), WireError> {
        let expected = crc32c(body);
        if body.len() != self.body_bytes() || expected != self.checksum {
            return Err(WireError::Checksum {
                what: name_of(self.number).unwrap_or("a message"),
                expected,
                found: self.checksum,
            });
        }
        Ok(())
    }
}

/// A decoded message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// The message.
    pub message: ControlMessage,
    /// The numbers of fields in the message that this release does not know.
    pub ignored: Vec<u16>,
}

/// A buffer that messages are appended to. Use [`GuestBytes`] where FINAL may be encoded, because
/// its state may hold secrets of the guest.
pub trait Buffer: Write + DerefMut<Target = [u8]> {
    /// Appends bytes.
    fn append(&mut self, bytes: &[u8]);
}

impl Buffer for Vec<u8> {
    fn append(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

impl Buffer for GuestBytes {
    fn append(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

impl ControlMessage {
    /// Appends the message with its header, in the form of a protocol version.
    pub fn encode(&self, version: u16, into: &mut impl Buffer) {
        let start = into.len();
        into.append(&[0; CONTROL_HEADER_BYTES]);
        self.encode_body(version, into);
        let (header, body) = into[start..].split_at_mut(CONTROL_HEADER_BYTES);
        // The peer's limit rejects a body whose length does not fit the header.
        let body_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
        header[0..4].copy_from_slice(&body_bytes.to_le_bytes());
        header[4..6].copy_from_slice(&self.number().to_le_bytes());
        header[8..12].copy_from_slice(&crc32c(body).to_le_bytes());
    }
}

#[cfg(test)]
mod tests;
