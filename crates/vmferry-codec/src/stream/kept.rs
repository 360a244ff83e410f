//! The destination's copies of the pages that the source keeps too.

use vmferry_memory::{GuestBytes, PAGE_SIZE};

use super::decode::Kept;

/// Pages whose memory is taken together: 1 MiB.
const CHUNK_PAGES: usize = 256;

/// Pages by entry. Memory is taken as pages come, by the chunk.
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
    /// Room for so many pages.
    pub(super) fn new(entries: u32) -> Self {
        let chunks = (entries as usize).div_ceil(CHUNK_PAGES);
        Self { chunks: (0..chunks).map(|_| None).collect(), entries }
    }

    /// How many pages there is room for.
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
