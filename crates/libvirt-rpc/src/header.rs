//! The length word and header that begin every packet.

use crate::error::RpcError;

/// Length of a packet's length word. `VIR_NET_MESSAGE_LEN_MAX` in `src/rpc/virnetprotocol.x`.
pub const LENGTH_BYTES: usize = 4;

/// Length of the length word and the header: the shortest packet. The header is
/// `virNetMessageHeader` in `src/rpc/virnetprotocol.x`, six words.
pub const HEADER_BYTES: usize = LENGTH_BYTES + 24;

/// The longest message that libvirt accepts, without its length word: `VIR_NET_MESSAGE_MAX` in
/// `src/rpc/virnetprotocol.x`.
pub const MAX_MESSAGE_BYTES: u32 = 32 << 20;

/// The longest packet: [`MAX_MESSAGE_BYTES`] and the length word, which counts itself
/// (`virNetMessageDecodeLength` in `src/rpc/virnetmessage.c`).
pub const MAX_PACKET_BYTES: u32 = MAX_MESSAGE_BYTES + LENGTH_BYTES as u32;

/// What a packet is: `virNetMessageType` in `src/rpc/virnetprotocol.x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketKind {
    /// 0: a call of the client.
    Call,
    /// 1: a reply to a call.
    Reply,
    /// 2: a message without an answer: an event, or a keep-alive message of either side.
    Message,
    /// 3: data of a stream.
    Stream,
    /// 4: a call with file descriptors, which follow the packet on the socket.
    CallWithFds,
    /// 5: a reply with file descriptors.
    ReplyWithFds,
    /// 6: a hole in a stream.
    StreamHole,
}

impl PacketKind {
    fn parse(number: u32) -> Result<Self, RpcError> {
        Ok(match number {
            0 => Self::Call,
            1 => Self::Reply,
            2 => Self::Message,
            3 => Self::Stream,
            4 => Self::CallWithFds,
            5 => Self::ReplyWithFds,
            6 => Self::StreamHole,
            found => return Err(RpcError::UnknownKind { found }),
        })
    }
}

/// Whether a call or a stream succeeded, failed or continues: `virNetMessageStatus` in
/// `src/rpc/virnetprotocol.x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketStatus {
    /// 0: every call; a reply with a result; the end of a stream.
    Ok,
    /// 1: a reply with an error.
    Error,
    /// 2: a stream continues.
    Continue,
}

impl PacketStatus {
    fn parse(number: u32) -> Result<Self, RpcError> {
        Ok(match number {
            0 => Self::Ok,
            1 => Self::Error,
            2 => Self::Continue,
            found => return Err(RpcError::UnknownStatus { found }),
        })
    }
}

/// A packet's length word and header.
///
/// ```text
///  0        4         8         12          16     20       24       28
///  +--------+---------+---------+-----------+------+--------+--------+
///  | length | program | version | procedure | kind | serial | status | payload …
///  +--------+---------+---------+-----------+------+--------+--------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketHeader {
    /// Length of the whole packet, the length word included.
    pub bytes: u32,
    /// The program that the packet belongs to.
    pub program: u32,
    /// The program's version.
    pub version: u32,
    /// The procedure of the program. Signed, as in libvirt.
    pub procedure: i32,
    /// What the packet is.
    pub kind: PacketKind,
    /// The call's number, which its reply repeats. 0 in messages.
    pub serial: u32,
    /// Whether the call or the stream succeeded, failed or continues.
    pub status: PacketStatus,
}

impl PacketHeader {
    /// Bytes of the packet after its header.
    #[must_use]
    pub fn payload_bytes(&self) -> u32 {
        self.bytes.saturating_sub(HEADER_BYTES as u32)
    }

    /// Parses a packet's first bytes.
    ///
    /// # Errors
    /// [`RpcError::BadLength`], [`RpcError::UnknownKind`], [`RpcError::UnknownStatus`].
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, RpcError> {
        let mut words = [0; HEADER_BYTES / 4];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *word = u32::from_be_bytes(*bytes);
        }
        let [length, program, version, procedure, kind, serial, status] = words;
        if !(HEADER_BYTES as u32..=MAX_PACKET_BYTES).contains(&length) {
            return Err(RpcError::BadLength { bytes: length });
        }
        Ok(Self {
            bytes: length,
            program,
            version,
            procedure: procedure.cast_signed(),
            kind: PacketKind::parse(kind)?,
            serial,
            status: PacketStatus::parse(status)?,
        })
    }

    /// Encodes the length word and the header.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let words = [
            self.bytes,
            self.program,
            self.version,
            self.procedure.cast_unsigned(),
            self.kind as u32,
            self.serial,
            self.status as u32,
        ];
        let mut bytes = [0; HEADER_BYTES];
        for (bytes, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *bytes = word.to_be_bytes();
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: PacketHeader = PacketHeader {
        bytes: 0x1c,
        program: 0x2000_8086,
        version: 1,
        procedure: 0x42,
        kind: PacketKind::Call,
        serial: 7,
        status: PacketStatus::Ok,
    };

    /// Frozen: if this test fails, the code is wrong.
    #[test]
    fn header_has_golden_bytes() {
        let bytes = [
            0, 0, 0, 28, 0x20, 0, 0x80, 0x86, 0, 0, 0, 1, 0, 0, 0, 0x42, 0, 0, 0, 0, 0, 0, 0, 7, 0,
            0, 0, 0,
        ];
        assert_eq!(HEADER.encode(), bytes);
        assert_eq!(PacketHeader::parse(&bytes), Ok(HEADER));
        assert_eq!(HEADER.payload_bytes(), 0);
    }

    #[test]
    fn header_of_each_kind_and_status_survives() {
        for number in 0..7 {
            let kind = PacketKind::parse(number).unwrap();
            assert_eq!(kind as u32, number);
            for number in 0..3 {
                let status = PacketStatus::parse(number).unwrap();
                assert_eq!(status as u32, number);
                let header = PacketHeader { kind, status, procedure: -1, ..HEADER };
                assert_eq!(PacketHeader::parse(&header.encode()), Ok(header));
            }
        }
    }

    #[test]
    fn parse_refuses_bad_lengths() {
        for bytes in [0, 3, 4, 27, MAX_PACKET_BYTES + 1, u32::MAX] {
            let header = PacketHeader { bytes, ..HEADER };
            assert_eq!(PacketHeader::parse(&header.encode()), Err(RpcError::BadLength { bytes }));
        }
        for bytes in [28, MAX_PACKET_BYTES] {
            assert!(PacketHeader::parse(&PacketHeader { bytes, ..HEADER }.encode()).is_ok());
        }
    }

    #[test]
    fn parse_refuses_unknown_kinds_and_statuses() {
        let mut bytes = HEADER.encode();
        bytes[19] = 7;
        assert_eq!(PacketHeader::parse(&bytes), Err(RpcError::UnknownKind { found: 7 }));
        bytes[19] = 0;
        bytes[24] = 0x80;
        let error = RpcError::UnknownStatus { found: 0x8000_0000 };
        assert_eq!(PacketHeader::parse(&bytes), Err(error));
    }
}
