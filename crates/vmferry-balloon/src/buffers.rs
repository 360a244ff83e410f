//! One buffer of a driver: its descriptor chain, checked whole before anything of it counts.

use std::ops::Deref;

use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// A place in guest memory that a descriptor names; nothing is known of it yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) start: u64,
    pub(crate) bytes: u32,
}

/// What a chain is made of. Used again and again, so that a buffer costs no allocation.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    /// For the device to read.
    pub(crate) readable: Vec<Segment>,
    /// For the device to write.
    pub(crate) writable: Vec<Segment>,
    content: Vec<u8>,
}

impl Buffer {
    /// Takes a chain's descriptors.
    ///
    /// A chain has at most as many descriptors as the queue has entries, also in a table of its own (section
    /// 2.7.5.3.1), and those for writing come last (section 2.7.4.2). `Err` says what is wrong.
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
        // The chain's iterator ends without a word at a loop, at an index outside the table, at a table that
        // can't be read, and beyond 4 GiB.
        if goes_on { Err("its descriptors have no end") } else { Ok(()) }
    }

    /// Descriptors of both directions.
    pub(crate) fn descriptors(&self) -> usize {
        self.readable.len() + self.writable.len()
    }

    /// Length of the part for reading, in bytes.
    pub(crate) fn readable_bytes(&self) -> u64 {
        self.readable.iter().map(|segment| u64::from(segment.bytes)).sum()
    }

    /// The first `limit` bytes of the part for reading; `Err` is the first segment that is not in memory.
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
