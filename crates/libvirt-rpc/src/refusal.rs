//! libvirt's error reply.

use crate::error::RpcError;
use crate::header::{HEADER_BYTES, PacketHeader, PacketKind, PacketStatus};
use crate::params::MAX_STRING_BYTES;
use crate::xdr::{Reader, put_string, put_u32};

/// What the message of every refusal begins with, so that a client can tell it from libvirt's own
/// errors.
pub const REFUSED: &str = "vmferry refused: ";

/// The longest message of a refusal. Longer ones are cut.
pub const MAX_MESSAGE_TEXT_BYTES: usize = 2 << 10;

/// `VIR_ERR_OPERATION_DENIED` in `include/libvirt/virterror.h`, which libvirt itself answers to
/// calls that a read-only connection forbids.
const OPERATION_DENIED: u32 = 29;

/// `VIR_FROM_RPC` in `include/libvirt/virterror.h`.
const FROM_RPC: u32 = 7;

/// `VIR_ERR_ERROR` in `include/libvirt/virterror.h`.
const LEVEL_ERROR: u32 = 2;

/// The reply that refuses a call: `virNetMessageError` of `src/rpc/virnetprotocol.x`, in the form
/// that `virNetServerProgramSendReplyError` in `src/rpc/virnetserverprogram.c` sends. The calling
/// libvirt shows the message as it is, which is `reason` after [`REFUSED`]. Control characters
/// become spaces, and a message longer than [`MAX_MESSAGE_TEXT_BYTES`] is cut.
#[must_use]
pub fn refusal(header: &PacketHeader, reason: &str) -> Vec<u8> {
    denial(header, &format!("{REFUSED}{reason}"))
}

/// The same with any message.
pub(crate) fn denial(header: &PacketHeader, message: &str) -> Vec<u8> {
    error_reply(header, OPERATION_DENIED, FROM_RPC, message)
}

/// The reply to a call with any error, in the form of a [`refusal`].
pub(crate) fn error_reply(header: &PacketHeader, code: u32, domain: u32, message: &str) -> Vec<u8> {
    let message = message.replace(char::is_control, " ");
    let end = message.floor_char_boundary(MAX_MESSAGE_TEXT_BYTES);
    let mut payload = Vec::new();
    put_u32(&mut payload, code);
    put_u32(&mut payload, domain);
    put_u32(&mut payload, 1);
    put_string(&mut payload, &message[..end]);
    put_u32(&mut payload, LEVEL_ERROR);
    // No domain, no further strings, no numbers, no network.
    for _ in 0..7 {
        put_u32(&mut payload, 0);
    }
    let header = PacketHeader {
        bytes: (HEADER_BYTES + payload.len()) as u32,
        kind: PacketKind::Reply,
        status: PacketStatus::Error,
        ..*header
    };
    [&header.encode()[..], &payload].concat()
}

/// An error that libvirt replied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteError {
    /// `virErrorNumber` in `include/libvirt/virterror.h`.
    pub code: i32,
    /// `virErrorDomain` in `include/libvirt/virterror.h`.
    pub domain: i32,
    /// The message, empty if there is none.
    pub message: String,
}

impl RemoteError {
    /// Reads the beginning of a `virNetMessageError`, which contains what matters.
    pub(crate) fn parse(payload: &[u8]) -> Result<Self, RpcError> {
        let mut reader = Reader::new(payload);
        let code = reader.i32("the error's code")?;
        let domain = reader.i32("the error's domain")?;
        let message = match reader.flag("whether a message follows")? {
            true => reader.opaque(MAX_STRING_BYTES, "the error's message")?,
            false => &[],
        };
        Ok(Self { code, domain, message: String::from_utf8_lossy(message).into_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: PacketHeader = PacketHeader {
        bytes: 99,
        program: 0x2000_8086,
        version: 1,
        procedure: 11,
        kind: PacketKind::Call,
        serial: 5,
        status: PacketStatus::Ok,
    };

    /// Frozen: if this test fails, the code is wrong.
    #[test]
    fn refusal_has_golden_bytes() {
        let words = [
            28 + 17 * 4,
            0x2000_8086,
            1,
            11,
            // A reply.
            1,
            5,
            // An error.
            1,
            29,
            7,
            1,
            19,
            u32::from_be_bytes(*b"vmfe"),
            u32::from_be_bytes(*b"rry "),
            u32::from_be_bytes(*b"refu"),
            u32::from_be_bytes(*b"sed:"),
            u32::from_be_bytes(*b" no\0"),
            2,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        ];
        let bytes: Vec<u8> = words.iter().flat_map(|word: &u32| word.to_be_bytes()).collect();
        assert_eq!(refusal(&CALL, "no"), bytes);
    }

    /// Reads every field, as libvirt does.
    #[test]
    fn refusal_decodes_as_libvirt_would() {
        let message = format!("a\0b\n{}", "é".repeat(MAX_MESSAGE_TEXT_BYTES));
        let bytes = refusal(&CALL, &message);
        let (header, payload) = bytes.split_first_chunk().unwrap();
        let header = PacketHeader::parse(header).unwrap();
        assert_eq!(header.bytes as usize, bytes.len());
        assert_eq!((header.kind, header.status), (PacketKind::Reply, PacketStatus::Error));
        assert_eq!((header.serial, header.procedure), (5, 11));
        let mut reader = Reader::new(payload);
        assert_eq!(reader.i32("code"), Ok(29));
        assert_eq!(reader.i32("domain"), Ok(7));
        assert_eq!(reader.flag("message"), Ok(true));
        let text = reader.string(MAX_STRING_BYTES, "message").unwrap();
        assert!(
            text.starts_with("vmferry refused: a b éé") && text.len() <= MAX_MESSAGE_TEXT_BYTES,
            "{text}"
        );
        assert_eq!(reader.i32("level"), Ok(2));
        for field in ["dom", "str1", "str2", "str3"] {
            assert_eq!(reader.flag(field), Ok(false));
        }
        assert_eq!((reader.i32("int1"), reader.i32("int2")), (Ok(0), Ok(0)));
        assert_eq!(reader.flag("net"), Ok(false));
        assert_eq!(reader.end(), Ok(()));
        let error = RemoteError { code: 29, domain: 7, message: text.to_owned() };
        assert_eq!(RemoteError::parse(payload), Ok(error));
    }
}
