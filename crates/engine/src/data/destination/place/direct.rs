//! Receiving frames of uncompressed pages from a lane's channel directly into the guest's memory,
//! in the receiving thread.

use std::io::{self, BufRead, Cursor, Read};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vmferry_codec::{Frame, is_direct};
use vmferry_memory::PageSink;
use vmferry_transport::ChannelReader;
use vmferry_wire::{FrameHeader, FrameKind};

use super::{FrameReader, PlacedCounters, Placer, refused, run_belongs};
use crate::error::MigrateError;

/// A channel from which pages can be received in place.
pub trait PageSource: Read {
    /// The descriptor to read the next bytes from, if they may be read directly.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// Passes received bytes to `take`, as [`ChannelReader::read_in_place`] does.
    ///
    /// # Errors
    /// Those of a read.
    fn read_in_place(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<usize>;

    /// Records that bytes were read, possibly from the descriptor.
    fn note_read(&self, bytes: usize) {
        let _ = bytes;
    }
}

/// A lane's channel with a counter of the bytes received.
pub struct Arriving<R> {
    reader: R,
    placed: Arc<PlacedCounters>,
}

impl<R> Arriving<R> {
    /// Counts the bytes read from a channel.
    pub fn new(reader: R, placed: Arc<PlacedCounters>) -> Self {
        Self { reader, placed }
    }
}

impl<R: Read> Read for Arriving<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(into)?;
        self.placed.arrived.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl<R: PageSource> PageSource for Arriving<R> {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.reader.descriptor()
    }

    fn read_in_place(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<usize> {
        self.reader.read_in_place(take)
    }

    fn note_read(&self, bytes: usize) {
        self.placed.arrived.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl PageSource for ChannelReader {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Self::descriptor(self)
    }

    fn read_in_place(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<usize> {
        Self::read_in_place(self, take)
    }
}

impl<T: AsRef<[u8]>> PageSource for Cursor<T> {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn read_in_place(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<usize> {
        let taken = take(self.fill_buf()?);
        self.consume(taken);
        Ok(taken)
    }
}

/// Whether the receiving thread places a frame itself, because nothing in it has to be decoded.
pub fn is_placed_at_once(header: &FrameHeader) -> bool {
    header.kind == FrameKind::EndOfRound || is_direct(header)
}

impl Placer {
    /// Receives the rest of a frame [in place](is_placed_at_once). `frames` has read its head,
    /// which began at `offset`.
    ///
    /// # Errors
    /// [`MigrateError::Protocol`] as for [`place`](Self::place), but corrupt pages are in memory
    /// then. [`MigrateError::LinkLost`] at the channel's end; the whole frame must be sent again.
    pub fn receive<R: PageSource>(
        &mut self,
        frames: &mut FrameReader<R>,
        frame: &Frame,
        offset: u64,
    ) -> Result<(), MigrateError> {
        let (lane, lanes) = (frames.lane, self.lanes);
        let Self { memory, hashes, decoder, .. } = self;
        let mut sink = decoder
            .begin_direct(frame, memory, hashes, |run| run_belongs(run, lane, lanes))
            .map_err(|error| refused(error, lane, offset))?;
        let bytes = sink.left_bytes();
        let filled = fill(&mut sink, &mut frames.reader);
        frames.offset += (bytes - sink.left_bytes()) as u64;
        filled.map_err(|error| frames.lost(&error))?;
        let counts = decoder
            .finish_direct(frame, memory, hashes)
            .map_err(|error| refused(error, lane, offset))?;
        self.count(counts);
        Ok(())
    }
}

/// Fills a sink from a channel.
///
/// # Errors
/// The channel's error, including its end.
fn fill(sink: &mut PageSink<'_>, from: &mut impl PageSource) -> io::Result<()> {
    while sink.left_bytes() > 0 {
        let received = match from.descriptor() {
            Some(descriptor) => sink.read_from(descriptor),
            None => from.read_in_place(&mut |bytes| sink.put(bytes)),
        };
        match received {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => from.note_read(bytes),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageRun, SlotId, SlotLayout};

    use super::*;

    #[test]
    fn fill_takes_no_more_than_the_pages_hold() {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 2 }];
        let memory = GuestMemory::allocate(&layout, MemoryKind::Private).unwrap();
        let mut sink = memory.sink();
        sink.push(PageRun { slot: SlotId(0), first: 1, pages: 1 }).unwrap();
        let mut from = Cursor::new([7; PAGE_SIZE + 9]);
        fill(&mut sink, &mut from).unwrap();
        assert_eq!(from.fill_buf().unwrap(), [7; 9]);
        let mut sink = memory.sink();
        sink.push(PageRun { slot: SlotId(0), first: 0, pages: 1 }).unwrap();
        let error = fill(&mut sink, &mut from).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
