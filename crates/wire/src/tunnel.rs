//! What a tunnel carries: the bytes of a VMM's own streams after the switchover with post-copy, in
//! both directions of a fetch lane.
//!
//! ```text
//!  0      2   4        8        16
//!  +------+---+--------+--------+-----------------
//!  | kind | 0 | length | offset | `length` bytes
//!  +------+---+--------+--------+-----------------
//! ```
//! DATA (1) has the bytes of a stream from this offset on. RECEIVED (2) has length 0, and says that
//! all bytes before this offset have arrived. It is the first thing that both sides send on a
//! channel, and each continues from there.

use crate::error::WireError;
use crate::field;

/// Length of the header.
pub const TUNNEL_HEADER_BYTES: usize = 16;

/// Maximum number of bytes after a header.
pub const MAX_TUNNEL_BYTES: u32 = 64 << 10;

const DATA: u16 = 1;
const RECEIVED: u16 = 2;

/// The header of a part of a tunnel's streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunnelHeader {
    /// Bytes of the stream follow.
    Data {
        /// Where they are in the stream.
        offset: u64,
        /// Their number, from 1 to [`MAX_TUNNEL_BYTES`].
        bytes: u32,
    },
    /// Bytes of the other direction's stream have arrived.
    Received {
        /// Their number since the stream's beginning.
        offset: u64,
    },
}

impl TunnelHeader {
    /// Encodes the header.
    #[must_use]
    pub fn encode(self) -> [u8; TUNNEL_HEADER_BYTES] {
        let (kind, length, offset) = match self {
            Self::Data { offset, bytes } => (DATA, bytes, offset),
            Self::Received { offset } => (RECEIVED, 0, offset),
        };
        let mut header = [0; TUNNEL_HEADER_BYTES];
        header[0..2].copy_from_slice(&kind.to_le_bytes());
        header[4..8].copy_from_slice(&length.to_le_bytes());
        header[8..16].copy_from_slice(&offset.to_le_bytes());
        header
    }

    /// Parses a header. Whether the offset is the expected one is for the caller to check.
    ///
    /// # Errors
    /// [`WireError::BadTunnel`] for an unknown kind, a length outside its limits, an offset that
    /// overflows, and reserved bytes that are not 0.
    pub fn parse(header: &[u8; TUNNEL_HEADER_BYTES]) -> Result<Self, WireError> {
        let (kind, reserved) = (u16::from_le_bytes(field(header, 0)), field::<2>(header, 2));
        let bytes = u32::from_le_bytes(field(header, 4));
        let offset = u64::from_le_bytes(field(header, 8));
        let bad = |what: String| Err(WireError::BadTunnel(what));
        if reserved != [0; 2] {
            return bad("its reserved bytes are not 0".into());
        }
        match kind {
            DATA if (1..=MAX_TUNNEL_BYTES).contains(&bytes) => {
                if offset.checked_add(bytes.into()).is_none() {
                    return bad(format!("{bytes} bytes at offset {offset}"));
                }
                Ok(Self::Data { offset, bytes })
            }
            DATA => bad(format!("{bytes} bytes at once")),
            RECEIVED if bytes == 0 => Ok(Self::Received { offset }),
            RECEIVED => bad(format!("{bytes} bytes after RECEIVED")),
            other => bad(format!("unknown kind {other}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes_of_headers() {
        let data = TunnelHeader::Data { offset: 0x0807_0605_0403_0201, bytes: 0x0000_ff0a };
        let bytes = [1, 0, 0, 0, 0x0a, 0xff, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(data.encode(), bytes);
        assert_eq!(TunnelHeader::parse(&bytes), Ok(data));
        let received = TunnelHeader::Received { offset: 9 };
        let bytes = [2, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(received.encode(), bytes);
        assert_eq!(TunnelHeader::parse(&bytes), Ok(received));
    }

    #[test]
    fn header_outside_its_limits_is_refused() {
        let data = |offset, bytes| TunnelHeader::Data { offset, bytes }.encode();
        let with = |at: usize, byte: u8| {
            let mut header = TunnelHeader::Received { offset: 1 }.encode();
            header[at] = byte;
            header
        };
        let bad = [
            data(0, 0),
            data(0, MAX_TUNNEL_BYTES + 1),
            data(u64::MAX, 1),
            with(0, 0),
            with(0, 3),
            with(2, 1),
            with(4, 1),
        ];
        for header in bad {
            let parsed = TunnelHeader::parse(&header);
            assert!(matches!(parsed, Err(WireError::BadTunnel(_))), "{header:?}: {parsed:?}");
        }
        assert!(TunnelHeader::parse(&data(u64::MAX - 1, 1)).is_ok());
        assert!(TunnelHeader::parse(&data(0, MAX_TUNNEL_BYTES)).is_ok());
    }
}
