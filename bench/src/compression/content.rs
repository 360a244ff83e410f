//! The content of the guest's pages: pools that its threads copy from.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use fastrand::Rng;
use vmferry_memory::PAGE_SIZE;

/// Pages of a pool that are copied together: 64 KiB. A guest's page cache likewise has some
/// neighboring pages of a file but not all.
pub const CHUNK_PAGES: usize = 16;

/// Bytes of a chunk.
pub const CHUNK_BYTES: usize = CHUNK_PAGES * PAGE_SIZE;

/// A class of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Content {
    /// English-like words.
    Text,
    /// Files of `/usr/bin` and shared libraries.
    Program,
    /// Half of each page is random, half is text.
    HalfRandom,
    /// Random bytes.
    Incompressible,
    /// Three of four pages are zero; the fourth is from a program.
    ZeroHeavy,
}

impl Content {
    /// Every class.
    pub const ALL: [Self; 5] =
        [Self::Text, Self::Program, Self::HalfRandom, Self::Incompressible, Self::ZeroHeavy];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Program => "program",
            Self::HalfRandom => "half random",
            Self::Incompressible => "incompressible",
            Self::ZeroHeavy => "zero heavy",
        }
    }

    /// The name in ratio names.
    pub fn key(self) -> String {
        self.name().replace(' ', "_")
    }

    /// Whether a codec can shrink it.
    pub fn is_compressible(self) -> bool {
        self != Self::Incompressible
    }
}

/// Pages of one class. The pool is so large that no codec's window reaches a repetition.
pub struct Pool {
    bytes: Vec<u8>,
}

impl Pool {
    /// Makes a pool of about `bytes` bytes, at least one chunk.
    ///
    /// # Errors
    /// The system has no program files.
    pub fn new(content: Content, bytes: usize) -> anyhow::Result<Self> {
        let bytes = bytes.next_multiple_of(CHUNK_BYTES);
        let bytes = match content {
            Content::Text => text(bytes),
            Content::Program => programs(bytes)?,
            Content::HalfRandom => {
                let (mut pages, random) = (text(bytes), random(bytes / 2));
                let halves = random.chunks_exact(PAGE_SIZE / 2);
                for (page, half) in pages.chunks_exact_mut(PAGE_SIZE).zip(halves) {
                    page[..half.len()].copy_from_slice(half);
                }
                pages
            }
            Content::Incompressible => random(bytes),
            Content::ZeroHeavy => {
                let full = programs((bytes / 4).next_multiple_of(CHUNK_BYTES))?;
                let mut pages = vec![0; bytes];
                let quarters = full.chunks_exact(CHUNK_BYTES / 4);
                for (chunk, quarter) in pages.chunks_exact_mut(CHUNK_BYTES).zip(quarters) {
                    chunk[..quarter.len()].copy_from_slice(quarter);
                }
                pages
            }
        };
        Ok(Self { bytes })
    }

    /// Returns a random chunk.
    pub fn chunk(&self, random: &mut Rng) -> &[u8] {
        let at = random.usize(..self.bytes.len() / CHUNK_BYTES) * CHUNK_BYTES;
        &self.bytes[at..at + CHUNK_BYTES]
    }
}

/// Whether a page is not zero.
pub fn has_content(page: &&[u8]) -> bool {
    page.iter().any(|byte| *byte != 0)
}

fn random(bytes: usize) -> Vec<u8> {
    let mut random = vec![0; bytes];
    Rng::with_seed(1).fill(&mut random);
    random
}

/// Makes text of sentences and paragraphs. Word frequencies follow Zipf's law.
fn text(bytes: usize) -> Vec<u8> {
    const WORDS: usize = 20_000;
    const SYLLABLES: [&str; 40] = [
        "a", "an", "ar", "at", "be", "ca", "con", "de", "di", "e", "en", "er", "es", "fi", "for",
        "ge", "hi", "i", "in", "ing", "la", "le", "ly", "ma", "men", "mo", "ne", "o", "on", "pa",
        "per", "re", "ri", "sen", "sta", "te", "ti", "tion", "un", "ver",
    ];
    let mut random = Rng::with_seed(2);
    let words: Vec<String> = (0..WORDS)
        .map(|rank| {
            // Frequent words are short.
            let syllables = 1 + rank.checked_ilog2().unwrap_or(0) / 5 + random.u32(..3);
            (0..syllables).map(|_| SYLLABLES[random.usize(..SYLLABLES.len())]).collect()
        })
        .collect();
    let mut text = Vec::with_capacity(bytes + 64);
    let mut rest_of_sentence = 0;
    while text.len() < bytes {
        let rank = (WORDS as f64).powf(random.f64()) as usize - 1;
        let word = &words[rank.min(WORDS - 1)];
        let begin = text.len();
        text.extend_from_slice(word.as_bytes());
        if rest_of_sentence == 0 {
            rest_of_sentence = 4 + random.u64(..20);
            text[begin..=begin].make_ascii_uppercase();
        }
        rest_of_sentence -= 1;
        let after: &[u8] = match (rest_of_sentence, random.u64(..16)) {
            (0, 0..4) => b".\n\n",
            (0, _) => b". ",
            (_, 0) => b", ",
            (_, 1) => b"\n",
            _ => b" ",
        };
        text.extend_from_slice(after);
    }
    text.truncate(bytes);
    text
}

/// Reads whole program files, each padded to a page, as they would be mapped. If the system has too
/// few of them, they repeat.
fn programs(bytes: usize) -> anyhow::Result<Vec<u8>> {
    let mut pages = Vec::with_capacity(bytes);
    for directory in ["/usr/bin", "/usr/lib"] {
        collect(Path::new(directory), bytes, 6, &mut pages);
    }
    ensure!(!pages.is_empty(), "there are no program files in /usr/bin and /usr/lib");
    let found = pages.len();
    if found < bytes {
        eprintln!("compression: only {} MiB of program files", found >> 20);
    }
    while pages.len() < bytes {
        let more = (bytes - pages.len()).min(found);
        pages.extend_from_within(..more);
    }
    Ok(pages)
}

/// Appends the program files below a directory, in name order, until there are enough bytes. Files
/// that cannot be read are skipped.
fn collect(directory: &Path, enough: usize, depth: usize, pages: &mut Vec<u8>) {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        if pages.len() >= enough {
            return;
        }
        // Symbolic links are not followed; their targets would be read twice.
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        if metadata.is_dir() && depth > 0 {
            collect(&path, enough, depth - 1, pages);
        } else if metadata.is_file()
            && is_program(&path)
            && let Ok(content) = fs::read(&path)
        {
            let room = enough - pages.len();
            pages.extend_from_slice(&content[..content.len().min(room)]);
            pages.resize(pages.len().next_multiple_of(PAGE_SIZE).min(enough), 0);
        }
    }
}

fn is_program(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    path.starts_with("/usr/bin") || name.ends_with(".so") || name.contains(".so.")
}

/// Makes a pool of each class.
pub fn pools(contents: &[Content], bytes: usize) -> anyhow::Result<Vec<(Content, Pool)>> {
    let pool = |content: &Content| {
        let pool = Pool::new(*content, bytes);
        Ok((*content, pool.with_context(|| format!("could not make {} pages", content.name()))?))
    };
    contents.iter().map(pool).collect()
}

#[cfg(test)]
mod tests {
    use vmferry_codec::{Compressors, Method};

    use super::*;

    #[test]
    fn content_classes_compress_as_named() {
        let mut zstd = Compressors::default().make(Method::zstd(1)).unwrap();
        for (content, pool) in pools(&Content::ALL, 1 << 20).unwrap() {
            let pages: Vec<u8> =
                pool.bytes.chunks_exact(PAGE_SIZE).filter(has_content).flatten().copied().collect();
            let mut output = vec![0; pages.len() + 4096];
            let length = zstd.compress(&pages, &mut output).unwrap().unwrap();
            let ratio = pages.len() as f64 / length as f64;
            let expected = match content {
                Content::Text => 2.0..4.5,
                Content::Program | Content::ZeroHeavy => 1.3..8.0,
                Content::HalfRandom => 1.2..2.0,
                Content::Incompressible => 0.99..1.01,
            };
            assert!(expected.contains(&ratio), "{}: {ratio}", content.name());
            let full = pages.len() as f64 / pool.bytes.len() as f64;
            assert_eq!(content == Content::ZeroHeavy, full < 0.3, "{}: {full}", content.name());
        }
    }

    #[test]
    fn pool_is_rounded_up_to_whole_chunks() {
        let pool = Pool::new(Content::Text, CHUNK_BYTES + 1).unwrap();
        assert_eq!(pool.bytes.len(), 2 * CHUNK_BYTES);
        assert_eq!(pool.chunk(&mut Rng::with_seed(1)).len(), CHUNK_BYTES);
    }
}
