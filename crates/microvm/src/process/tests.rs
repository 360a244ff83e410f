//! The workload's own checks: what is damaged is found, and what is not is not. One thread steps
//! all vCPUs, so that everything here is the same each time.

use std::collections::BTreeSet;

use vmferry_memory::{MemoryKind, PAGE_SIZE, SlotId, SlotLayout, map_slots};

use super::*;
use crate::config::GuestConfig;
use crate::heartbeat::mix;
use crate::kvm::DISPLAY_BYTES;
use crate::report::{Corruption, Report};

mod display;
mod heap;

const MIB: u64 = 1 << 20;
const WORK: u64 = 16 * MIB;
const PAGE: u64 = PAGE_SIZE as u64;
/// `struct guest_report` and vCPU 0's `struct vcpu_report`.
const GUEST_REPORT: u64 = 0x8000;
const VCPU_REPORT: u64 = 0x9000;
const PHASE: u64 = 88;
const FRAMES: u64 = 120;
const FILL_NEXT: u64 = 160;
const READ_NEXT: u64 = 168;
const HOT_NEXT: u64 = 176;
const FRAMES_DUE: u64 = 216;

struct Workload {
    memory: GuestMemory,
    _mapped: Arc<GuestMemoryMmap<DirtyBitmap>>,
    view: GuestView,
    vcpus: u32,
    ticks: u64,
}

impl Workload {
    fn new(command_line: &str, vcpus: u32) -> Self {
        let config = GuestConfig {
            memory_bytes: 32 * MIB,
            vcpus: 1,
            command_line: command_line.into(),
            balloon: false,
        };
        let layout = config.layout();
        let slots: Vec<_> = layout.iter().map(|slot| (slot.gpa, slot.pages * PAGE)).collect();
        Self::with_layout(command_line, vcpus, &slots)
    }

    fn with_layout(command_line: &str, vcpus: u32, slots: &[(u64, u64)]) -> Self {
        let slots = slots.iter().enumerate();
        let layout: Vec<SlotLayout> = slots
            .map(|(slot, &(gpa, bytes))| SlotLayout {
                slot: SlotId(slot as u16),
                gpa,
                pages: bytes / PAGE,
            })
            .collect();
        let mapped = map_slots::<DirtyBitmap>(&layout, MemoryKind::Private).unwrap();
        let memory = GuestMemory::from_vm_memory(&mapped).unwrap();
        memory.write_at(COMMAND_LINE_ADDRESS, command_line.as_bytes()).unwrap();
        let view = GuestView::of(&mapped);
        // SAFETY: the view's memory lives in the result; no other thread uses it.
        unsafe { workload_init(&raw const view, vcpus) };
        Self { memory, _mapped: mapped, view, vcpus, ticks: 0 }
    }

    /// A workload whose memory is populated, in the middle of its second round.
    fn populated(command_line: &str, vcpus: u32) -> Self {
        let mut workload = Self::new(command_line, vcpus);
        workload.step_until("populated", |workload| workload.report().populated);
        workload
    }

    /// One tick for each vCPU: steps until it has nothing to do, at most 100.
    fn tick(&mut self) {
        self.ticks += 1;
        for vcpu in 0..self.vcpus {
            for _ in 0..100 {
                if self.step(vcpu) {
                    break;
                }
            }
        }
    }

    fn step(&self, vcpu: u32) -> bool {
        // SAFETY: as in `new`.
        unsafe { workload_step(&raw const self.view, vcpu, self.ticks) != 0 }
    }

    fn step_until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        for _ in 0..100_000 {
            if done(self) {
                return;
            }
            self.ticks += 1;
            for vcpu in 0..self.vcpus {
                self.step(vcpu);
            }
        }
        panic!("never {what}: {:?}", self.report());
    }

    /// Checks everything at least once from now on.
    fn check_all(&mut self) -> Report {
        let before = self.report();
        self.step_until("checked all", |workload| workload.report().has_checked_all_since(&before));
        self.report()
    }

    fn report(&self) -> Report {
        Report::read(&self.memory).unwrap()
    }

    fn page(&self, gpa: u64) -> Vec<u8> {
        let mut page = vec![0; PAGE_SIZE];
        self.memory.read_at(gpa, &mut page).unwrap();
        page
    }

    fn word(&self, gpa: u64) -> u64 {
        let mut word = [0; 8];
        self.memory.read_at(gpa, &mut word).unwrap();
        u64::from_le_bytes(word)
    }

    fn set_word(&self, gpa: u64, word: u64) {
        self.memory.write_at(gpa, &word.to_le_bytes()).unwrap();
    }

    fn flip(&self, gpa: u64) {
        let mut byte = [0];
        self.memory.read_at(gpa, &mut byte).unwrap();
        self.memory.write_at(gpa, &[byte[0] ^ 0x10]).unwrap();
    }

    fn hot_pages(&self) -> impl Iterator<Item = u64> + use<> {
        let fill = self.word(GUEST_REPORT + 16);
        let hot = self.word(GUEST_REPORT + 32);
        (fill..fill + hot).map(|page| WORK + page * PAGE)
    }
}

fn middle_byte(generation: u64) -> u64 {
    8 * (2 + mix(generation) % 508)
}

#[test]
fn an_undamaged_guest_reports_no_corruption() {
    for line in [
        "idle",
        "ticks",
        "fill=3,text",
        "fill=3,incompressible",
        "fill=3,zero",
        "hot=5,sequential",
        "ticks fill=7,text hot=9,random",
        "read=3",
        "display",
        "display read=2 fill=3,text hot=4,random",
        "freed=8",
        "churn=3 poison",
        "hot=1 freed=7 churn=4 pressure",
    ] {
        for vcpus in [1, 3, 8] {
            let mut workload = Workload::populated(line, vcpus);
            let report = workload.check_all();
            assert!(report.started && report.corruptions == 0, "{line}: {report:?}");
            assert_eq!(report.first_corruption, None);
        }
    }
}

#[test]
fn each_round_writes_each_page_once() {
    for line in ["hot=3,random", "fill=2,text hot=3,sequential"] {
        let mut workload = Workload::populated(line, 3);
        let mut seen = BTreeSet::new();
        for _ in 0..2000 {
            workload.ticks += 1;
            (0..3).for_each(|vcpu| {
                workload.step(vcpu);
            });
            // Some vCPU is ahead, but no page is by more than a round within its vCPU's part.
            let first = workload.hot_pages().next().unwrap();
            let generations = |pages: u64| -> BTreeSet<u64> {
                (0..pages).map(|page| workload.word(first + page * PAGE)).collect()
            };
            let part = generations(256);
            assert!(part.len() <= 2 && part.last().unwrap() - part.first().unwrap() <= 1);
            seen.extend(part);
        }
        assert!(seen.len() > 50, "only {} generations", seen.len());
        assert_eq!(workload.report().corruptions, 0);
    }
}

#[test]
fn populated_means_filled_and_all_hot_pages_written_whatever_the_rate() {
    let workload = Workload::populated("fill=4,zero hot=4,rate=1", 2);
    assert!(workload.hot_pages().all(|gpa| workload.word(gpa) == 1));
    let populated = workload.memory.populated().unwrap();
    let bitmap = populated.bitmap(SlotId(0));
    let first = WORK / PAGE;
    assert!((first..first + 2048).all(|page| bitmap.is_set(page)));
    assert!((first + 2048..8192).all(|page| !bitmap.is_set(page)), "the rest is left alone");
}

#[test]
fn any_changed_byte_of_the_fill_is_found() {
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
fn a_changed_byte_of_what_the_last_round_wrote_is_found() {
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
fn a_page_of_an_earlier_round_is_found() {
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
fn a_page_that_never_arrived_is_found() {
    let mut workload = Workload::populated("hot=2,rate=1000", 1);
    let gpa = WORK + 99 * PAGE;
    workload.memory.write_at(gpa, &[0; PAGE_SIZE]).unwrap();
    let first = workload.check_all().first_corruption.unwrap();
    assert_eq!(first, Corruption { gpa, expected: 1, found: 0, round: 1 });
}

#[test]
fn pages_that_changed_places_are_found() {
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
fn a_report_of_an_earlier_time_is_found() {
    let mut workload = Workload::populated("hot=2,random,rate=1000", 1);
    let stale = workload.page(VCPU_REPORT);
    workload.check_all();
    workload.memory.write_at(VCPU_REPORT, &stale).unwrap();
    assert!(workload.check_all().corruptions > 100);
}

#[test]
fn a_guest_goes_no_faster_than_its_rate() {
    for (rate, vcpus, ticks, pages) in
        [(1000, 1, 1000, 1000), (20_000, 2, 500, 10_000), (3, 8, 8000, 24)]
    {
        let mut workload = Workload::populated(&format!("hot=2,rate={rate}"), vcpus);
        workload.tick(); // what populating has saved up
        let before = workload.report().pages_written;
        (0..ticks).for_each(|_| workload.tick());
        let written = workload.report().pages_written - before;
        assert!(written.abs_diff(pages) <= pages / 50 + u64::from(vcpus), "{rate}: {written}");
    }
}

#[test]
fn a_guest_that_was_paused_does_not_catch_up() {
    let mut workload = Workload::populated("hot=2,rate=10000", 1);
    workload.tick();
    let before = workload.report().pages_written;
    workload.ticks += 60_000;
    workload.tick();
    let written = workload.report().pages_written - before;
    assert!((150..=220).contains(&written), "{written}");
}

#[test]
fn a_guest_that_was_too_slow_does_not_catch_up() {
    let mut workload = Workload::populated("hot=2,rate=1000000", 1);
    for _ in 0..1000 {
        workload.ticks += 1;
        workload.step(0); // 64 of the 1000 pages that the rate allows
    }
    let before = workload.report().pages_written;
    while !workload.step(0) {}
    assert!(workload.report().pages_written - before <= 21_000);
}

#[test]
fn a_guest_that_reads_writes_nothing_and_never_waits() {
    let workload = Workload::populated("fill=2,text read=4", 2);
    let pages: Vec<_> = (512..1536).map(|page| workload.page(WORK + page * PAGE)).collect();
    let before = workload.report();
    for _ in 0..100 {
        assert!(!workload.step(0) && !workload.step(1), "as fast as the vCPUs can");
    }
    let after = workload.report();
    assert!(after.read_rounds > before.read_rounds + 4, "{after:?}");
    assert!(after.pages_checked >= before.pages_checked + 5 * 1024, "{after:?}");
    assert_eq!((after.pages_written, after.corruptions), (before.pages_written, 0));
    assert_eq!((after.read_pages, after.fill_pages, after.work_pages), (1024, 512, 1536));
    for (page, bytes) in (512..).zip(&pages) {
        assert!(*bytes == workload.page(WORK + page * PAGE), "page {page} was written");
    }
}

#[test]
fn any_changed_byte_of_what_is_read_is_found() {
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

#[test]
fn work_goes_on_above_the_gap_below_4_gib() {
    let slots =
        [(0, 17 * MIB), (DISPLAY, DISPLAY_BYTES), (STILL, DISPLAY_BYTES), (HIGH_RAM, 3 * MIB)];
    let mut workload = Workload::with_layout("display fill=2,text hot=2,random", 2, &slots);
    workload.step_until("populated", |workload| workload.report().populated);
    let report = workload.check_all();
    assert!(report.corruptions == 0 && report.rounds > 1, "{report:?}");
    workload.flip(HIGH_RAM + MIB - PAGE);
    assert_eq!(workload.check_all().first_corruption.unwrap().gpa, HIGH_RAM + MIB - PAGE);
    assert!(workload.word(HIGH_RAM + 3 * MIB - PAGE) > 1, "the last page is hot");
}

#[test]
fn what_exceeds_the_memory_is_cut() {
    let mut workload = Workload::populated("fill=10,zero hot=99999999999999999999", 8);
    assert_eq!(workload.report().work_pages, 16 * MIB / PAGE);
    assert_eq!(workload.check_all().corruptions, 0);
}

/// Guest memory comes from another host. Whatever it says, no address outside it is used.
#[test]
fn a_damaged_report_is_corruption_and_no_crash() {
    let huge = [1 << 20, 1 << 40, u64::MAX / 4096, u64::MAX];
    let mut cases = Vec::new();
    for huge in huge {
        // fill_pages, read_pages, hot_pages
        cases.extend([16, 24, 32].map(|offset| (GUEST_REPORT + offset, huge)));
        cases.extend([FILL_NEXT, READ_NEXT, HOT_NEXT].map(|offset| (VCPU_REPORT + offset, huge)));
    }
    cases.push((GUEST_REPORT + 8, 9 << 32 | 3)); // vcpus, version
    // display_pages: there is no display, and none has so many
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

/// Every word of the pages that the workload keeps its state in, whatever it is.
#[test]
fn no_word_of_the_state_makes_it_leave_its_memory() {
    let mut workload = Workload::populated("fill=2,text read=1 hot=2,random,rate=5000 display", 2);
    let saved = [GUEST_REPORT, VCPU_REPORT].map(|page| (page, workload.page(page)));
    for (page, words) in [(GUEST_REPORT, 11), (VCPU_REPORT, 44)] {
        for word in 0..words {
            for value in [0, 1, 1 << 32, u64::MAX >> 12, u64::MAX] {
                workload.set_word(page + 8 * word, value);
                (0..3).for_each(|_| workload.tick());
                // Reads sums of anything without overflow.
                workload.report();
                for (page, bytes) in &saved {
                    workload.memory.write_at(*page, bytes).unwrap();
                }
            }
        }
    }
}

#[test]
fn a_heartbeat_that_goes_back_or_is_wrong_is_found() {
    let slot = 0x2_0000;
    let beat = |workload: &Workload, begin: u64, hashed: u64, end: u64| {
        workload.set_word(slot, begin);
        workload.set_word(slot + 8, mix(hashed ^ slot));
        workload.set_word(slot + 16, end);
    };
    let mut workload = Workload::populated("ticks", 2);
    let mut look = |beat_it: &dyn Fn(&Workload)| {
        beat_it(&workload);
        (0..16).for_each(|_| workload.tick());
        let report = workload.report();
        (report.heartbeats, report.corruptions, report.first_corruption)
    };
    assert_eq!(look(&|_| {}), (0, 0, None));
    assert_eq!(look(&|workload| beat(workload, 16, 16, 16)), (1, 0, None));
    assert_eq!(look(&|workload| beat(workload, 32, 16, 16)), (1, 0, None), "being written");
    assert_eq!(look(&|workload| beat(workload, 32, 32, 32)), (2, 0, None));
    let gone_back = Corruption { gpa: slot, expected: 32, found: 16, round: 0 };
    assert_eq!(look(&|workload| beat(workload, 16, 16, 16)), (2, 1, Some(gone_back)));
    assert_eq!(look(&|workload| beat(workload, 48, 47, 48)).1, 2, "wrong hash");
}
