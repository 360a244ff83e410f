//! Tests of `entropy`.

use vmferry_memory::PAGE_SIZE;

use super::*;
use crate::samples::{Noise, text};

/// How many of 20,000 pages, each generated from noise, look random.
fn looking_random(make: impl Fn(&mut Noise, &mut [u8])) -> usize {
    let mut noise = Noise::new(1);
    let mut page = vec![0; PAGE_SIZE];
    (0..20_000)
        .filter(|_| {
            make(&mut noise, &mut page);
            looks_random(&page)
        })
        .count()
}

#[test]
fn noise_looks_random() {
    let found = looking_random(|noise, page| noise.fill(page));
    assert!(found > 19_950, "{found}");
}

#[test]
fn compressible_data_does_not_look_random() {
    assert!(!looks_random(&[0; PAGE_SIZE]));
    assert!(!looks_random(&text(PAGE_SIZE)));
    let pointers = looking_random(|noise, page| {
        for word in page.as_chunks_mut::<8>().0 {
            *word = (0x7f00_0000_0000 | noise.next() >> 36).to_le_bytes();
        }
    });
    let base64 = looking_random(|noise, page| {
        page.fill_with(|| b'0' + (noise.next() >> 58) as u8);
    });
    assert_eq!((pointers, base64), (0, 0));
}

#[test]
fn half_a_page_of_noise_does_not_look_random() {
    for (parts, rest) in [(1, vec![0; PAGE_SIZE]), (1, text(PAGE_SIZE)), (2, text(PAGE_SIZE))] {
        let found = looking_random(|noise, page| {
            page.copy_from_slice(&rest);
            let part = PAGE_SIZE / parts;
            page.chunks_exact_mut(part).for_each(|part| {
                let half = part.len() / 2;
                noise.fill(&mut part[..half]);
            });
        });
        assert!(found < 20, "{parts}: {found}");
    }
}

#[test]
fn input_shorter_than_the_sample_does_not_look_random() {
    let mut bytes = [0; 255];
    Noise::new(1).fill(&mut bytes);
    (0..255).for_each(|length| assert!(!looks_random(&bytes[..length])));
}
