//! Frames: a head, and pages that were copied from the memory.

use vmferry_memory::{GuestMemory, MemoryError, PAGE_SIZE, PageRun, SlotId};

/// Bytes of a head: as in the engine.
pub const HEAD_BYTES: usize = 48;

/// Pages per stripe. Stripes alternate between the channels, as they do between lanes.
const STRIPE_PAGES: u64 = 512;

/// The head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Number of earlier frames of this channel.
    pub sequence: u64,
    /// The pages that follow.
    pub run: PageRun,
}

impl Head {
    fn encode(self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        for (word, place) in
            [self.sequence, self.run.first, self.run.pages].iter().zip(bytes.chunks_exact_mut(8))
        {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes a head.
    pub fn decode(bytes: &[u8; HEAD_BYTES]) -> Self {
        let mut words = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        let mut next = || words.next().unwrap_or_default();
        let sequence = next();
        let run = PageRun { slot: SlotId(0), first: next(), pages: next() };
        Self { sequence, run }
    }
}

/// The buffer of a frame. Head and pages are adjacent, and the pages are page-aligned.
#[derive(Debug)]
pub struct Frame {
    buffer: Vec<u8>,
    head: usize,
    end: usize,
    /// Sequence number of the frame that was last sent from this buffer.
    pub sequence: Option<u64>,
}

impl Frame {
    /// Allocates a buffer for `pages` pages and populates it.
    pub fn new(pages: u64) -> Self {
        let bytes = pages as usize * PAGE_SIZE;
        let mut buffer = vec![0; bytes + 2 * PAGE_SIZE];
        buffer.fill(1);
        let mut start = buffer.as_ptr().align_offset(PAGE_SIZE);
        if start < HEAD_BYTES {
            start += PAGE_SIZE;
        }
        Self { buffer, head: start - HEAD_BYTES, end: start + bytes, sequence: None }
    }

    /// Fills the buffer with a frame of these pages.
    ///
    /// # Errors
    /// The pages do not exist, or their number is not that of the buffer.
    pub fn fill(
        &mut self,
        memory: &GuestMemory,
        sequence: u64,
        run: PageRun,
    ) -> Result<(), MemoryError> {
        self.sequence = Some(sequence);
        let (head, pages) = self.buffer[self.head..self.end].split_at_mut(HEAD_BYTES);
        head.copy_from_slice(&Head { sequence, run }.encode());
        memory.copy_out(run, pages)
    }

    /// Head and pages in one slice.
    pub fn whole(&self) -> &[u8] {
        &self.buffer[self.head..self.end]
    }

    /// Head and pages in two slices.
    pub fn parts(&self) -> (&[u8], &[u8]) {
        self.whole().split_at(HEAD_BYTES)
    }
}

/// The pages of each frame of a channel.
pub fn runs(
    pages: u64,
    frame_pages: u64,
    (channel, channels): (u64, u64),
) -> impl Iterator<Item = PageRun> {
    (channel * STRIPE_PAGES..pages).step_by((channels * STRIPE_PAGES) as usize).flat_map(
        move |stripe| {
            (stripe..(stripe + STRIPE_PAGES).min(pages))
                .step_by(frame_pages as usize)
                .map(move |first| PageRun { slot: SlotId(0), first, pages: frame_pages })
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_survives_encoding() {
        let run = PageRun { slot: SlotId(0), first: 1 << 40, pages: 64 };
        let head = Head { sequence: 7, run };
        assert_eq!(Head::decode(&head.encode()), head);
    }

    #[test]
    fn runs_cover_each_page_once() {
        let mut seen = vec![0; 2048];
        for channel in 0..2 {
            for run in runs(2048, 64, (channel, 2)) {
                for page in run.first..run.first + run.pages {
                    assert_eq!(page / 512 % 2, channel);
                    seen[page as usize] += 1;
                }
            }
        }
        assert!(seen.iter().all(|times| *times == 1));
    }

    #[test]
    fn frame_pages_are_page_aligned() {
        let frame = Frame::new(3);
        assert_eq!(frame.whole().len(), HEAD_BYTES + 3 * PAGE_SIZE);
        assert_eq!(frame.parts().1.as_ptr().align_offset(PAGE_SIZE), 0);
    }
}
