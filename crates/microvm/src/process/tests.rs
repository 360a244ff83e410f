//! The workload's checks find all damage and nothing else. One thread steps all vCPUs, so these
//! tests are deterministic.

use std::collections::BTreeSet;

use vmferry_memory::{MemoryKind, PAGE_SIZE, SlotId, SlotLayout, map_slots};

use super::*;
use crate::config::GuestConfig;
use crate::heartbeat::mix;
use crate::kvm::DISPLAY_BYTES;
use crate::report::{Corruption, Report};

mod damage;
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

    /// A workload with populated memory, in its second round.
    fn populated(command_line: &str, vcpus: u32) -> Self {
        let mut workload = Self::new(command_line, vcpus);
        workload.step_until("populated", |workload| workload.report().populated);
        workload
    }

    /// Runs one tick: steps each vCPU until it has nothing to do, at most 100 times.
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

    /// Steps until the workload has checked everything once more.
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
fn undamaged_guest_reports_no_corruption() {
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
fn hot_round_writes_each_page_once() {
    for line in ["hot=3,random", "fill=2,text hot=3,sequential"] {
        let mut workload = Workload::populated(line, 3);
        let mut seen = BTreeSet::new();
        for _ in 0..2000 {
            workload.ticks += 1;
            (0..3).for_each(|vcpu| {
                workload.step(vcpu);
            });
            // A vCPU may be ahead of others, but the pages of one vCPU differ by at most one round.
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
fn populated_workload_is_filled_with_each_hot_page_written_once() {
    let workload = Workload::populated("fill=4,zero hot=4,rate=1", 2);
    assert!(workload.hot_pages().all(|gpa| workload.word(gpa) == 1));
    let populated = workload.memory.populated().unwrap();
    let bitmap = populated.bitmap(SlotId(0));
    let first = WORK / PAGE;
    assert!((first..first + 2048).all(|page| bitmap.is_set(page)));
    assert!((first + 2048..8192).all(|page| !bitmap.is_set(page)), "the rest is left alone");
}

#[test]
fn hot_rate_is_not_exceeded() {
    for (rate, vcpus, ticks, pages) in
        [(1000, 1, 1000, 1000), (20_000, 2, 500, 10_000), (3, 8, 8000, 24)]
    {
        let mut workload = Workload::populated(&format!("hot=2,rate={rate}"), vcpus);
        workload.tick(); // uses up the budget that is left from populating
        let before = workload.report().pages_written;
        (0..ticks).for_each(|_| workload.tick());
        let written = workload.report().pages_written - before;
        assert!(written.abs_diff(pages) <= pages / 50 + u64::from(vcpus), "{rate}: {written}");
    }
}

#[test]
fn hot_rate_does_not_catch_up_after_a_pause() {
    let mut workload = Workload::populated("hot=2,rate=10000", 1);
    workload.tick();
    let before = workload.report().pages_written;
    workload.ticks += 60_000;
    workload.tick();
    let written = workload.report().pages_written - before;
    assert!((150..=220).contains(&written), "{written}");
}

#[test]
fn hot_rate_does_not_catch_up_after_a_slow_phase() {
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
fn read_writes_nothing_and_never_waits() {
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
fn work_pages_continue_at_4_gib() {
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
fn work_pages_are_cut_at_the_end_of_memory() {
    let mut workload = Workload::populated("fill=10,zero hot=99999999999999999999", 8);
    assert_eq!(workload.report().work_pages, 16 * MIB / PAGE);
    assert_eq!(workload.check_all().corruptions, 0);
}
