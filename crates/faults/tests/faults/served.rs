//! Every page has exactly its content, in whatever order and by whatever way it comes.

use proptest::prelude::*;
use vmferry_memory::MemoryKind;

use crate::support::{
    Contents, memory, place_all, populated, register, reserve_huge_pages, while_served, wrong_pages,
};

/// A guest of some threads that touch all pages.
#[derive(Clone, Copy, Debug)]
struct Case {
    kind: MemoryKind,
    pages: u64,
    shares: usize,
    threads: u64,
    /// Whether a thread places all pages in the background meanwhile.
    background: bool,
    contents: Contents,
}

impl Case {
    /// The pages that had a wrong content, as the guest's threads have seen them.
    fn run(self) -> Vec<Vec<u64>> {
        let memory = memory(self.pages, self.kind);
        let ranges = register(&memory, self.shares);
        let (wrong, faults) = while_served(&ranges, self.contents, || {
            std::thread::scope(|scope| {
                if self.background {
                    scope.spawn(|| place_all(&ranges, self.pages, self.contents));
                }
                let threads: Vec<_> = (0..self.threads)
                    .map(|thread| {
                        let memory = &memory;
                        scope.spawn(move || wrong_pages(memory, self.contents, thread))
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            })
        });
        if !self.background {
            let unit = ranges.ranges()[0].descriptor.page_bytes() / 4096;
            assert!(faults as u64 >= self.pages / unit, "{faults} faults for {} pages", self.pages);
        }
        if self.kind == MemoryKind::Memfd {
            assert_eq!(populated(&memory), [(0, self.pages)]);
        }
        wrong
    }
}

fn all_right(kind: MemoryKind, pages: u64) {
    for (seed, background) in [(1, false), (2, true)] {
        let contents = Contents::of(seed);
        let case = Case { kind, pages, shares: 3, threads: 4, background, contents };
        assert_eq!(case.run(), vec![Vec::<u64>::new(); 4]);
    }
}

#[test]
fn pages_of_private_memory_have_their_contents() {
    all_right(MemoryKind::Private, 3000);
}

#[test]
fn pages_of_a_memfd_have_their_contents() {
    all_right(MemoryKind::Memfd, 3000);
}

#[test]
fn pages_of_private_memory_with_huge_pages_have_their_contents() {
    all_right(MemoryKind::Thp, 3000);
}

#[test]
fn pages_of_reserved_huge_pages_have_their_contents() {
    let _pool = reserve_huge_pages(6);
    all_right(MemoryKind::Hugetlb, 6 * 512);
}

/// The negative control of the tests above.
#[test]
fn page_with_a_wrong_byte_is_detected() {
    for (kind, background) in [(MemoryKind::Private, false), (MemoryKind::Memfd, true)] {
        let contents = Contents { seed: 3, wrong: Some(777) };
        let case = Case { kind, pages: 2000, shares: 2, threads: 3, background, contents };
        assert_eq!(case.run(), vec![vec![777]; 3]);
    }
}

fn case() -> impl Strategy<Value = Case> {
    let kind =
        prop_oneof![Just(MemoryKind::Private), Just(MemoryKind::Memfd), Just(MemoryKind::Thp)];
    let wrong = proptest::option::of(any::<prop::sample::Index>());
    (kind, 1..1500_u64, 1..5_usize, 1..5_u64, any::<bool>(), any::<u64>(), wrong).prop_map(
        |(kind, pages, shares, threads, background, seed, wrong)| {
            let wrong = wrong.map(|index| index.index(pages as usize) as u64);
            let contents = Contents { seed, wrong };
            Case { kind, pages, shares, threads, background, contents }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn only_a_page_that_was_placed_wrong_is_wrong(case in case()) {
        let expected: Vec<u64> = case.contents.wrong.into_iter().collect();
        prop_assert_eq!(case.run(), vec![expected; case.threads as usize]);
    }
}
