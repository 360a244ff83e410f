//! The destination's copies of the pages that both sides keep.

use vmferry_memory::{GuestBytes, PAGE_SIZE};

/// A store of a stream's kept pages by entry, for
/// [`StreamDecoder::decode_apart`](super::StreamDecoder::decode_apart).
pub trait Kept {
    /// Keeps a page.
    fn keep(&mut self, entry: u32, content: &[u8]);

    /// The page in an entry, mutable; `None` if no page was kept there.
    fn page_mut(&mut self, entry: u32) -> Option<&mut [u8]>;
}

/// Number of pages in a chunk: 1 MiB. Each chunk is a mapping, of which a process may have 65,530;
/// the maximum of 1 GiB takes 1024.
const CHUNK_PAGES: usize = 256;

/// Kept pages by entry. Memory is allocated in chunks as pages are kept.
#[derive(Debug)]
pub(super) struct KeptPages {
    chunks: Vec<Option<Chunk>>,
    entries: u32,
}

#[derive(Debug)]
struct Chunk {
    contents: GuestBytes,
    held: [bool; CHUNK_PAGES],
}

impl KeptPages {
    /// Entries for up to `entries` pages.
    pub(super) fn new(entries: u32) -> Self {
        let chunks = (entries as usize).div_ceil(CHUNK_PAGES);
        Self { chunks: (0..chunks).map(|_| None).collect(), entries }
    }

    /// Number of entries.
    pub(super) fn entries(&self) -> u32 {
        self.entries
    }
}

impl Kept for KeptPages {
    /// Keeps a page. The entry must exist.
    fn keep(&mut self, entry: u32, content: &[u8]) {
        let (chunk, place) = (entry as usize / CHUNK_PAGES, entry as usize % CHUNK_PAGES);
        let Some(chunk) = self.chunks.get_mut(chunk) else { return };
        let chunk = chunk.get_or_insert_with(|| {
            let mut contents = GuestBytes::new();
            contents.extend_to(CHUNK_PAGES * PAGE_SIZE);
            Chunk { contents, held: [false; CHUNK_PAGES] }
        });
        chunk.held[place] = true;
        chunk.contents[place * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(content);
    }

    /// The page in an entry, if one is kept there.
    fn page_mut(&mut self, entry: u32) -> Option<&mut [u8]> {
        let (chunk, place) = (entry as usize / CHUNK_PAGES, entry as usize % CHUNK_PAGES);
        let chunk = self.chunks.get_mut(chunk)?.as_mut()?;
        chunk.held[place].then(|| &mut chunk.contents[place * PAGE_SIZE..][..PAGE_SIZE])
    }
}
