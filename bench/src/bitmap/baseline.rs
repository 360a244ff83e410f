//! Two published bitmap traversals, for comparison: by byte, as the first migration code did, and
//! by machine word (PUBLISHED.md, system 2). Both report single pages.

/// Tests each byte, and each bit of a byte that is not zero. Bit `b` of byte `i` is page `8 * i +
/// b`.
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

/// Takes the lowest set bit of each word until no bit is left. Bit `b` of word `w` is page `64 * w
/// + b`.
pub fn by_word(words: &[u64], mut page: impl FnMut(u64)) {
    for (index, &word) in words.iter().enumerate() {
        let mut word = word;
        while word != 0 {
            page(index as u64 * 64 + u64::from(word.trailing_zeros()));
            word &= word - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_byte_and_by_word_find_the_same_pages() {
        let words = [0b1001, 0, 1 << 63, u64::MAX];
        let bytes: Vec<u8> = words.iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
        let (mut bytewise, mut wordwise) = (Vec::new(), Vec::new());
        by_byte(&bytes, |page| bytewise.push(page));
        by_word(&words, |page| wordwise.push(page));
        let expected: Vec<u64> = [0, 3, 191].into_iter().chain(192..256).collect();
        assert_eq!((bytewise, wordwise), (expected.clone(), expected));
    }
}
