//! Content for tests.

use proptest::prelude::*;
use vmferry_memory::PAGE_SIZE;

use crate::method::Method;

/// Methods at all levels that work differently.
pub(crate) fn methods() -> Vec<Method> {
    let zstd = [1, 2, 3, 4, 6, 9, 13, 16, 19].map(Method::zstd);
    let zlib = (1..=9).map(Method::zlib);
    zstd.into_iter().chain(zlib).chain([Method::lz4()]).collect()
}

/// A generator that produces the same bytes everywhere: xorshift64*.
pub(crate) struct Noise(u64);

impl Noise {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        bytes.fill_with(|| (self.next() >> 56) as u8);
    }
}

/// A page of random bytes.
pub(crate) fn noise_page(seed: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE_SIZE];
    Noise::new(seed).fill(&mut page);
    page
}

/// Words in a slightly irregular order.
pub(crate) fn text(bytes: usize) -> Vec<u8> {
    let words =
        ["page ", "guest ", "memory ", "of ", "the ", "dirty ", "log, ", "host ", "sends\n"];
    let mut noise = Noise::new(7);
    let mut text = String::new();
    while text.len() < bytes {
        text.push_str(words[(noise.next() >> 40) as usize % words.len()]);
    }
    text.truncate(bytes);
    text.into_bytes()
}

/// 1 to 64 pages, each of noise, text, zeros, pointers, or half of each of two.
pub(crate) fn block() -> impl Strategy<Value = Vec<u8>> {
    let pages = prop_oneof![1_usize..5, 60_usize..65];
    (pages, 0_u8..6, any::<u64>()).prop_map(|(pages, kind, seed)| {
        let mut noise = Noise::new(seed);
        let mut block = vec![0; pages * PAGE_SIZE];
        for page in block.chunks_exact_mut(PAGE_SIZE) {
            // Kind 5 mixes all kinds in one block.
            match if kind == 5 { noise.next() % 5 } else { u64::from(kind) } {
                0 => noise.fill(page),
                1 => page.copy_from_slice(&text(PAGE_SIZE)),
                2 => {}
                3 => {
                    for word in page.as_chunks_mut::<8>().0 {
                        let pointer = 0x7f00_1200_0000 | noise.next() >> 44 << 4;
                        *word = pointer.to_le_bytes();
                    }
                }
                _ => noise.fill(&mut page[..PAGE_SIZE / 2]),
            }
        }
        block
    })
}
