//! The published ways through a bitmap, for comparison: by byte, as migration began, and by machine
//! word (PUBLISHED.md, system 2). Both hand on single pages.

/// Looks at each byte, and at each bit of a byte that is not zero. Bit `b` of byte `i` is page
/// `8 * i + b`.
pub fn by_byte(bytes: &[u8], mut page: impl FnMut(u64)) {
    for (index, &byte) in bytes.iter().enumerate() {
        if byte != 0 {
            for bit in 0..8 {
                if byte >> bit & 1 != 0 {
                    page(index as u64 * 8 + bit);
                }
            }
        }
    }
}

/// Looks at each word, and takes the lowest bit of it until none is left. Bit `b` of word `w` is page
/// `64 * w + b`.
pub fn by_word(words: &[u64], mut page: impl FnMut(u64)) {
    for (index, &word) in words.iter().enumerate() {
        let mut word = word;
        while word != 0 {
            page(index as u64 * 64 + u64::from(word.trailing_zeros()));
            word &= word - 1;
        }
    }
}
