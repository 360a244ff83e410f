//! The checks of the workload find damage to its pages and its state.

use super::*;
use crate::report::Corruption;

#[test]
fn fill_check_finds_any_changed_byte() {
    for kind in ["text", "incompressible", "zero"] {
        for byte in [0, 1, 1777, 2048, 4095] {
            let mut workload = Workload::populated(&format!("fill=2,{kind}"), 2);
            let gpa = WORK + 300 * PAGE;
            workload.flip(gpa + byte);
            let report = workload.check_all();
            assert_eq!(report.first_corruption.unwrap().gpa, gpa, "{kind} {byte}");
            workload.flip(gpa + byte);
            let repaired = workload.check_all().corruptions;
            assert_eq!(workload.check_all().corruptions, repaired);
        }
    }
}

#[test]
fn hot_check_finds_a_changed_byte_of_the_last_round() {
    for byte in [0, 8, 15, 4080, 4088, 4095, middle_byte(1)] {
        let mut workload = Workload::populated("fill=1,text hot=2,random,rate=1000", 1);
        let gpa = WORK + (256 + 17) * PAGE;
        let generation = workload.word(gpa);
        assert_eq!(generation, 1, "before the second round has come to it");
        workload.flip(gpa + byte);
        let report = workload.check_all();
        assert_eq!(report.corruptions, 1, "byte {byte}: {report:?}");
        let first = report.first_corruption.unwrap();
        assert!(first.gpa == gpa && first.round == 1 && first.expected != first.found);
    }
}

#[test]
fn hot_check_finds_a_page_of_an_earlier_round() {
    let mut workload = Workload::populated("hot=2,random,rate=1000", 1);
    let gpa = WORK + 99 * PAGE;
    let stale = workload.page(gpa);
    let old = workload.word(gpa);
    workload.step_until("rewritten", |workload| workload.word(gpa) > old);
    let newer = workload.word(gpa);
    workload.memory.write_at(gpa, &stale).unwrap();
    let report = workload.check_all();
    assert_eq!(report.corruptions, 1, "{report:?}");
    assert_eq!(
        report.first_corruption,
        Some(Corruption { gpa, expected: newer, found: old, round: newer })
    );
}

#[test]
fn hot_check_finds_a_page_that_never_arrived() {
    let mut workload = Workload::populated("hot=2,rate=1000", 1);
    let gpa = WORK + 99 * PAGE;
    workload.memory.write_at(gpa, &[0; PAGE_SIZE]).unwrap();
    let first = workload.check_all().first_corruption.unwrap();
    assert_eq!(first, Corruption { gpa, expected: 1, found: 0, round: 1 });
}

#[test]
fn check_finds_pages_that_were_swapped() {
    for (line, one, other) in [("hot=2,rate=1000", 5, 300), ("fill=2,incompressible", 5, 300)] {
        let mut workload = Workload::populated(line, 1);
        let [one, other] = [one, other].map(|page| WORK + page * PAGE);
        let pages = [workload.page(one), workload.page(other)];
        workload.memory.write_at(one, &pages[1]).unwrap();
        workload.memory.write_at(other, &pages[0]).unwrap();
        let report = workload.check_all();
        assert!(report.corruptions >= 2, "{line}: {report:?}");
        let first = report.first_corruption.unwrap();
        assert!(first.gpa == one || first.gpa == other);
    }
}

#[test]
fn check_finds_a_stale_vcpu_report() {
    let mut workload = Workload::populated("hot=2,random,rate=1000", 1);
    let stale = workload.page(VCPU_REPORT);
    workload.check_all();
    workload.memory.write_at(VCPU_REPORT, &stale).unwrap();
    assert!(workload.check_all().corruptions > 100);
}

#[test]
fn read_check_finds_any_changed_byte() {
    for byte in [0, 1, 1777, 4095] {
        let mut workload = Workload::populated("fill=1,zero read=2 hot=1,rate=1000", 2);
        let gpa = WORK + (256 + 300) * PAGE;
        workload.flip(gpa + byte);
        let report = workload.check_all();
        assert!(report.corruptions > 0, "{report:?}");
        assert_eq!(report.first_corruption.unwrap().gpa, gpa);
        workload.flip(gpa + byte);
        let repaired = workload.check_all().corruptions;
        assert_eq!(workload.check_all().corruptions, repaired);
    }
}

/// Guest memory comes from another host. The workload uses no address outside it, whatever it
/// contains.
#[test]
fn damaged_report_counts_as_corruption_without_a_crash() {
    let huge = [1 << 20, 1 << 40, u64::MAX / 4096, u64::MAX];
    let mut cases = Vec::new();
    for huge in huge {
        // fill_pages, read_pages, hot_pages
        cases.extend([16, 24, 32].map(|offset| (GUEST_REPORT + offset, huge)));
        cases.extend([FILL_NEXT, READ_NEXT, HOT_NEXT].map(|offset| (VCPU_REPORT + offset, huge)));
    }
    cases.push((GUEST_REPORT + 8, 9 << 32 | 3)); // vcpus, version
    // display_pages, although there is no display, and with impossible numbers
    cases.extend([1, 8, 9, u64::from(u32::MAX)].map(|pages| (GUEST_REPORT + 56, pages)));
    for populated in [true, false] {
        for &(gpa, word) in &cases {
            let mut workload = Workload::populated("fill=2,text read=1 hot=2", 2);
            if !populated {
                workload.set_word(VCPU_REPORT + PHASE, 0);
            }
            workload.set_word(gpa, word);
            (0..10).for_each(|_| workload.tick());
            let report = workload.report();
            assert!(report.corruptions > 0, "{gpa:#x} {word:#x}");
        }
    }
}

/// Sets every word of the workload's state to several bad values.
#[test]
fn workload_stays_in_memory_with_any_word_in_its_state() {
    let mut workload = Workload::populated("fill=2,text read=1 hot=2,random,rate=5000 display", 2);
    let saved = [GUEST_REPORT, VCPU_REPORT].map(|page| (page, workload.page(page)));
    for (page, words) in [(GUEST_REPORT, 11), (VCPU_REPORT, 44)] {
        for word in 0..words {
            for value in [0, 1, 1 << 32, u64::MAX >> 12, u64::MAX] {
                workload.set_word(page + 8 * word, value);
                (0..3).for_each(|_| workload.tick());
                // The sums must not overflow.
                workload.report();
                for (page, bytes) in &saved {
                    workload.memory.write_at(*page, bytes).unwrap();
                }
            }
        }
    }
}

#[test]
fn heartbeat_check_finds_a_decreasing_or_wrong_sequence() {
    let slot = 0x2_0000;
    let beat = |workload: &Workload, begin: u64, hashed: u64, end: u64| {
        workload.set_word(slot, begin);
        workload.set_word(slot + 8, mix(hashed ^ slot));
        workload.set_word(slot + 16, end);
    };
    let mut workload = Workload::populated("ticks", 2);
    let mut report_after = |write: &dyn Fn(&Workload)| {
        write(&workload);
        (0..16).for_each(|_| workload.tick());
        let report = workload.report();
        (report.heartbeats, report.corruptions, report.first_corruption)
    };
    assert_eq!(report_after(&|_| {}), (0, 0, None));
    assert_eq!(report_after(&|workload| beat(workload, 16, 16, 16)), (1, 0, None));
    assert_eq!(report_after(&|workload| beat(workload, 32, 16, 16)), (1, 0, None), "being written");
    assert_eq!(report_after(&|workload| beat(workload, 32, 32, 32)), (2, 0, None));
    let gone_back = Corruption { gpa: slot, expected: 32, found: 16, round: 0 };
    assert_eq!(report_after(&|workload| beat(workload, 16, 16, 16)), (2, 1, Some(gone_back)));
    assert_eq!(report_after(&|workload| beat(workload, 48, 47, 48)).1, 2, "wrong hash");
}
