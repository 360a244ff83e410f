//! One buffer of a driver: its descriptor chain, checked as a whole before it is used.

use std::ops::Deref;

use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// A range of guest memory that a descriptor names. It is not checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) start: u64,
    pub(crate) bytes: u32,
}

/// The contents of a descriptor chain. It is reused, so that a buffer costs no allocation.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    /// Device-readable segments.
    pub(crate) readable: Vec<Segment>,
    /// Device-writable segments.
    pub(crate) writable: Vec<Segment>,
    content: Vec<u8>,
}

impl Buffer {
    /// Reads a chain's descriptors.
    ///
    /// A chain has at most as many descriptors as the queue has entries, even with an indirect
    /// table (section 2.7.5.3.1), and device-writable descriptors come last (section 2.7.4.2). The
    /// error is a text.
    pub(crate) fn take<M>(
        &mut self,
        chain: DescriptorChain<M>,
        queue_size: u16,
    ) -> Result<(), &'static str>
    where
        M: Deref,
        M::Target: GuestMemory,
    {
        self.readable.clear();
        self.writable.clear();
        let mut goes_on = true;
        for (index, descriptor) in chain.enumerate() {
            if index == usize::from(queue_size) {
                return Err("it has more descriptors than the queue has entries");
            }
            let segment = Segment { start: descriptor.addr().0, bytes: descriptor.len() };
            if descriptor.is_write_only() {
                self.writable.push(segment);
            } else if self.writable.is_empty() {
                self.readable.push(segment);
            } else {
                return Err("a descriptor for reading follows one for writing");
            }
            goes_on = descriptor.has_next();
        }
        // The chain's iterator ends without an error at a loop, at an index outside the table, at
        // an unreadable table, and beyond 4 GiB.
        if goes_on { Err("its descriptors have no end") } else { Ok(()) }
    }

    /// Number of descriptors of both directions.
    pub(crate) fn descriptors(&self) -> usize {
        self.readable.len() + self.writable.len()
    }

    /// Length of the device-readable part in bytes.
    pub(crate) fn readable_bytes(&self) -> u64 {
        self.readable.iter().map(|segment| u64::from(segment.bytes)).sum()
    }

    /// The first `limit` bytes of the device-readable part. The error is the first segment that is
    /// not in guest memory.
    pub(crate) fn content<M: GuestMemory + ?Sized>(
        &mut self,
        memory: &M,
        limit: usize,
    ) -> Result<&[u8], Segment> {
        self.content.clear();
        for segment in &self.readable {
            let old = self.content.len();
            let bytes = (segment.bytes as usize).min(limit - old);
            if bytes == 0 {
                continue;
            }
            self.content.resize(old + bytes, 0);
            memory
                .read_slice(&mut self.content[old..], GuestAddress(segment.start))
                .map_err(|_| *segment)?;
        }
        Ok(&self.content)
    }
}
