//! Estimates from a few bytes of a page whether compression is worth trying.

/// Groups of consecutive bytes that are sampled, evenly spread over the page. Fewer would miss the
/// compressible part of a mixed page more often.
const GROUPS: usize = 8;

/// Bytes of a group. All groups have 256 bytes: a test of 512 would take twice the time, and in 128
/// bytes the numbers of different values lie too close together.
const GROUP: usize = 32;

/// The sample of 256 bytes looks random if it has at least this many different values. Random bytes
/// have 162 on average, with a standard deviation of 5. In the measurement below, 148 misses 2.6
/// times as many pages of compressed files, and 140 misjudges 6 times as many pages in which random
/// bytes and program code alternate.
const DISTINCT: usize = 145;

/// The same for each half of the sample, to distinguish a page that is half random from one that is
/// entirely random. Random bytes have 101, with a standard deviation of 4.
const DISTINCT_IN_HALF: usize = 87;

/// Whether a page is probably random, encrypted or already compressed, so that compressing it would
/// cost time without gain. It reads only 256 bytes and takes about 130 ns.
///
/// Measured against zstd:1, page by page. Pages judged random that would have shrunk by a tenth or
/// more: 39 of 135,000 pages of programs, libraries and object files, none of 8,500 pages of source
/// text, and 25 of 22,000 pages of gz, png and crate files. Missed pages: 1.1 % of the pages of gz,
/// png and crate files that shrink by less than 3 %, and 0.07 % of the pages of random bytes. If
/// random bytes and program code alternate every 512 bytes, 1.4 % of the pages are judged random
/// but would have shrunk by a tenth; with 2 KiB of each, none.
#[must_use]
pub fn looks_random(page: &[u8]) -> bool {
    let step = page.len() / GROUPS;
    if step < GROUP {
        return false;
    }
    let mut seen = [[0_u8; 256]; 2];
    for (index, part) in page.chunks_exact(step).take(GROUPS).enumerate() {
        for byte in &part[..GROUP] {
            seen[index * 2 / GROUPS][usize::from(*byte)] = 1;
        }
    }
    let [first, second] = &seen;
    let count = |seen: &[u8; 256]| seen.iter().map(|seen| usize::from(*seen)).sum::<usize>();
    let both = first.iter().zip(second).map(|(a, b)| usize::from(a | b)).sum::<usize>();
    both >= DISTINCT && count(first) >= DISTINCT_IN_HALF && count(second) >= DISTINCT_IN_HALF
}

#[cfg(test)]
mod tests;
