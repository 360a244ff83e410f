//! What is in the guest's pages: pools that its threads copy from.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use vmferry_memory::PAGE_SIZE;

/// Consecutive pages of a pool that are copied together: 64 KiB, as the cache of a guest's file system
/// has some of a file's pages next to each other and not all of them.
pub const CHUNK_PAGES: usize = 16;

/// Bytes of such.
pub const CHUNK_BYTES: usize = CHUNK_PAGES * PAGE_SIZE;

/// A class of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Content {
    /// Words as in prose.
    Text,
    /// Files of `/usr/bin` and shared libraries.
    Program,
    /// Half of each page random, half text.
    HalfRandom,
    /// Random.
    Incompressible,
    /// Three pages of four are zero, the fourth is program-like.
    ZeroHeavy,
}

impl Content {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Text, Self::Program, Self::HalfRandom, Self::Incompressible, Self::ZeroHeavy];

    /// In tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Program => "program",
            Self::HalfRandom => "half random",
            Self::Incompressible => "incompressible",
            Self::ZeroHeavy => "zero heavy",
        }
    }

    /// In the names of ratios.
    pub fn key(self) -> String {
        self.name().replace(' ', "_")
    }

    /// Whether a codec gains something.
    pub fn is_compressible(self) -> bool {
        self != Self::Incompressible
    }
}

/// Pages of one class. They repeat only after so many bytes that no codec sees it.
pub struct Pool {
    bytes: Vec<u8>,
}

impl Pool {
    /// Of about so many bytes, at least one chunk.
    ///
    /// # Errors
    /// No program files on this system.
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

    /// A chunk that this random number chooses.
    pub fn chunk(&self, random: u64) -> &[u8] {
        let chunks = (self.bytes.len() / CHUNK_BYTES) as u64;
        let at = (random % chunks) as usize * CHUNK_BYTES;
        &self.bytes[at..at + CHUNK_BYTES]
    }
}

/// Whether a page is not zero.
pub fn has_content(page: &&[u8]) -> bool {
    page.iter().any(|byte| *byte != 0)
}

/// Numbers that look random (xorshift64*).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next one.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// From 0 to below 1.
    fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[(self.next() % from.len() as u64) as usize]
    }
}

fn random(bytes: usize) -> Vec<u8> {
    let mut random = Random::new(1);
    (0..bytes / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

/// Words by syllables, each as frequent as its rank says (Zipf), in sentences and paragraphs.
fn text(bytes: usize) -> Vec<u8> {
    const WORDS: usize = 20_000;
    const SYLLABLES: [&str; 40] = [
        "a", "an", "ar", "at", "be", "ca", "con", "de", "di", "e", "en", "er", "es", "fi", "for",
        "ge", "hi", "i", "in", "ing", "la", "le", "ly", "ma", "men", "mo", "ne", "o", "on", "pa",
        "per", "re", "ri", "sen", "sta", "te", "ti", "tion", "un", "ver",
    ];
    let mut random = Random::new(2);
    let words: Vec<String> = (0..WORDS)
        .map(|rank| {
            // Frequent words are short.
            let syllables = 1 + rank.checked_ilog2().unwrap_or(0) / 5 + (random.next() % 3) as u32;
            (0..syllables).map(|_| *random.pick(&SYLLABLES)).collect()
        })
        .collect();
    let mut text = Vec::with_capacity(bytes + 64);
    let mut rest_of_sentence = 0;
    while text.len() < bytes {
        let rank = (WORDS as f64).powf(random.fraction()) as usize - 1;
        let word = &words[rank.min(WORDS - 1)];
        let begin = text.len();
        text.extend_from_slice(word.as_bytes());
        if rest_of_sentence == 0 {
            rest_of_sentence = 4 + random.next() % 20;
            text[begin..=begin].make_ascii_uppercase();
        }
        rest_of_sentence -= 1;
        let after: &[u8] = match (rest_of_sentence, random.next() % 16) {
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

/// Files of programs, whole and from a page's beginning on each, as they are mapped. A system with few of
/// them has them repeated.
fn programs(bytes: usize) -> anyhow::Result<Vec<u8>> {
    let mut pages = Vec::with_capacity(bytes);
    for directory in ["/usr/bin", "/usr/lib"] {
        collect(Path::new(directory), bytes, 6, &mut pages);
    }
    ensure!(!pages.is_empty(), "no program files in /usr/bin and /usr/lib");
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

/// Appends the program files below a directory, in the order of their names, until there are enough.
/// What can't be read is left out.
fn collect(directory: &Path, enough: usize, depth: usize, pages: &mut Vec<u8>) {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        if pages.len() >= enough {
            return;
        }
        // Not what links point to: it would be there twice.
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

/// A pool of each class.
pub fn pools(contents: &[Content], bytes: usize) -> anyhow::Result<Vec<(Content, Pool)>> {
    let pool = |content: &Content| {
        let pool = Pool::new(*content, bytes);
        Ok((*content, pool.with_context(|| format!("no {} pages", content.name()))?))
    };
    contents.iter().map(pool).collect()
}

#[cfg(test)]
mod tests {
    use vmferry_codec::{Compressors, Method};

    use super::*;

    #[test]
    fn each_class_is_as_compressible_as_its_name_says() {
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
    fn chunks_are_whole() {
        let pool = Pool::new(Content::Text, CHUNK_BYTES + 1).unwrap();
        assert_eq!(pool.chunk(u64::MAX).len(), CHUNK_BYTES);
        assert_ne!(pool.chunk(0), pool.chunk(1));
    }
}
