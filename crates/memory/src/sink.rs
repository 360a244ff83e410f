//! Receiving pages directly into guest memory.
//!
//! Why `unsafe`: as in `copy.rs`, no Rust reference to guest memory may exist, so the kernel and
//! `memcpy` get raw addresses. Why sound: every run is checked against its slot when it is pushed;
//! the sink borrows the memory and so keeps the mappings; no write exceeds the bytes left in a
//! piece.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::copy::address;
use crate::error::MemoryError;
use crate::slots::GuestMemory;
use crate::units::{PAGE_SIZE, PageRun};

/// Pages of guest memory to be filled with incoming bytes, in the order in which they were pushed.
/// The sink does not allocate.
pub struct PageSink<'m> {
    pieces: [libc::iovec; PageSink::MOST_PIECES],
    /// The pieces that are not full. The next byte goes to the start of the first one.
    open: std::ops::Range<usize>,
    left_bytes: usize,
    memory: &'m GuestMemory,
}

impl GuestMemory {
    /// An empty sink for this memory.
    #[must_use]
    pub fn sink(&self) -> PageSink<'_> {
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        PageSink { pieces: [none; PageSink::MOST_PIECES], open: 0..0, left_bytes: 0, memory: self }
    }
}

impl PageSink<'_> {
    /// Maximum number of pieces in a sink. Adjacent runs are one piece.
    pub const MOST_PIECES: usize = 128;

    /// Appends pages.
    ///
    /// # Errors
    /// A run outside its slot, or more than 128 runs that are not adjacent.
    pub fn push(&mut self, run: PageRun) -> Result<(), MemoryError> {
        let slot = self.memory.check_run(run)?;
        let (start, bytes) = (address(slot, run), run.pages as usize * PAGE_SIZE);
        let last = self.open.end.checked_sub(1).filter(|last| *last >= self.open.start);
        let joined = last
            .map(|last| &mut self.pieces[last])
            .filter(|piece| piece.iov_base.cast::<u8>().wrapping_add(piece.iov_len) == start);
        if let Some(piece) = joined {
            piece.iov_len += bytes;
        } else if bytes > 0 {
            let piece = self.pieces.get_mut(self.open.end);
            let piece = piece.ok_or(MemoryError::TooManyPieces { most: Self::MOST_PIECES })?;
            *piece = libc::iovec { iov_base: start.cast(), iov_len: bytes };
            self.open.end += 1;
        }
        self.left_bytes += bytes;
        Ok(())
    }

    /// Number of bytes until all pages are full.
    #[must_use]
    pub fn left_bytes(&self) -> usize {
        self.left_bytes
    }

    /// Copies bytes into the pages, up to the space left, and returns the number of bytes copied.
    pub fn put(&mut self, mut bytes: &[u8]) -> usize {
        let before = self.left_bytes;
        while let Some(piece) = self.pieces[self.open.clone()].first().filter(|_| !bytes.is_empty())
        {
            let length = piece.iov_len.min(bytes.len());
            let (now, later) = bytes.split_at(length);
            // SAFETY: the piece is `iov_len` bytes of a mapped, writable slot, and at most `length`
            // of them are written. `bytes` is not guest memory, because no references to guest
            // memory exist.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), piece.iov_base.cast(), length) };
            bytes = later;
            self.advance(length);
        }
        before - self.left_bytes
    }

    /// Reads from `from` with one system call and returns the number of bytes read. It is 0 at the
    /// end of the stream or if the sink is full.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn read_from(&mut self, from: BorrowedFd<'_>) -> io::Result<usize> {
        let open = &self.pieces[self.open.clone()];
        // SAFETY: the pieces are mapped, writable guest memory, which the kernel writes as any
        // other process may. There are at most 128 pieces, which fits an int.
        let read =
            unsafe { libc::readv(from.as_raw_fd(), open.as_ptr(), open.len() as libc::c_int) };
        let read = usize::try_from(read).map_err(|_| io::Error::last_os_error())?;
        self.advance(read);
        Ok(read)
    }

    fn advance(&mut self, mut bytes: usize) {
        self.left_bytes -= bytes;
        while let Some(piece) = self.pieces[self.open.clone()].first_mut().filter(|_| bytes > 0) {
            let length = piece.iov_len.min(bytes);
            piece.iov_base = piece.iov_base.wrapping_byte_add(length);
            piece.iov_len -= length;
            bytes -= length;
            if piece.iov_len == 0 {
                self.open.start += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use crate::{GuestMemory, MemoryError, MemoryKind, PAGE_SIZE, PageRun, SlotId, SlotLayout};

    fn memory() -> GuestMemory {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 300 }];
        GuestMemory::allocate(&layout, MemoryKind::Private).unwrap()
    }

    fn run(first: u64, pages: u64) -> PageRun {
        PageRun { slot: SlotId(0), first, pages }
    }

    fn content(memory: &GuestMemory, run: PageRun) -> Vec<u8> {
        let mut content = vec![0; run.pages as usize * PAGE_SIZE];
        memory.copy_out(run, &mut content).unwrap();
        content
    }

    #[test]
    fn sink_fills_its_runs_from_pieces_of_any_size() {
        let memory = memory();
        let sent: Vec<u8> = (0..4 * PAGE_SIZE).map(|byte| (byte / 7) as u8 | 1).collect();
        let mut sink = memory.sink();
        for run in [run(2, 1), run(3, 1), run(9, 2)] {
            sink.push(run).unwrap();
        }
        assert_eq!(sink.left_bytes(), sent.len());
        let (from, mut to) = UnixStream::pair().unwrap();
        assert_eq!(sink.put(&sent[..5000]), 5000);
        to.write_all(&sent[5000..9000]).unwrap();
        assert_eq!(sink.read_from(from.as_fd()).unwrap(), 4000);
        to.write_all(&sent[9000..9001]).unwrap();
        assert_eq!(sink.read_from(from.as_fd()).unwrap(), 1);
        let rest = [&sent[9001..], b"behind"].concat();
        assert_eq!(sink.put(&rest), sent.len() - 9001, "no more than there is room for");
        assert_eq!((sink.left_bytes(), sink.put(b"x")), (0, 0));
        let there = [content(&memory, run(2, 2)), content(&memory, run(9, 2))].concat();
        assert!(there == sent);
        for between in [run(0, 2), run(4, 5), run(11, 289)] {
            assert!(content(&memory, between).iter().all(|byte| *byte == 0), "{between:?}");
        }
    }

    #[test]
    fn sink_detects_the_end_of_the_stream() {
        let memory = memory();
        let mut sink = memory.sink();
        sink.push(run(0, 1)).unwrap();
        let (from, to) = UnixStream::pair().unwrap();
        drop(to);
        assert_eq!(sink.read_from(from.as_fd()).unwrap(), 0);
        assert_eq!(sink.left_bytes(), PAGE_SIZE);
    }

    #[test]
    fn push_refuses_runs_outside_a_slot_and_too_many_pieces() {
        let memory = memory();
        let mut sink = memory.sink();
        let error = sink.push(run(299, 2)).unwrap_err();
        assert!(matches!(error, MemoryError::OutOfSlot { .. }), "{error}");
        for page in (0..256).step_by(2) {
            sink.push(run(page, 1)).unwrap();
        }
        sink.push(run(255, 1)).unwrap();
        let error = sink.push(run(299, 1)).unwrap_err();
        assert!(matches!(error, MemoryError::TooManyPieces { most: 128 }), "{error}");
    }
}
