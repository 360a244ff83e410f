//! The reader of libvirt's replies.

use crate::calls::Call;
use crate::error::RpcError;
use crate::header::{HEADER_BYTES, PacketHeader, PacketKind, PacketStatus};
use crate::procedures::{REMOTE_PROGRAM, REMOTE_VERSION, procedure};
use crate::refusal::RemoteError;
use crate::splitter::{Handling, Policy, Splitter};

/// The most bytes of an error reply that are buffered. Longer errors are reported without their
/// text.
const MAX_ERROR_BYTES: u32 = 64 << 10;

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

/// Reads the replies of libvirt. The caller passes all bytes on itself. One per connection.
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

    /// Takes the next bytes of libvirt, in pieces of any size, and appends the awaited replies that
    /// end in them.
    ///
    /// # Errors
    /// The bytes are not libvirt's RPC. Later calls return the same error.
    pub fn push(&mut self, bytes: &[u8], out: &mut Vec<Reply>) -> Result<(), RpcError> {
        self.splitter.push(bytes, &mut Awaiting { awaited: &mut self.awaited, out })
    }

    /// Whether the bytes so far are whole packets, so that a refusal may follow them.
    #[must_use]
    pub fn is_between_packets(&self) -> bool {
        self.splitter.is_between_packets()
    }
}

struct Awaiting<'a> {
    awaited: &'a mut Vec<(u32, i32)>,
    out: &'a mut Vec<Reply>,
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
        let is_error = header.status == PacketStatus::Error && header.kind == PacketKind::Reply;
        let collect = is_error
            && header.payload_bytes() <= MAX_ERROR_BYTES
            && self.position(header).is_some();
        Ok(if collect { Handling::Collect } else { Handling::Skip })
    }

    fn stream(&mut self, _: &[u8]) {}

    fn end(&mut self, header: &PacketHeader, packet: Vec<u8>) {
        let Some(at) = self.position(header) else { return };
        let (serial, procedure) = self.awaited.remove(at);
        let result = match header.status {
            PacketStatus::Ok => Ok(()),
            _ => Err(remote_error(packet.get(HEADER_BYTES..).unwrap_or_default())),
        };
        self.out.push(match procedure {
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
    use crate::packets::{REMOTE, finish, packet, ping, prepare, reply};
    use crate::{CallWatch, Watched, refusal};

    fn calls() -> Vec<Call> {
        let (mut watch, mut out) = (CallWatch::new(), Watched::default());
        watch.push(&[prepare(5, "web"), finish(6, "web", 0)].concat(), &mut out).unwrap();
        out.calls
    }

    fn error(procedure: u32, serial: u32, message: &str) -> Vec<u8> {
        let call = reply(procedure, serial, 0, &[]);
        let header = PacketHeader::parse(call.first_chunk().unwrap()).unwrap();
        refusal(&header, message)
    }

    #[test]
    fn replies_are_reported_in_any_chunks() {
        let bytes = [
            ping(),
            reply(66, 5, 0, b"another procedure"),
            packet([REMOTE, 1, 303, 3, 5, 2], b"a stream"),
            packet([0x2000_8087, 1, 303, 1, 5, 0], b"another program"),
            reply(303, 5, 0, b"cookie"),
            reply(303, 5, 0, b"the same serial number again"),
            error(306, 6, "it died"),
        ]
        .concat();
        let result = Err(RemoteError { code: 29, domain: 7, message: "it died".into() });
        let expected = [
            Reply::Prepare(PrepareReply { serial: 5, result: Ok(()) }),
            Reply::Finish(FinishReply { serial: 6, result }),
        ];
        for size in 1..bytes.len() {
            let (mut watch, mut replies) = (ReplyWatch::new(), Vec::new());
            for call in calls() {
                watch.expect(&call).unwrap();
            }
            for chunk in bytes.chunks(size) {
                watch.push(chunk, &mut replies).unwrap();
            }
            assert_eq!(replies, expected);
            assert!(watch.is_between_packets());
        }
    }

    #[test]
    fn error_that_cannot_be_read_is_still_an_error() {
        for payload in [&[][..], &[1; 6], &vec![0; MAX_ERROR_BYTES as usize + 4]] {
            let (mut watch, mut replies) = (ReplyWatch::new(), Vec::new());
            watch.expect(&calls()[0]).unwrap();
            watch.push(&reply(303, 5, 1, payload), &mut replies).unwrap();
            let [Reply::Prepare(PrepareReply { serial: 5, result: Err(error) })] = &replies[..]
            else {
                panic!("{replies:?}");
            };
            assert!(error.message.contains("cannot read"), "{error:?}");
        }
    }

    #[test]
    fn reply_of_a_call_is_reported_after_its_last_byte() {
        let (mut watch, mut replies) = (ReplyWatch::new(), Vec::new());
        watch.expect(&calls()[0]).unwrap();
        let bytes = reply(303, 5, 0, b"cookie");
        let (last, first) = bytes.split_last().unwrap();
        watch.push(first, &mut replies).unwrap();
        assert!(replies.is_empty() && !watch.is_between_packets());
        watch.push(&[*last], &mut replies).unwrap();
        assert!(replies.len() == 1 && watch.is_between_packets());
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
