//! The encodings that the model chooses from, and what each costs: measured, or assumed until then.

use std::time::Duration;

use vmferry_codec::Method;
use vmferry_memory::PAGE_SIZE;

/// The encodings that `auto` chooses from, from the cheapest to the strongest.
pub const ENCODINGS: [Option<Method>; 5] = [
    None,
    Some(Method::lz4()),
    Some(Method::zstd(1)),
    Some(Method::zstd(3)),
    Some(Method::zstd(6)),
];

/// Index of uncompressed pages.
pub const RAW: usize = 0;
/// Index of a method that the user has fixed.
pub const FIXED: usize = ENCODINGS.len();
/// Number of indices: the encodings of `auto`, and the fixed one.
pub const INDICES: usize = ENCODINGS.len() + 1;

/// What an encoding costs.
#[derive(Clone, Copy, Debug)]
pub struct EncodingCost {
    /// A worker's time per page with content, in seconds.
    pub seconds_per_page: f64,
    pub bytes_per_page: f64,
    /// When it was last measured.
    pub at: Duration,
    /// Frames measured since the encoding was unknown or outdated.
    pub frames: u32,
}

impl EncodingCost {
    /// The assumption until an encoding was measured.
    pub fn assumed(encoding: usize) -> Self {
        let Assumption { bytes_per_s, compressed_part } =
            ASSUMPTIONS.get(encoding).unwrap_or(&ANY_METHOD);
        let page = PAGE_SIZE as f64;
        Self {
            seconds_per_page: page / bytes_per_s,
            bytes_per_page: page * compressed_part,
            at: Duration::ZERO,
            frames: 0,
        }
    }

    /// The average after one more frame.
    pub fn and(self, seen: Self) -> Self {
        // A slow frame mostly had to wait for a processor, or for memory that was touched for the
        // first time, so a fast one says more about the encoding itself. The yield of the encoding
        // under the present load is measured in its outcome.
        let slower = seen.seconds_per_page > self.seconds_per_page;
        let weight = if slower { SLOWER_WEIGHT } else { FASTER_WEIGHT };
        let seen_s = seen.seconds_per_page.min(MOST_SLOWER * self.seconds_per_page);
        let seconds_per_page = if self.is_known() {
            self.seconds_per_page + weight * (seen_s - self.seconds_per_page)
        } else {
            self.seconds_per_page.min(seen_s)
        };
        let bytes_per_page = average(self.bytes_per_page, seen.bytes_per_page);
        let frames = self.frames.saturating_add(1);
        Self { seconds_per_page, bytes_per_page, at: seen.at, frames }
    }

    /// Whether enough frames were measured.
    pub fn is_known(&self) -> bool {
        self.frames >= FRAMES_UNTIL_KNOWN
    }
}

/// The moving average after one more frame.
pub fn average(known: f64, seen: f64) -> f64 {
    known + WEIGHT * (seen - known)
}

/// Weight of a new frame in the moving averages: a change of the pages counts for two thirds after
/// five frames, and a single odd frame for a fifth.
const WEIGHT: f64 = 0.2;
/// Weight of a frame's time if the frame was faster than the average. A fast frame shows what the
/// encoding can do, so this is more than [`WEIGHT`].
const FASTER_WEIGHT: f64 = 0.3;
/// The same if the frame was slower, mostly because it waited for a processor.
const SLOWER_WEIGHT: f64 = 0.05;
/// A frame's time counts as at most this multiple of the average, since a worker that was
/// interrupted says nothing about the encoding.
const MOST_SLOWER: f64 = 3.0;
/// Number of frames after which an encoding is known. The first frame also pays for creating the
/// compressor.
const FRAMES_UNTIL_KNOWN: u32 = 3;

/// An optimistic assumption about an encoding.
struct Assumption {
    /// Bytes per second and worker.
    bytes_per_s: f64,
    /// The compressed fraction of a page.
    compressed_part: f64,
}

const fn assume(bytes_per_s: f64, compressed_part: f64) -> Assumption {
    Assumption { bytes_per_s, compressed_part }
}

/// Assumptions until an encoding was tried. These are the libraries' rates on program code and
/// text, on a core of 2023. They only decide whether an encoding is worth a trial.
const ASSUMPTIONS: [Assumption; ENCODINGS.len()] = [
    assume(8e9, 1.0),
    assume(800e6, 0.4),
    assume(600e6, 0.3),
    assume(400e6, 0.25),
    assume(150e6, 0.2),
];

/// The assumption for any other encoding: optimistic for every method.
const ANY_METHOD: Assumption = assume(1e9, 0.2);
