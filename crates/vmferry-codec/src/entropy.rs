//! A guess, from few bytes of a page, whether to compress it is worth trying.

/// Groups of consecutive bytes that are looked at, evenly spread over the page.
const GROUPS: usize = 8;

/// Bytes of a group.
const GROUP: usize = 32;

/// Different values among the 256 bytes from which they look random. Random bytes have 162 on
/// average, with a standard deviation of 5. Measured as below, 148 misses 2.6 times as many pages
/// of compressed files, and 140 takes 6 times as many for random in which noise and program take
/// turns.
const DISTINCT: usize = 145;

/// The same for each half of them, so that a page of which one half is random is told from one
/// that is random all over. Random bytes have 101, with a deviation of 4.
const DISTINCT_IN_HALF: usize = 87;

/// Whether a page is probably random, encrypted or compressed already: compressing it would take
/// time and give nothing. Looks at 256 bytes only, in about 130 ns.
///
/// Measured against zstd:1, page by page. Of 135,000 pages of programs, libraries and object
/// files, 39 looked random and yet would have shrunk by a tenth or more; of 8,500 pages of source
/// text none; of 22,000 pages of gz, png and crate files 25. Of the pages of those files that
/// shrink by less than 3 %, 1.1 % were not seen as random; of pages of random bytes 0.07 %. Where
/// random bytes take turns with a program's every 512 bytes, 1.4 % of the pages looked random
/// and would have shrunk by a tenth; with 2 KiB of each, none.
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
#[path = "entropy_tests.rs"]
mod tests;
