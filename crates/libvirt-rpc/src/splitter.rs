//! Divides a stream of bytes into packets, for both readers.

use crate::error::RpcError;
use crate::header::{HEADER_BYTES, LENGTH_BYTES, MAX_PACKET_BYTES, PacketHeader};

/// What happens to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handling {
    /// Its bytes are given to [`Policy::stream`] as they arrive.
    Stream,
    /// Its bytes are dropped.
    Skip,
    /// Its bytes are collected and given to [`Policy::end`]. The policy has checked the length.
    Collect,
}

/// What a reader does with the packets of its direction.
pub(crate) trait Policy {
    /// A header has been read.
    fn begin(&mut self, header: &PacketHeader) -> Result<Handling, RpcError>;

    /// Takes bytes of a streamed packet, its header first.
    fn stream(&mut self, bytes: &[u8]);

    /// A packet has ended. `packet` is a collected packet, header included, or empty.
    fn end(&mut self, header: &PacketHeader, packet: Vec<u8>);
}

/// The position in a stream of packets.
#[derive(Debug)]
pub(crate) struct Splitter {
    head: [u8; HEADER_BYTES],
    head_bytes: usize,
    body: Option<Body>,
    failed: Option<RpcError>,
}

#[derive(Debug)]
struct Body {
    header: PacketHeader,
    handling: Handling,
    left: usize,
    collected: Vec<u8>,
}

impl Splitter {
    pub(crate) fn new() -> Self {
        Self { head: [0; HEADER_BYTES], head_bytes: 0, body: None, failed: None }
    }

    /// Whether what was streamed and collected so far is whole packets. A packet that is dropped,
    /// or collected until it ends, does not count before its end.
    pub(crate) fn is_between_packets(&self) -> bool {
        let is_streaming = |body: &Body| body.handling == Handling::Stream;
        self.failed.is_none() && !self.body.as_ref().is_some_and(is_streaming)
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// The first error, then and on every later call.
    pub(crate) fn push(&mut self, bytes: &[u8], policy: &mut impl Policy) -> Result<(), RpcError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.split(bytes, policy).inspect_err(|error| self.failed = Some(error.clone()))
    }

    fn split(&mut self, mut bytes: &[u8], policy: &mut impl Policy) -> Result<(), RpcError> {
        while !bytes.is_empty() {
            bytes = match &mut self.body {
                None => self.take_head(bytes, policy)?,
                Some(body) => body.take(bytes, policy),
            };
            if let Some(body) = self.body.take_if(|body| body.left == 0) {
                policy.end(&body.header, body.collected);
            }
        }
        Ok(())
    }

    fn take_head<'a>(
        &mut self,
        bytes: &'a [u8],
        policy: &mut impl Policy,
    ) -> Result<&'a [u8], RpcError> {
        let (now, rest) = bytes.split_at(bytes.len().min(HEADER_BYTES - self.head_bytes));
        let end = self.head_bytes + now.len();
        self.head[self.head_bytes..end].copy_from_slice(now);
        self.head_bytes = end;
        if end < HEADER_BYTES {
            // What is not libvirt's RPC may never send a whole header.
            if end >= LENGTH_BYTES {
                check_length(&self.head)?;
            }
            return Ok(rest);
        }
        let header = PacketHeader::parse(&self.head)?;
        self.head_bytes = 0;
        let handling = policy.begin(&header)?;
        let mut collected = Vec::new();
        match handling {
            Handling::Stream => policy.stream(&self.head),
            Handling::Skip => {}
            Handling::Collect => collected.extend_from_slice(&self.head),
        }
        let left = header.payload_bytes() as usize;
        self.body = Some(Body { header, handling, left, collected });
        Ok(rest)
    }
}

impl Body {
    fn take<'a>(&mut self, bytes: &'a [u8], policy: &mut impl Policy) -> &'a [u8] {
        let (now, rest) = bytes.split_at(bytes.len().min(self.left));
        self.left -= now.len();
        match self.handling {
            Handling::Stream => policy.stream(now),
            Handling::Skip => {}
            Handling::Collect => self.collected.extend_from_slice(now),
        }
        rest
    }
}

fn check_length(head: &[u8; HEADER_BYTES]) -> Result<(), RpcError> {
    let [a, b, c, d, ..] = *head;
    let bytes = u32::from_be_bytes([a, b, c, d]);
    if (HEADER_BYTES as u32..=MAX_PACKET_BYTES).contains(&bytes) {
        return Ok(());
    }
    Err(RpcError::BadLength { bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packets::{call, ping};

    /// Notes what it is given. The procedure selects the handling.
    #[derive(Default)]
    struct Notes {
        streamed: Vec<u8>,
        ended: Vec<(i32, Vec<u8>)>,
    }

    impl Policy for Notes {
        fn begin(&mut self, header: &PacketHeader) -> Result<Handling, RpcError> {
            Ok(match header.procedure % 3 {
                0 => Handling::Stream,
                1 => Handling::Skip,
                _ => Handling::Collect,
            })
        }

        fn stream(&mut self, bytes: &[u8]) {
            self.streamed.extend_from_slice(bytes);
        }

        fn end(&mut self, header: &PacketHeader, packet: Vec<u8>) {
            self.ended.push((header.procedure, packet));
        }
    }

    #[test]
    fn splitter_handles_each_packet_in_any_chunks() {
        let packets =
            [call(3, 1, &[7; 9]), call(4, 2, &[8; 3]), call(5, 3, &[9; 5]), call(6, 4, &[])];
        let bytes = packets.concat();
        for size in 1..bytes.len() {
            let (mut splitter, mut notes) = (Splitter::new(), Notes::default());
            for chunk in bytes.chunks(size) {
                splitter.push(chunk, &mut notes).unwrap();
            }
            assert!(splitter.is_between_packets());
            assert_eq!(notes.streamed, [&packets[0][..], &packets[3]].concat());
            let none = Vec::new();
            let ended = [(3, none.clone()), (4, none.clone()), (5, packets[2].clone()), (6, none)];
            assert_eq!(notes.ended, ended);
        }
    }

    #[test]
    fn splitter_is_between_packets_unless_one_is_streamed() {
        let (mut splitter, mut notes) = (Splitter::new(), Notes::default());
        let packets = [call(3, 1, &[1; 8]), call(4, 2, &[1; 8]), call(5, 3, &[1; 8])].concat();
        for (at, byte) in packets.iter().enumerate() {
            // The header of the first packet is streamed when it is whole.
            assert_eq!(splitter.is_between_packets(), !(28..36).contains(&at), "{at}");
            splitter.push(&[*byte], &mut notes).unwrap();
        }
        assert!(splitter.is_between_packets());
    }

    #[test]
    fn splitter_refuses_other_protocols_at_once_and_for_good() {
        let (mut splitter, mut notes) = (Splitter::new(), Notes::default());
        assert_eq!(splitter.push(b"GET", &mut notes), Ok(()));
        let error = RpcError::BadLength { bytes: u32::from_be_bytes(*b"GET ") };
        assert_eq!(splitter.push(b" ", &mut notes), Err(error.clone()));
        assert_eq!(splitter.push(&ping(), &mut notes), Err(error));
        assert!(!splitter.is_between_packets());
    }

    #[test]
    fn splitter_stores_only_what_has_arrived() {
        let mut bytes = call(2, 1, &[]);
        bytes[..4].copy_from_slice(&MAX_PACKET_BYTES.to_be_bytes());
        let (mut splitter, mut notes) = (Splitter::new(), Notes::default());
        splitter.push(&bytes, &mut notes).unwrap();
        assert!(splitter.body.unwrap().collected.capacity() < 1 << 10);
    }
}
