//! Counters of what all lanes have passed to their channels.

use std::sync::atomic::{AtomicU64, Ordering};

use vmferry_codec::FrameCounts;

/// The totals so far.
#[derive(Debug, Default)]
pub struct SentCounters {
    /// Bytes of frames.
    pub bytes: AtomicU64,
    frames: AtomicU64,
    /// Pages with content.
    pub content_pages: AtomicU64,
    /// Zero pages.
    pub zero_pages: AtomicU64,
    /// Pages that the destination lacked and that were sent to it, each once, with post-copy.
    pub served_pages: AtomicU64,
    tunnelled_bytes: AtomicU64,
}

impl SentCounters {
    /// Counts a frame.
    pub fn frame(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.frames.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the pages of a frame.
    pub fn pages(&self, counts: &FrameCounts) {
        self.content_pages.fetch_add(counts.content_pages(), Ordering::Relaxed);
        self.zero_pages.fetch_add(counts.zero_pages, Ordering::Relaxed);
    }

    /// Counts bytes of a carried guest's stream that were sent through a tunnel. Their pages are
    /// not recognized, so this number of pages is an estimate.
    pub fn tunnelled(&self, bytes: u64) {
        self.frame(bytes);
        let all = self.tunnelled_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.served_pages.store(all / vmferry_memory::PAGE_SIZE as u64, Ordering::Relaxed);
    }

    /// Bytes and frames so far.
    pub fn so_far(&self) -> (u64, u64) {
        (self.bytes.load(Ordering::Relaxed), self.frames.load(Ordering::Relaxed))
    }
}
