//! The workload `display`.

use super::*;

#[test]
fn display_is_redrawn_60_times_in_any_1000_ticks() {
    for line in ["display", "display hot=2,random read=2"] {
        let mut workload = Workload::populated(line, 1);
        let mut frames = vec![workload.report().frames];
        for _ in 0..2500 {
            workload.tick();
            frames.push(workload.report().frames);
        }
        for second in frames.windows(1001) {
            assert_eq!(second[1000] - second[0], 60, "{line}");
        }
        let drawn: Vec<_> = (1..frames.len()).filter(|&t| frames[t] > frames[t - 1]).collect();
        assert!(drawn.windows(2).all(|two| (16..=17).contains(&(two[1] - two[0]))), "{line}");
        assert_eq!(workload.report().corruptions, 0);
    }
}

#[test]
fn display_does_not_catch_up_frames_after_a_pause() {
    let mut workload = Workload::populated("display", 1);
    let before = workload.report().frames;
    workload.ticks += 60_000;
    workload.tick();
    assert_eq!(workload.report().frames, before + 1);
    (0..1000).for_each(|_| workload.tick());
    assert_eq!(workload.report().frames, before + 61);
}

#[test]
fn display_frame_rewrites_all_of_the_frame_buffer_and_nothing_else() {
    let mut workload = Workload::populated("display", 2);
    let slot = |workload: &Workload, gpa| -> Vec<_> {
        (0..8).map(|page| workload.page(gpa + page * PAGE)).collect()
    };
    let still = slot(&workload, STILL);
    for _ in 0..20 {
        let (frame, before) = (workload.report().frames, slot(&workload, DISPLAY));
        workload.step_until("redrawn", |workload| workload.report().frames > frame);
        let after = slot(&workload, DISPLAY);
        assert!((0..8).all(|page| workload.word(DISPLAY + page * PAGE) == frame + 1));
        for (before, after) in before.iter().zip(&after) {
            let same = before.chunks(8).zip(after.chunks(8)).filter(|(one, two)| one == two);
            assert_eq!(same.count(), 0, "a word is of the frame before");
        }
    }
    assert!(still == slot(&workload, STILL), "the still slot has changed");
    assert!(still.iter().all(|page| page.iter().any(|byte| *byte != 0)));
}

#[test]
fn display_check_finds_a_changed_byte_once() {
    for (page, byte) in [(0, 0), (0, 4095), (3, 8), (5, 1777), (7, 4080)] {
        let mut workload = Workload::populated("display", 2);
        workload.check_all();
        let gpa = DISPLAY + page * PAGE;
        workload.flip(gpa + byte);
        let first = workload.check_all().first_corruption.expect("found");
        assert!(first.gpa == gpa && first.expected ^ first.found == 0x10 << (byte % 8 * 8));
        assert_eq!(workload.check_all().corruptions, 1, "the next frame is right again");
    }
}

#[test]
fn display_check_finds_a_page_of_an_earlier_frame() {
    let mut workload = Workload::populated("display", 1);
    workload.check_all();
    let gpa = DISPLAY + 2 * PAGE;
    let (stale, old) = (workload.page(gpa), workload.report().frames);
    let newer = workload.check_all().frames;
    workload.memory.write_at(gpa, &stale).unwrap();
    let report = workload.check_all();
    let expected = Corruption { gpa, expected: newer, found: old, round: 0 };
    assert_eq!((report.corruptions, report.first_corruption), (1, Some(expected)));
}

#[test]
fn still_slot_check_finds_a_changed_byte_until_it_is_repaired() {
    for (page, byte) in [(0, 0), (4, 2048), (7, 4095)] {
        let mut workload = Workload::populated("display", 1);
        let gpa = STILL + page * PAGE;
        workload.flip(gpa + byte);
        let report = workload.check_all();
        assert!(report.corruptions >= 2, "{report:?}");
        assert_eq!(report.first_corruption.unwrap().gpa, gpa);
        workload.flip(gpa + byte);
        assert_eq!(workload.check_all().corruptions, report.corruptions);
    }
}

#[test]
fn display_check_finds_a_slot_that_never_arrived() {
    for slot in [DISPLAY, STILL] {
        let mut workload = Workload::populated("display", 1);
        for page in 0..8 {
            workload.memory.write_at(slot + page * PAGE, &[0; PAGE_SIZE]).unwrap();
        }
        let report = workload.check_all();
        assert!(report.corruptions >= 8, "{report:?}");
        assert_eq!(report.first_corruption.unwrap().gpa, slot);
    }
}

#[test]
fn display_check_finds_a_stale_vcpu_report() {
    let mut workload = Workload::populated("display", 1);
    workload.check_all();
    let stale = workload.page(VCPU_REPORT);
    workload.check_all();
    workload.memory.write_at(VCPU_REPORT, &stale).unwrap();
    assert_eq!(workload.check_all().corruptions, 8, "each page of the frame buffer is newer");
}

#[test]
fn display_that_does_not_match_the_report_is_corruption() {
    for (gpa, word) in [
        (GUEST_REPORT + 56, 9),
        (VCPU_REPORT + FRAMES, 0),
        (VCPU_REPORT + FRAMES, u64::MAX),
        (VCPU_REPORT + FRAMES_DUE, u64::MAX),
    ] {
        let mut workload = Workload::populated("display", 1);
        workload.set_word(gpa, word);
        (0..20).for_each(|_| workload.tick());
        assert!(workload.report().corruptions > 0, "{gpa:#x} {word:#x}");
    }
}

#[test]
fn display_without_its_slots_is_skipped() {
    let slots = [(0, 32 * MIB), (DISPLAY, DISPLAY_BYTES)];
    for slots in [&slots[..1], &slots] {
        let mut workload = Workload::with_layout("display ticks", 1, slots);
        (0..40).for_each(|_| workload.tick());
        let report = workload.report();
        assert!(report.populated && report.corruptions == 0, "{report:?}");
        assert_eq!((report.display_pages, report.frames), (0, 0));
    }
}
