//! The reader of libvirt's replies.

use crate::calls::Call;
use crate::error::RpcError;
use crate::header::{HEADER_BYTES, PacketHeader, PacketKind, PacketStatus};
use crate::keepalive;
use crate::procedures::{REMOTE_PROGRAM, REMOTE_VERSION, procedure};
use crate::refusal::RemoteError;
use crate::splitter::{Handling, Policy, Splitter};

/// The most bytes of an awaited reply's payload. Real ones have 1 to 20 KiB, most of it the cookie.
/// A longer one ends the connection.
pub const MAX_REPLY_BYTES: u32 = 1 << 20;

/// The most replies that are awaited. A client that calls more often without a reply does not
/// migrate.
const MAX_AWAITED: usize = 256;

/// A reply of interest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To a Prepare.
    Prepare(PrepareReply),
    /// To a Finish.
    Finish(FinishReply),
}

/// The reply to a Prepare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrepareReply {
    /// The serial number of the call.
    pub serial: u32,
    /// Whether the guest's QEMU waits for the migration.
    pub result: Result<(), RemoteError>,
}

/// The reply to a Finish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishReply {
    /// The serial number of the call.
    pub serial: u32,
    /// Whether the guest runs at the destination. The reply to a canceled Finish is an error, too:
    /// `VIR_ERR_MIGRATE_FINISH_OK` if the guest was removed as demanded
    /// (`qemuMigrationSrcPerformPeer2Peer3` in `src/qemu/qemu_migration.c` distinguishes it).
    pub result: Result<(), RemoteError>,
}

/// What [`ReplyWatch::push`] appends to. The caller takes it out.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Bytes for the client.
    pub bytes: Vec<u8>,
    /// Awaited replies that end in `bytes`, in order. The caller must act on them before it writes
    /// `bytes`.
    pub replies: Vec<Reply>,
    /// Answers to libvirt's pings, whole packets. They may be sent to libvirt only between two
    /// packets of the calls ([`CallGate::is_between_packets`](crate::CallGate)).
    pub pongs: Vec<u8>,
}

/// Reads the replies of libvirt. One per connection.
///
/// - Awaited replies pass whole, so that a connection which breaks inside of one can still be
///   answered by [`finish_reply`](crate::finish_reply).
/// - Keep-alive messages are dropped, and pings are answered.
/// - Everything else passes as it arrives.
#[derive(Debug)]
pub struct ReplyWatch {
    splitter: Splitter,
    /// Serial number and procedure of each call whose reply is awaited.
    awaited: Vec<(u32, i32)>,
}

impl Default for ReplyWatch {
    fn default() -> Self {
        Self::new()
    }
}

impl ReplyWatch {
    /// A watch at the beginning of a connection.
    #[must_use]
    pub fn new() -> Self {
        Self { splitter: Splitter::new(), awaited: Vec::new() }
    }

    /// Awaits the reply to a call, which must be announced before the call is passed on.
    ///
    /// # Errors
    /// [`RpcError::TooManyAwaited`], which must end the connection.
    pub fn expect(&mut self, call: &Call) -> Result<(), RpcError> {
        if self.awaited.len() >= MAX_AWAITED {
            return Err(RpcError::TooManyAwaited { calls: MAX_AWAITED });
        }
        let procedure = match call {
            Call::Prepare(_) => procedure::PREPARE3_PARAMS,
            Call::Finish(_) => procedure::FINISH3_PARAMS,
        };
        self.awaited.push((call.serial(), procedure));
        Ok(())
    }

    /// Takes the next bytes of libvirt, in pieces of any size, and appends the results.
    ///
    /// # Errors
    /// The bytes are not libvirt's RPC. What was appended before is valid. Later calls return the
    /// same error.
    pub fn push(&mut self, bytes: &[u8], out: &mut Heard) -> Result<(), RpcError> {
        self.splitter.push(bytes, &mut Awaiting { awaited: &mut self.awaited, out })
    }

    /// Whether [`Heard::bytes`] so far are whole packets, so that a refusal or an answer to a ping
    /// ([`Passed`](crate::Passed)) may follow them.
    #[must_use]
    pub fn is_between_packets(&self) -> bool {
        self.splitter.is_between_packets()
    }
}

struct Awaiting<'a> {
    awaited: &'a mut Vec<(u32, i32)>,
    out: &'a mut Heard,
}

impl Awaiting<'_> {
    fn position(&self, header: &PacketHeader) -> Option<usize> {
        let is_reply = matches!(header.kind, PacketKind::Reply | PacketKind::ReplyWithFds)
            && (header.program, header.version) == (REMOTE_PROGRAM, REMOTE_VERSION);
        let key = (header.serial, header.procedure);
        if is_reply { self.awaited.iter().position(|awaited| *awaited == key) } else { None }
    }
}

impl Policy for Awaiting<'_> {
    fn begin(&mut self, header: &PacketHeader) -> Result<Handling, RpcError> {
        if keepalive::is_keepalive(header) {
            keepalive::answer(header, &mut self.out.pongs)?;
            return Ok(Handling::Skip);
        }
        if self.position(header).is_none() {
            return Ok(Handling::Stream);
        }
        // The caller may have to write such a reply itself, so no part of it may pass alone.
        let (bytes, limit) = (header.payload_bytes(), MAX_REPLY_BYTES);
        if header.kind != PacketKind::Reply || bytes > limit {
            return Err(RpcError::TooLarge { call: "a reply", bytes, limit });
        }
        Ok(Handling::Collect)
    }

    fn stream(&mut self, bytes: &[u8]) {
        self.out.bytes.extend_from_slice(bytes);
    }

    fn end(&mut self, header: &PacketHeader, packet: Vec<u8>) {
        self.out.bytes.extend_from_slice(&packet);
        let Some(at) = self.position(header) else { return };
        let (serial, procedure) = self.awaited.remove(at);
        let result = match header.status {
            PacketStatus::Ok => Ok(()),
            _ => Err(remote_error(packet.get(HEADER_BYTES..).unwrap_or_default())),
        };
        self.out.replies.push(match procedure {
            procedure::PREPARE3_PARAMS => Reply::Prepare(PrepareReply { serial, result }),
            _ => Reply::Finish(FinishReply { serial, result }),
        });
    }
}

/// The error of a reply. That there is one is certain, even if its text cannot be read.
fn remote_error(payload: &[u8]) -> RemoteError {
    RemoteError::parse(payload).unwrap_or_else(|error| RemoteError {
        code: 0,
        domain: 0,
        message: format!("libvirt replied with an error that vmferry cannot read: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packets::{KEEPALIVE, REMOTE, finish, packet, ping, pong, prepare, reply};
    use crate::refusal::denial;
    use crate::{CallGate, Passed};

    fn calls() -> Vec<Call> {
        let (mut gate, mut out) = (CallGate::new(Box::new(|_| Ok(()))), Passed::default());
        gate.push(&[prepare(5, "web"), finish(6, "web", 0)].concat(), &mut out).unwrap();
        out.calls
    }

    fn error(procedure: u32, serial: u32, message: &str) -> Vec<u8> {
        let call = reply(procedure, serial, 0, &[]);
        let header = PacketHeader::parse(call.first_chunk().unwrap()).unwrap();
        denial(&header, message)
    }

    #[test]
    fn replies_are_reported_in_any_chunks() {
        let packets = [
            ping(),
            reply(66, 5, 0, b"another procedure"),
            packet([REMOTE, 1, 303, 3, 5, 2], b"a stream"),
            packet([0x2000_8087, 1, 303, 1, 5, 0], b"another program"),
            packet([REMOTE, 1, 317, 2, 0, 0], b"an event"),
            pong(),
            reply(303, 5, 0, b"cookie"),
            reply(303, 5, 0, b"the same serial number again"),
            ping(),
            error(306, 6, "it died"),
        ];
        let bytes = packets.concat();
        let result = Err(RemoteError { code: 29, domain: 7, message: "it died".into() });
        let expected = Heard {
            bytes: [&packets[1..5], &packets[6..8], &packets[9..]].concat().concat(),
            replies: vec![
                Reply::Prepare(PrepareReply { serial: 5, result: Ok(()) }),
                Reply::Finish(FinishReply { serial: 6, result }),
            ],
            pongs: [pong(), pong()].concat(),
        };
        for size in 1..bytes.len() {
            let (mut watch, mut heard) = (ReplyWatch::new(), Heard::default());
            for call in calls() {
                watch.expect(&call).unwrap();
            }
            for chunk in bytes.chunks(size) {
                watch.push(chunk, &mut heard).unwrap();
            }
            assert_eq!(heard, expected);
            assert!(watch.is_between_packets());
        }
    }

    #[test]
    fn bad_keepalive_message_of_libvirt_ends_the_connection() {
        let (mut watch, mut heard) = (ReplyWatch::new(), Heard::default());
        let bytes = [reply(66, 1, 0, &[]), packet([KEEPALIVE, 1, 3, 2, 0, 0], &[])].concat();
        let error = RpcError::BadKeepAlive { version: 1, procedure: 3, bytes: 28 };
        assert_eq!(watch.push(&bytes, &mut heard), Err(error));
        assert_eq!(heard, Heard { bytes: reply(66, 1, 0, &[]), ..Heard::default() });
    }

    #[test]
    fn error_that_cannot_be_read_is_still_an_error() {
        for payload in [&[][..], &[1; 6]] {
            let (mut watch, mut heard) = (ReplyWatch::new(), Heard::default());
            watch.expect(&calls()[0]).unwrap();
            let bytes = reply(303, 5, 1, payload);
            watch.push(&bytes, &mut heard).unwrap();
            assert_eq!(heard.bytes, bytes);
            let [Reply::Prepare(PrepareReply { serial: 5, result: Err(error) })] =
                &heard.replies[..]
            else {
                panic!("{heard:?}");
            };
            assert!(error.message.contains("cannot read"), "{error:?}");
        }
    }

    #[test]
    fn awaited_reply_passes_whole() {
        let (mut watch, mut heard) = (ReplyWatch::new(), Heard::default());
        watch.expect(&calls()[0]).unwrap();
        let bytes = reply(303, 5, 0, b"cookie");
        let (last, first) = bytes.split_last().unwrap();
        watch.push(first, &mut heard).unwrap();
        assert!(heard == Heard::default() && watch.is_between_packets());
        watch.push(&[*last], &mut heard).unwrap();
        assert!(heard.bytes == bytes && heard.replies.len() == 1 && watch.is_between_packets());
    }

    #[test]
    fn other_packets_pass_as_they_arrive() {
        let (mut watch, mut heard) = (ReplyWatch::new(), Heard::default());
        watch.expect(&calls()[0]).unwrap();
        let bytes = reply(66, 5, 0, b"x");
        let (last, first) = bytes.split_last().unwrap();
        watch.push(first, &mut heard).unwrap();
        assert!(heard.bytes == first && heard.replies.is_empty());
        assert!(!watch.is_between_packets());
        watch.push(&[*last], &mut heard).unwrap();
        assert!(heard.bytes == bytes && watch.is_between_packets());
    }

    #[test]
    fn no_part_of_a_reply_that_cannot_pass_whole_passes() {
        let long = reply(303, 5, 0, &vec![0; MAX_REPLY_BYTES as usize + 4]);
        let with_fds = packet([REMOTE, 1, 303, 5, 5, 0], b"cookie");
        for bytes in [long, with_fds] {
            let (mut watch, mut heard) = (ReplyWatch::new(), Heard::default());
            watch.expect(&calls()[0]).unwrap();
            let read = watch.push(&bytes, &mut heard);
            assert!(matches!(read, Err(RpcError::TooLarge { call: "a reply", .. })), "{read:?}");
            assert_eq!(heard, Heard::default());
        }
    }

    #[test]
    fn expect_is_bounded() {
        let (mut watch, call) = (ReplyWatch::new(), &calls()[0]);
        for _ in 0..MAX_AWAITED {
            watch.expect(call).unwrap();
        }
        let error = RpcError::TooManyAwaited { calls: MAX_AWAITED };
        assert_eq!(watch.expect(call), Err(error));
    }
}
