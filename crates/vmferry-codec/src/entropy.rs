//! A guess, from few bytes of a page, whether to compress it is worth trying.

/// Groups of consecutive bytes that are looked at, evenly spread over the page.
const GROUPS: usize = 8;

/// Bytes of a group.
const GROUP: usize = 32;

/// Different values among the 256 bytes from which they look random. Random bytes have 162 on
/// average, with a standard deviation of 5.
const DISTINCT: usize = 140;

/// The same for each half of them, so that a page of which one half is random is told from one
/// that is random all over. Random bytes have 101, with a deviation of 4.
const DISTINCT_IN_HALF: usize = 84;

/// Whether a page is probably random, encrypted or compressed already: compressing it would take
/// time and give nothing. Cheap, as it looks at 256 bytes only. Of what it misjudges, most does
/// compress somewhat, by less than other pages do.
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
