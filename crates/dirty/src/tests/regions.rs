//! Regions that are added and removed while the log is on, in this process.

use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageSet, SlotId};

use super::{memory, runs, zap};
use crate::{DirtyLog, DirtyLogError, UffdLog};

const PAGES: u64 = 2000;
const PAGE: u64 = PAGE_SIZE as u64;

struct Case {
    memory: GuestMemory,
    log: UffdLog,
    kind: MemoryKind,
}

impl Case {
    fn all(mut run: impl FnMut(&Case)) {
        for kind in [MemoryKind::Private, MemoryKind::Memfd] {
            let memory = memory(PAGES, kind);
            let log = UffdLog::new(&memory).expect("this test needs userfaultfd");
            run(&Case { memory, log, kind });
        }
    }

    fn write(&self, page: u64) {
        self.memory.write_at(page * PAGE, &[1]).unwrap();
    }

    fn at(&self, page: u64) -> u64 {
        self.memory.slots()[0].host_address() as u64 + page * PAGE
    }

    fn add(&self, first: u64, end: u64) -> Result<(), DirtyLogError> {
        self.log.add_region(SlotId(0), first, self.at(first)..self.at(end))
    }

    fn remove(&self, first: u64, end: u64) -> Result<(), DirtyLogError> {
        self.log.remove_region(self.at(first)..self.at(end))
    }

    fn collect(&self) -> Vec<(u64, u64)> {
        let mut pages = PageSet::for_memory(&self.memory);
        self.log.collect(&mut pages).unwrap();
        runs(&pages)
    }
}

#[test]
fn removed_region_is_reported_once_more_and_then_not_logged() {
    Case::all(|case| {
        (0..1500).for_each(|page| case.write(page));
        case.log.start().unwrap();
        [100, 700, 1400].into_iter().for_each(|page| case.write(page));
        case.remove(600, 800).unwrap();
        [650, 101, 1401].into_iter().for_each(|page| case.write(page));
        assert_eq!(case.collect(), [(100, 2), (700, 1), (1400, 2)], "{}", case.kind);
        assert_eq!(case.collect(), []);
        [599, 600, 799, 800].into_iter().for_each(|page| case.write(page));
        assert_eq!(case.collect(), [(599, 1), (800, 1)]);
        case.remove(0, PAGES).unwrap();
        case.write(5);
        assert_eq!(case.collect(), []);
        case.log.stop().unwrap();
    });
}

#[test]
fn added_region_is_reported_where_populated() {
    Case::all(|case| {
        case.remove(500, PAGES).unwrap();
        [1, 700, 1300].into_iter().for_each(|page| case.write(page));
        case.log.start().unwrap();
        case.write(1600);
        assert_eq!(case.collect(), [], "{}", case.kind);
        case.add(500, 1500).unwrap();
        case.write(1200);
        assert_eq!(case.collect(), [(700, 1), (1200, 1), (1300, 1)], "{}", case.kind);
        assert_eq!(case.collect(), []);
        [499, 500, 1499, 1500].into_iter().for_each(|page| case.write(page));
        assert_eq!(case.collect(), [(499, 2), (1499, 1)]);
        case.log.stop().unwrap();
        case.log.start().unwrap();
        case.write(600);
        assert_eq!(case.collect(), [(600, 1)], "it stays in the log");
    });
}

#[test]
fn regions_that_do_not_fit_are_refused() {
    Case::all(|case| {
        case.remove(1000, PAGES).unwrap();
        let says = |result: Result<(), DirtyLogError>, what: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        };
        says(case.add(999, 1100), "another region");
        says(case.add(1100, 1100), "whole pages");
        let range = case.at(1000)..case.at(1100);
        says(case.log.add_region(SlotId(0), 0, range.clone()), "another region");
        says(case.log.add_region(SlotId(0), PAGES - 99, range.clone()), "beyond the slot's 2000");
        says(case.log.add_region(SlotId(0), u64::MAX, range.clone()), "beyond the slot's 2000");
        says(case.log.add_region(SlotId(9), 0, range.clone()), "no slot 9");
        says(case.log.add_region(SlotId(0), 1000, range.start + 1..range.end), "whole pages");
        says(case.remove_odd(), "whole pages");
        case.add(1000, 1100).unwrap();
    });
}

impl Case {
    fn remove_odd(&self) -> Result<(), DirtyLogError> {
        self.log.remove_region(self.at(10) + 1..self.at(20))
    }
}

#[test]
fn region_removed_late_is_reported_where_the_file_has_data() {
    Case::all(|case| {
        (0..50).for_each(|page| case.write(page));
        case.log.start().unwrap();
        case.write(12);
        case.write(30);
        let place = case.at(10) as *mut libc::c_void;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: these pages of the test's own memory are not in use at this time.
        let new = unsafe { libc::mmap(place, 10 * PAGE_SIZE, libc::PROT_NONE, flags, -1, 0) };
        assert_eq!(new, place);
        let mut pages = PageSet::for_memory(&case.memory);
        case.remove(10, 20).unwrap();
        case.log.collect(&mut pages).unwrap();
        match case.kind {
            MemoryKind::Memfd => assert_eq!(runs(&pages), [(10, 10), (30, 1)]),
            // The content of private memory no longer exists.
            _ => assert_eq!(runs(&pages), [(30, 1)]),
        }
    });
}

/// Reports of given-back pages are not promised, but a write before or after is never lost.
#[test]
fn write_is_reported_with_any_madvise() {
    Case::all(|case| {
        (0..PAGES).for_each(|page| case.write(page));
        case.log.start().unwrap();
        let mut advices = vec![libc::MADV_PAGEOUT, libc::MADV_COLD];
        if case.kind == MemoryKind::Memfd {
            advices.push(libc::MADV_DONTNEED);
        }
        for advice in advices {
            case.write(70);
            zap(&case.memory, 70, 1, advice);
            assert_eq!(case.collect(), [(70, 1)], "{} {advice}", case.kind);
            (512..1024).for_each(|page| case.write(page));
            zap(&case.memory, 512, 512, advice);
            assert_eq!(case.collect(), [(512, 512)], "{} {advice}", case.kind);
            assert_eq!(case.collect(), []);
            zap(&case.memory, 0, PAGES, advice);
            case.write(71);
            assert_eq!(case.collect(), [(71, 1)], "{} {advice}: clean pages stay clean", case.kind);
        }
        zap(&case.memory, 80, 1, libc::MADV_DONTNEED);
        case.write(80);
        assert_eq!(case.collect(), [(80, 1)]);
    });
}
