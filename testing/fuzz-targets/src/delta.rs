//! Any bytes, read as deltas of pages.

use vmferry_codec::{apply_delta, encode_delta};
use vmferry_memory::{GuestBytes, PAGE_SIZE, SlotId};

use super::input::Input;
use super::world::base_page;

/// Applies records until one is refused, and compares each with a simple reading of the format.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut page = base_page(SlotId(0), u64::from(input.byte()));
    let mut records = input.0;
    while !records.is_empty() {
        let (before, base) = (records, page.clone());
        let applied = apply_delta(&mut records, &mut page);
        assert_eq!(page.len(), PAGE_SIZE);
        match (applied, plainly(before, &base)) {
            (Ok(()), Some((expected, rest))) => {
                assert!(page == expected, "the page after a record");
                assert_eq!(records.len(), rest.len());
            }
            (Err(_), None) => {
                assert_eq!(records.len(), before.len(), "a bad record is not applied");
                return;
            }
            (applied, expected) => {
                panic!("{applied:?} where a simple reading gives {}", expected.is_some());
            }
        }
        // The reverse: the shortest record for the same change.
        let mut made = GuestBytes::new();
        assert!(
            encode_delta(&base, &page, &mut made, 2 * PAGE_SIZE),
            "a limit longer than any record"
        );
        let mut again = base.clone();
        let mut rest = &made[..];
        apply_delta(&mut rest, &mut again).unwrap();
        assert!(again == page && rest.is_empty(), "the encoder's own record gives the same page");
        let length = made.len();
        made.clear();
        assert!(!encode_delta(&base, &page, &mut made, length - 1) && made.is_empty());
    }
}

/// The format's description, word by word: the page after the first record, and the remaining
/// records.
fn plainly<'a>(records: &'a [u8], base: &[u8]) -> Option<(Vec<u8>, &'a [u8])> {
    let mut page = base.to_vec();
    let mut position = 0;
    let mut at = 0;
    let patches = number(records, &mut position)?;
    for _ in 0..patches {
        at += number(records, &mut position)?;
        let length = number(records, &mut position)? + 1;
        for _ in 0..length {
            *page.get_mut(at)? = *records.get(position)?;
            position += 1;
            at += 1;
        }
    }
    Some((page, &records[position..]))
}

fn number(records: &[u8], position: &mut usize) -> Option<usize> {
    let low = *records.get(*position)?;
    *position += 1;
    if low & 0x80 == 0 {
        return Some(low.into());
    }
    let high = *records.get(*position)?;
    *position += 1;
    (1..0x80).contains(&high).then(|| usize::from(low & 0x7f) + usize::from(high) * 128)
}
