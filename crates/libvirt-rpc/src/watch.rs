//! The reader at the source, which refuses nothing.

use crate::calls::{Call, PrepareCall, PreparedGuests};
use crate::error::RpcError;
use crate::header::{HEADER_BYTES, PacketHeader, PacketKind};
use crate::procedures::{MAX_BUFFERED_BYTES, REMOTE_PROGRAM, REMOTE_VERSION, allowed, procedure};
use crate::splitter::{Handling, Policy, Splitter};

/// What [`CallWatch::push`] appends to. The caller takes it out.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Watched {
    /// Bytes for the destination: all that were pushed, but a Prepare or a Finish only whole.
    pub bytes: Vec<u8>,
    /// Calls of interest that are in `bytes`, in order.
    pub calls: Vec<Call>,
    /// Calls of interest that could not be read. They are in `bytes`, and the destination's
    /// [`CallGate`](crate::CallGate) refuses them.
    pub unread: Vec<UnreadCall>,
}

/// A Prepare or a Finish that could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadCall {
    /// The call's header.
    pub header: PacketHeader,
    /// What is wrong.
    pub error: RpcError,
}

/// Reads the calls of the source's libvirt and passes all of them on. One per connection.
///
/// A Prepare or a Finish is collected and known before it passes. Everything else passes as it
/// arrives.
#[derive(Debug)]
pub struct CallWatch {
    splitter: Splitter,
    prepared: PreparedGuests,
}

impl Default for CallWatch {
    fn default() -> Self {
        Self::new()
    }
}

impl CallWatch {
    /// A watch at the beginning of a connection.
    #[must_use]
    pub fn new() -> Self {
        Self { splitter: Splitter::new(), prepared: PreparedGuests::default() }
    }

    /// Takes the next bytes of libvirt, in pieces of any size, and appends the results.
    ///
    /// # Errors
    /// The bytes are not libvirt's RPC. What was appended before is valid. Later calls return the
    /// same error.
    pub fn push(&mut self, bytes: &[u8], out: &mut Watched) -> Result<(), RpcError> {
        self.splitter.push(bytes, &mut Watching { prepared: &mut self.prepared, out })
    }

    /// Whether the bytes so far are whole packets.
    #[must_use]
    pub fn is_between_packets(&self) -> bool {
        self.splitter.is_between_packets()
    }
}

struct Watching<'a> {
    prepared: &'a mut PreparedGuests,
    out: &'a mut Watched,
}

impl Policy for Watching<'_> {
    fn begin(&mut self, header: &PacketHeader) -> Result<Handling, RpcError> {
        let of_interest = header.kind == PacketKind::Call
            && (header.program, header.version) == (REMOTE_PROGRAM, REMOTE_VERSION)
            && [procedure::PREPARE3_PARAMS, procedure::FINISH3_PARAMS].contains(&header.procedure);
        let (bytes, limit) = (header.payload_bytes(), MAX_BUFFERED_BYTES);
        if !of_interest {
            return Ok(Handling::Stream);
        }
        if bytes > limit {
            let call = allowed(header.procedure).map_or("a call", |row| row.name);
            let error = RpcError::TooLarge { call, bytes, limit };
            self.out.unread.push(UnreadCall { header: *header, error });
            return Ok(Handling::Stream);
        }
        Ok(Handling::Collect)
    }

    fn stream(&mut self, bytes: &[u8]) {
        self.out.bytes.extend_from_slice(bytes);
    }

    fn end(&mut self, header: &PacketHeader, packet: Vec<u8>) {
        let Some(payload) = packet.get(HEADER_BYTES..) else { return };
        let call = if header.procedure == procedure::PREPARE3_PARAMS {
            PrepareCall::read(header.serial, payload).map(|call| {
                self.prepared.add(&call);
                Call::Prepare(Box::new(call))
            })
        } else {
            self.prepared.finish(header.serial, payload).map(Call::Finish)
        };
        match call {
            Ok(call) => self.out.calls.push(call),
            Err(error) => self.out.unread.push(UnreadCall { header: *header, error }),
        }
        self.out.bytes.extend_from_slice(&packet);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packets::{REMOTE, call, finish, packet, ping, prepare};

    #[test]
    fn watch_passes_everything_and_reports_calls() {
        let large = vec![0; MAX_BUFFERED_BYTES as usize + 4];
        let packets = [
            call(66, 1, &[]),
            prepare(2, "web"),
            call(303, 3, &[1, 2, 3]),
            call(11, 4, b"define"),
            ping(),
            packet([REMOTE, 1, 303, 3, 2, 2], b"stream"),
            call(303, 5, &large),
            finish(6, "db", 0),
            finish(7, "web", 0),
        ];
        let bytes = packets.concat();
        for size in [1 << 20, 4099, usize::MAX] {
            let (mut watch, mut out) = (CallWatch::new(), Watched::default());
            for chunk in bytes.chunks(size) {
                watch.push(chunk, &mut out).unwrap();
            }
            assert!(out.bytes == bytes && watch.is_between_packets());
            let calls: Vec<_> =
                out.calls.iter().map(|call| (call.serial(), call.guest())).collect();
            assert_eq!(calls.iter().map(|call| call.0).collect::<Vec<_>>(), [2, 7]);
            assert!(calls.iter().all(|call| call.1.name == "web"));
            let unread: Vec<_> = out.unread.iter().map(|unread| unread.header.serial).collect();
            assert_eq!(unread, [3, 5, 6]);
        }
    }

    #[test]
    fn watch_knows_a_call_before_its_bytes_pass() {
        let (mut watch, mut out) = (CallWatch::new(), Watched::default());
        let bytes = prepare(2, "web");
        let (last, first) = bytes.split_last().unwrap();
        watch.push(first, &mut out).unwrap();
        assert_eq!(out, Watched::default());
        watch.push(&[*last], &mut out).unwrap();
        assert_eq!((out.bytes.len(), out.calls.len()), (bytes.len(), 1));
    }
}
