//! Tests of `delta`.

use proptest::prelude::*;

use super::*;
use crate::samples::{Noise, noise_page};

fn record(base: &[u8], page: &[u8]) -> GuestBytes {
    let mut record = GuestBytes::new();
    assert!(encode_delta(base, page, &mut record, 2 * PAGE_SIZE));
    record
}

/// A page and its next version: some stretches are changed, possibly to the same bytes.
fn pair() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let change = (0..PAGE_SIZE, prop_oneof![1_usize..20, 1..PAGE_SIZE], 0_u8..4);
    (any::<u64>(), prop::collection::vec(change, 0..40)).prop_map(|(seed, changes)| {
        let base = noise_page(seed);
        let mut page = base.clone();
        for (at, bytes, change) in changes {
            let end = PAGE_SIZE.min(at + bytes);
            match change {
                // Every byte, every third byte, one value, restored.
                0 => page[at..end].iter_mut().for_each(|byte| *byte = byte.wrapping_add(1)),
                1 => page[at..end].iter_mut().step_by(3).for_each(|byte| *byte ^= 0x80),
                2 => page[at..end].fill(0),
                _ => page[at..end].copy_from_slice(&base[at..end]),
            }
        }
        (base, page)
    })
}

/// Length of a record under the same rules, counted byte by byte.
fn naive_bytes(base: &[u8], page: &[u8]) -> usize {
    let mut patches: Vec<(usize, usize)> = Vec::new();
    for at in (0..PAGE_SIZE).filter(|at| base[*at] != page[*at]) {
        match patches.last_mut() {
            Some((_, end)) if at - *end <= MERGED_GAP => *end = at + 1,
            _ => patches.push((at, at + 1)),
        }
    }
    let size = |number: usize| if number < 128 { 1 } else { 2 };
    let (bytes, _) = patches.iter().fold((size(patches.len()), 0), |(bytes, at), (begin, end)| {
        (bytes + size(begin - at) + size(end - begin - 1) + end - begin, *end)
    });
    bytes
}

proptest! {
    #[test]
    fn delta_round_trips((base, page) in pair(), other in pair()) {
        let mut records = record(&base, &page);
        prop_assert_eq!(records.len(), naive_bytes(&base, &page));
        let first = records.len();
        prop_assert!(encode_delta(&other.0, &other.1, &mut records, 2 * PAGE_SIZE));
        prop_assert_eq!(&records[first..], &record(&other.0, &other.1)[..]);
        let mut rest = &records[..];
        for (base, page) in [(&base, &page), (&other.0, &other.1)] {
            let mut held = base.clone();
            apply_delta(&mut rest, &mut held).unwrap();
            prop_assert_eq!(&held, page);
        }
        prop_assert!(rest.is_empty());
    }

    #[test]
    fn delta_limit_is_exact_and_a_longer_delta_leaves_no_trace((base, page) in pair()) {
        let whole = record(&base, &page);
        for limit in [0, 1, whole.len() / 2, whole.len() - 1] {
            let mut into = GuestBytes::from(*b"abc");
            let made = encode_delta(&base, &page, &mut into, limit);
            prop_assert_eq!(made, limit == whole.len(), "{} of {}", limit, whole.len());
            prop_assert!(made || into[..] == b"abc"[..]);
        }
        for limit in [whole.len(), usize::MAX] {
            let mut into = GuestBytes::from(*b"abc");
            prop_assert!(encode_delta(&base, &page, &mut into, limit));
            prop_assert_eq!(&into[3..], &whole[..]);
        }
    }

    #[test]
    fn any_bytes_apply_or_fail_without_panic(
        bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0_u8..4], 0..300)
    ) {
        let mut page = noise_page(1);
        let mut rest = &bytes[..];
        match apply_delta(&mut rest, &mut page) {
            Ok(()) => prop_assert!(rest.len() < bytes.len()),
            Err(_) => prop_assert_eq!(rest, &bytes[..]),
        }
        let _ = apply_delta(&mut &bytes[..], &mut []);
    }

    #[test]
    fn cut_delta_is_an_error((base, page) in pair(), at in any::<prop::sample::Index>()) {
        let whole = record(&base, &page);
        let mut cut = &whole[..at.index(whole.len())];
        let found = apply_delta(&mut cut, &mut base.clone());
        prop_assert!(matches!(found, Err(DeltaError::Cut { .. })), "{:?}", found);
    }
}

#[test]
fn delta_of_an_unchanged_page_is_one_byte() {
    assert_eq!(record(&noise_page(1), &noise_page(1))[..], [0]);
}

#[test]
fn delta_of_a_fully_changed_page_is_one_patch() {
    assert_eq!(record(&[0; PAGE_SIZE], &[1; PAGE_SIZE]).len(), 1 + 1 + 2 + PAGE_SIZE);
}

#[test]
fn delta_of_few_changes_takes_their_bytes_and_three_for_each() {
    let base = noise_page(1);
    for seed in 0..200 {
        let (mut page, mut places) = (base.clone(), Noise::new(seed));
        for _ in 0..8 {
            let at = places.next() as usize % (PAGE_SIZE - 16);
            page[at..at + 16].iter_mut().for_each(|byte| *byte = !*byte);
        }
        assert!(record(&base, &page).len() <= 8 * (16 + 3) + 1);
    }
}

#[test]
fn delta_has_at_most_1024_patches() {
    let base = vec![0; PAGE_SIZE];
    let mut page = base.clone();
    page.iter_mut().step_by(4).for_each(|byte| *byte = 1);
    let record = record(&base, &page);
    assert_eq!(record.len(), 2 + PAGE_SIZE / 4 * 3);
    let mut held = base;
    apply_delta(&mut &record[..], &mut held).unwrap();
    assert_eq!(held, page);
}

#[test]
fn delta_of_another_page_size_is_refused() {
    let mut into = GuestBytes::new();
    for (base, page) in [(0, 0), (PAGE_SIZE, 64), (64, PAGE_SIZE), (2 * PAGE_SIZE, 2 * PAGE_SIZE)] {
        assert!(!encode_delta(&vec![0; base], &vec![0; page], &mut into, usize::MAX));
    }
    assert!(into.is_empty());
}

#[test]
fn invalid_delta_is_an_error() {
    let apply = |mut bytes: &[u8]| apply_delta(&mut bytes, &mut [0; PAGE_SIZE]);
    assert_eq!(apply(&[]), Err(DeltaError::Cut { needed: 1, left: 0 }));
    assert_eq!(apply(&[0x81]), Err(DeltaError::Cut { needed: 1, left: 0 }));
    assert_eq!(apply(&[1, 0, 3, 9]), Err(DeltaError::Cut { needed: 4, left: 1 }));
    assert_eq!(apply(&[0x80, 0]), Err(DeltaError::Overlong { low: 0x80, high: 0 }));
    assert_eq!(apply(&[1, 0x80, 0x80]), Err(DeltaError::Overlong { low: 0x80, high: 0x80 }));
    // The last byte of the page, and then one byte more.
    assert_eq!(apply(&[1, 0xff, 0x1f, 0, 9]), Ok(()));
    let outside = DeltaError::OutOfPage { at: 4095, bytes: 2 };
    assert_eq!(apply(&[1, 0xff, 0x1f, 1, 9, 9]), Err(outside));
    let outside = DeltaError::OutOfPage { at: 4096, bytes: 1 };
    assert_eq!(apply(&[2, 0xff, 0x1f, 0, 9, 0, 0, 9]), Err(outside));
}
