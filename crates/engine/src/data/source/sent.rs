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

    /// Bytes and frames so far.
    pub fn so_far(&self) -> (u64, u64) {
        (self.bytes.load(Ordering::Relaxed), self.frames.load(Ordering::Relaxed))
    }
}
