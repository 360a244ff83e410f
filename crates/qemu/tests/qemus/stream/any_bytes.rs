//! The recognizers with arbitrary and damaged streams, cut in arbitrary pieces.

use proptest::prelude::*;
use vmferry_memory::PAGE_SIZE;

use super::by_hand::whole;
use super::samples::{Packet, RAM, ROM, Sample, look, look_in_pieces, recogniser};

/// A migration's stream with some bytes changed.
fn damaged() -> impl Strategy<Value = (bool, Vec<u8>)> {
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6);
    (any::<bool>(), changes).prop_map(|(multifd, changes)| {
        let mut bytes = match multifd {
            false => whole().bytes,
            true => {
                let mut sample = Sample::default();
                sample.greeting();
                for pages in [&[5, 3, 9][..], &[], &[4]] {
                    let packet = Packet { normal: pages, zero: &[1], ..Packet::default() };
                    sample.packet_with_pages(0, &packet);
                }
                sample.bytes
            }
        };
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        (multifd, bytes)
    })
}

fn anything() -> impl Strategy<Value = (bool, Vec<u8>)> {
    prop_oneof![
        4 => damaged(),
        1 => (any::<bool>(), prop::collection::vec(any::<u8>(), 0..40_000)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5000, ..ProptestConfig::default() })]

    /// For any bytes, cut in any way: the recognizer makes progress, marks are whole pages of the
    /// layout and in order, and the result is the same as in one piece.
    #[test]
    fn recognition_is_the_same_for_any_bytes_in_any_pieces(
        (multifd, bytes) in anything(),
        pieces in prop::collection::vec(1_usize..9000, 1..8),
    ) {
        let (marks, taken) = look_in_pieces(&mut *recogniser(multifd), &bytes, &pieces);
        let mut end = 0;
        for mark in &marks.pages {
            prop_assert!(mark.at >= end, "pages do not overlap");
            end = mark.at + PAGE_SIZE;
            prop_assert!(end <= taken, "a page is whole in what is taken");
            prop_assert!(mark.page < [RAM.1, ROM.1][usize::from(mark.slot.0)]);
        }
        let (in_one, taken_in_one) = look(multifd, &bytes);
        prop_assert_eq!(in_one, marks);
        prop_assert_eq!(taken_in_one, taken);
    }
}
