//! Keep-alive messages, which the nearest daemon answers and never passes on.
//!
//! Both libvirts send a ping after some seconds without a packet (`keepalive_interval`, 5 s) and
//! close the connection when several (`keepalive_count`, 5) have brought none
//! (`virKeepAliveTimerInternal` in `src/rpc/virkeepalive.c`). A daemon that answers them itself
//! keeps both connections open while the link between the daemons is down.

use crate::error::RpcError;
use crate::header::{HEADER_BYTES, PacketHeader, PacketKind, PacketStatus};
use crate::procedures::{KEEPALIVE_PROGRAM, KEEPALIVE_VERSION};

/// `KEEPALIVE_PROC_PING` in `src/rpc/virkeepaliveprotocol.x`.
const PING: i32 = 1;

/// `KEEPALIVE_PROC_PONG` in `src/rpc/virkeepaliveprotocol.x`.
const PONG: i32 = 2;

/// Whether a packet is a keep-alive message. Other kinds of packets of the program do not exist.
pub(crate) fn is_keepalive(header: &PacketHeader) -> bool {
    header.kind == PacketKind::Message && header.program == KEEPALIVE_PROGRAM
}

/// Reads a keep-alive message and appends the answer, if it is a ping. Such a message consists of
/// its header: `virKeepAliveMessage` in `src/rpc/virkeepalive.c` writes no payload, serial number 0
/// and the status "ok".
///
/// # Errors
/// [`RpcError::BadKeepAlive`].
pub(crate) fn answer(header: &PacketHeader, pongs: &mut Vec<u8>) -> Result<(), RpcError> {
    let &PacketHeader { bytes, version, procedure, serial, status, .. } = header;
    let good = version == KEEPALIVE_VERSION
        && (serial, status) == (0, PacketStatus::Ok)
        && header.payload_bytes() == 0;
    match procedure {
        PING if good => pongs.extend_from_slice(&pong()),
        PONG if good => {}
        _ => return Err(RpcError::BadKeepAlive { version, procedure, bytes }),
    }
    Ok(())
}

fn pong() -> [u8; HEADER_BYTES] {
    let header = PacketHeader {
        bytes: HEADER_BYTES as u32,
        program: KEEPALIVE_PROGRAM,
        version: KEEPALIVE_VERSION,
        procedure: PONG,
        kind: PacketKind::Message,
        serial: 0,
        status: PacketStatus::Ok,
    };
    header.encode()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packets::{KEEPALIVE, packet, ping, pong};

    fn read(packet: &[u8]) -> Result<Vec<u8>, RpcError> {
        let header = PacketHeader::parse(packet.first_chunk().unwrap()).unwrap();
        assert!(is_keepalive(&header));
        let mut pongs = Vec::new();
        answer(&header, &mut pongs).map(|()| pongs)
    }

    /// Frozen: if this test fails, the code is wrong.
    #[test]
    fn pong_has_golden_bytes() {
        let bytes = *b"\0\0\0\x1ckeep\0\0\0\x01\0\0\0\x02\0\0\0\x02\0\0\0\0\0\0\0\0";
        assert_eq!(super::pong(), bytes);
        assert_eq!(pong(), bytes);
    }

    #[test]
    fn ping_is_answered_and_pong_is_not() {
        assert_eq!(read(&ping()), Ok(pong()));
        assert_eq!(read(&pong()), Ok(Vec::new()));
    }

    #[test]
    fn keepalive_refuses_all_other_messages() {
        for header in [
            [KEEPALIVE, 2, 1, 2, 0, 0],
            [KEEPALIVE, 1, 0, 2, 0, 0],
            [KEEPALIVE, 1, 3, 2, 0, 0],
            [KEEPALIVE, 1, 1, 2, 1, 0],
            [KEEPALIVE, 1, 2, 2, 0, 1],
        ] {
            let refused = read(&packet(header, &[]));
            assert!(matches!(refused, Err(RpcError::BadKeepAlive { .. })), "{header:?}");
        }
        assert!(read(&packet([KEEPALIVE, 1, 1, 2, 0, 0], &[0; 4])).is_err());
    }

    #[test]
    fn keepalive_messages_are_only_of_the_kind_message() {
        for header in [[KEEPALIVE, 1, 1, 0, 0, 0], [KEEPALIVE + 1, 1, 1, 2, 0, 0]] {
            let packet = packet(header, &[]);
            let header = PacketHeader::parse(packet.first_chunk().unwrap()).unwrap();
            assert!(!is_keepalive(&header));
        }
    }
}
