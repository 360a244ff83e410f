//! Guests with the workloads `display` and `read`.

use super::*;
use crate::kvm::{DISPLAY, HIGH_RAM, STILL};

/// A guest that draws and reads continues after a move. The guest itself reports damage to either
/// slot of its display, or to the pages that it reads.
#[test]
fn display_guest_moves_and_detects_damage() {
    const LINE: &str = "display read=8 ticks";
    for kind in KINDS {
        let mut source = started(config(kind, 2, LINE));
        let slots: Vec<_> = source.memory().layout().iter().map(|slot| slot.gpa).collect();
        assert_eq!(slots, [0, DISPLAY, STILL]);
        let reading = (16 << 20) + 77 * 4096;
        for damaged in [None, Some(DISPLAY + 3 * 4096), Some(STILL + 5 * 4096), Some(reading)] {
            let seen = source.report().unwrap();
            wait_for(&source, "went on", |now| {
                now.frames > seen.frames + 3 && now.read_rounds > seen.read_rounds
            });
            source.pause().unwrap();
            let (state, before) = (source.save().unwrap(), source.report().unwrap());
            let mut target = Machine::new(config(kind, 2, LINE)).unwrap();
            copy(&source.memory().populated().unwrap(), source.memory(), target.memory());
            target.load(&state).unwrap();
            assert_eq!(target.report().unwrap(), before, "loading changed guest memory");
            if let Some(gpa) = damaged {
                let mut word = [0; 8];
                target.memory().read_at(gpa + 2048, &mut word).unwrap();
                word[3] ^= 1;
                target.memory().write_at(gpa + 2048, &word).unwrap();
            }
            target.resume().unwrap();
            let after = check_all(&target);
            assert!(after.frames >= before.frames + 2, "{kind}: {after:?}");
            assert_eq!(after.corruptions > 0, damaged.is_some(), "{kind}: {after:?}");
            assert_eq!(after.first_corruption.map(|first| first.gpa), damaged, "{kind}");
            source.resume().unwrap();
        }
    }
}

#[test]
fn display_slots_are_between_low_and_high_memory() {
    for kind in KINDS {
        let mut config = config(kind, 2, "display fill=1,text ticks");
        config.guest.memory_bytes = 4 << 30;
        let machine = started(config);
        let slots: Vec<_> = machine.memory().layout().iter().map(|slot| slot.gpa).collect();
        assert_eq!(slots, [0, DISPLAY, STILL, HIGH_RAM]);
        assert_eq!(check_all(&machine).corruptions, 0, "{kind}");
    }
}

/// The dirty log of a guest that draws and reads has the whole frame buffer, and otherwise only
/// the guest kernel's own pages.
#[test]
fn dirty_log_has_the_frame_buffer_but_not_the_still_or_read_pages() {
    let logs = [LogChoice::Userfaultfd, LogChoice::KvmBitmap, LogChoice::KvmClear];
    for kind in KINDS {
        for dirty_log in logs {
            if kind == GuestKind::Process && dirty_log != LogChoice::Userfaultfd {
                continue;
            }
            let config = MachineConfig { dirty_log, ..config(kind, 2, "display read=8") };
            let mut machine = started(config);
            let log = machine.dirty_log().unwrap();
            log.start().unwrap();
            let mut dirty = PageSet::for_memory(machine.memory());
            // The first harvest may report all pages as dirty.
            for harvest in 0..3 {
                dirty.clear_all();
                log.collect(&mut dirty).unwrap();
                for slot in machine.memory().slots() {
                    log.rearm(slot.id(), 0, dirty.bitmap(slot.id()).words()).unwrap();
                }
                if harvest == 2 {
                    break;
                }
                let seen = machine.report().unwrap();
                wait_for(&machine, "drawn and read", |now| now.has_checked_all_since(&seen));
            }
            machine.pause().unwrap();
            let count = |slot| dirty.bitmap(SlotId(slot)).count();
            assert_eq!((count(1), count(2)), (8, 0), "{kind} {dirty_log}");
            let ram = dirty.bitmap(SlotId(0));
            let written: Vec<_> = (4096..ram.pages()).filter(|&page| ram.is_set(page)).collect();
            assert!(written.is_empty(), "{kind} {dirty_log}: only read: {written:x?}");
            log.stop().unwrap();
        }
    }
}
