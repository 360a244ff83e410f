//! Pages that the guest has hinted free are not sent, and all others are.

use std::sync::{Arc, Mutex};

use crate::support::content::{guest_of, text};
use crate::support::logs::LateLog;
use crate::support::{DestinationGuest, PAGES, Scenario, SourceGuest, address, given, kept, owned};
use vmferry::SourceVm;
use vmferry::config::RoundLimit;
use vmferry::vmm::free_pages::{FreePageHints, FreePages, Look};
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageSet};

const PAGE: u64 = PAGE_SIZE as u64;
/// Pages that the guest's threads write continuously.
const HOT: u64 = 200;
/// Pages that the guest frees: a part of the first slot and a part of the second.
const FREE: [std::ops::Range<u64>; 2] = [400..1900, PAGES / 2 + 100..PAGES / 2 + 1600];

/// The guest's balloon driver and device, simulated by a test.
struct Balloon {
    guest: Writer,
    state: Mutex<State>,
    act: Box<Act>,
}

/// A test's action in a round, at a stage of the protocol.
type Act = dyn Fn(&Writer, usize, Stage, &State) + Send + Sync;

/// A thread of the guest.
struct Writer(GuestMemory);

impl Writer {
    fn write(&self, page: u64, version: u8) {
        self.0.write_at(address(page), &[version; PAGE_SIZE]).unwrap();
    }
}

#[derive(Default)]
struct State {
    /// Hints of all rounds so far, the present one last.
    hints: Vec<FreePageHints>,
    ended: bool,
}

/// The state of the hinting protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The command ID was issued, and the guest has not seen it.
    Started,
    /// The guest has hinted all of its free pages.
    Hinted,
    /// Hinting was stopped.
    Stopped,
}

const STAGES: [Stage; 3] = [Stage::Started, Stage::Hinted, Stage::Stopped];

impl FreePages for Balloon {
    fn name(&self) -> &'static str {
        "a test"
    }

    fn can_hint(&self) -> bool {
        true
    }

    fn start(&self, hints: FreePageHints) {
        let mut state = self.state.lock().unwrap();
        state.hints.push(hints);
        let round = state.hints.len();
        (self.act)(&self.guest, round, Stage::Started, &state);
        (self.act)(&self.guest, round, Stage::Hinted, &state);
    }

    fn stop(&self) {
        let state = self.state.lock().unwrap();
        (self.act)(&self.guest, state.hints.len(), Stage::Stopped, &state);
    }

    fn end(&self) {
        self.state.lock().unwrap().ended = true;
    }
}

/// A guest with pages of text and a balloon.
fn guest(
    act: impl Fn(&Writer, usize, Stage, &State) + Send + Sync + 'static,
) -> (SourceGuest, Arc<Balloon>) {
    let start = |page| if page < HOT { vec![0] } else { text(page) };
    let mut vm = guest_of(HOT, (0..PAGES).map(|page| (page, start(page))));
    let guest = Writer(vm.memory());
    let balloon = Arc::new(Balloon { guest, state: Mutex::default(), act: Box::new(act) });
    vm.free = vec![Arc::clone(&balloon) as Arc<dyn FreePages>];
    (vm, balloon)
}

fn content(memory: &GuestMemory, page: u64) -> Vec<u8> {
    let mut content = vec![0; PAGE_SIZE];
    memory.read_at(address(page), &mut content).unwrap();
    content
}

/// As many rounds as the limit allows, each with hints.
fn scenario() -> Scenario {
    let mut scenario = Scenario::new();
    scenario.source.downtime_limit = std::time::Duration::ZERO;
    scenario.source.max_rounds = RoundLimit::new(3).unwrap();
    scenario
}

fn is_free(page: u64) -> bool {
    FREE.iter().any(|free| free.contains(&page))
}

fn hint_all(hints: &FreePageHints, poison: Option<u32>) {
    hint_all_but(&[], hints, poison);
}

fn hint_all_but(used: &[u64], hints: &FreePageHints, poison: Option<u32>) {
    for page in FREE.iter().cloned().flatten().filter(|page| !used.contains(page)) {
        hints.free(address(page), PAGE, poison);
    }
    hints.complete();
}

/// Pages that are used again in each round, each at a different stage of the protocol.
fn reused(round: usize, stage: Stage) -> [u64; 2] {
    let place = (round * 3 + stage as usize) as u64;
    [FREE[0].start + 10 + place * 37, FREE[1].start + 700 + place * 21]
}

#[test]
fn free_pages_are_not_sent_and_reused_ones_arrive() {
    for late in [false, true] {
        let (mut vm, balloon) = guest(|guest, round, stage, state| {
            let now = state.hints.last().unwrap();
            match stage {
                Stage::Started => {}
                // These hints include the pages used again in this round: the guest had found them
                // free before.
                Stage::Hinted => {
                    let before = (1..round).flat_map(|round| STAGES.map(|stage| (round, stage)));
                    let used: Vec<u64> =
                        before.flat_map(|(round, stage)| reused(round, stage)).collect();
                    hint_all_but(&used, now, None);
                }
                // Too late to have an effect.
                Stage::Stopped => {
                    for stale in &state.hints {
                        stale.free(address(HOT), 50 * PAGE, None);
                    }
                }
            }
            for page in reused(round, stage) {
                guest.write(page, round as u8 * 16 + stage as u8 + 1);
            }
        });
        if late {
            vm.log = Arc::new(LateLog::new(&vm.memory()));
        }
        let here = vm.memory();
        let (outcome, received) = scenario().run(vm, DestinationGuest::default(), |_| {});
        let (_, stats) = given(outcome);
        let there = owned(received).vm.guest.unwrap();
        there.pause();
        let rounds = balloon.state.lock().unwrap().hints.len();
        assert_eq!(rounds + 1, stats.rounds.len(), "asked in each round with the guest running");
        assert!(rounds >= 2, "{stats:?}");
        assert!(!balloon.state.lock().unwrap().ended, "the guest is the destination's");

        let mut behind = 0_u64;
        for page in HOT..PAGES {
            let (ours, theirs) = (content(&here, page), content(&there.memory, page));
            if ours != theirs {
                assert!(is_free(page), "page {page} is in use (late: {late})");
                assert!(theirs.iter().all(|byte| *byte == 0), "page {page}");
                behind += 1;
            }
        }
        for round in 1..=rounds {
            for stage in STAGES {
                let version = round as u8 * 16 + stage as u8 + 1;
                for page in reused(round, stage) {
                    let arrived = content(&there.memory, page) == [version; PAGE_SIZE];
                    assert!(arrived, "page {page} of round {round}, {stage:?} (late: {late})");
                }
            }
        }
        let reused = rounds as u64 * 3 * 2;
        assert_eq!(behind, 3000 - reused, "not one of them was sent");
        assert_eq!(stats.rounds[0].free_pages, 3000, "{stats:?}");
        assert!(stats.free_pages >= 3000);
        assert_eq!((stats.digest_match, stats.verify_match), (Some(true), Some(true)));
        for round in &stats.rounds {
            assert_eq!(round.pages, round.encoded.content() + round.zero_pages + round.free_pages);
        }
    }
}

/// The negative control of the test above: an invalid hint loses a page, and the test detects it.
#[test]
fn free_page_hint_for_a_used_page_loses_it() {
    let (vm, _) = guest(|_, _, stage, state| {
        if stage == Stage::Hinted {
            state.hints.last().unwrap().free(0, u64::MAX, None);
        }
    });
    let here = vm.memory();
    let (outcome, received) = scenario().run(vm, DestinationGuest::default(), |_| {});
    let (_, stats) = given(outcome);
    let there = owned(received).vm.guest.unwrap();
    there.pause();
    assert!(content(&here, PAGES - 1) != content(&there.memory, PAGES - 1));
    // The pages written since then are intact.
    assert_eq!(stats.verify_match, Some(true));
    assert!(stats.rounds[0].free_pages > PAGES / 2);
}

#[test]
fn free_pages_with_a_poison_arrive_poisoned() {
    const POISON: u32 = 0xaaaa_aaaa;
    let (vm, balloon) = guest(|guest, round, stage, state| {
        if stage == Stage::Hinted {
            if round == 1 {
                // The pages were freed long before. The test only now gives them their content.
                for page in FREE.iter().cloned().flatten() {
                    guest.write(page, 0xaa);
                }
            }
            hint_all(state.hints.last().unwrap(), Some(POISON));
        }
    });
    let (outcome, received) = scenario().run(vm, DestinationGuest::default(), |_| {});
    let (_, stats) = given(outcome);
    let there = owned(received).vm.guest.unwrap();
    there.pause();
    for page in FREE.iter().cloned().flatten() {
        assert!(content(&there.memory, page) == [0xaa; PAGE_SIZE], "page {page}");
    }
    drop(balloon);
    assert_eq!(stats.verify_match, Some(true));
    assert_eq!(stats.rounds[0].free_pages, 0, "they were sent");
}

/// A guest with `init_on_free` relies on free pages being zero, including those that were sent with
/// content.
#[test]
fn free_pages_zeroed_after_they_were_sent_arrive_as_zeros() {
    let (vm, _) = guest(|guest, round, stage, state| {
        let hints = state.hints.last().unwrap();
        match (stage, round) {
            // The content of the free pages is sent.
            (Stage::Hinted, 1) => hints.complete(),
            (Stage::Stopped, 1) => {
                for page in FREE.iter().cloned().flatten() {
                    guest.write(page, 0);
                }
            }
            (Stage::Hinted, _) => hint_all(hints, Some(0)),
            _ => {}
        }
    });
    let here = vm.memory();
    for page in FREE.iter().cloned().flatten() {
        assert!(content(&here, page) != [0; PAGE_SIZE], "page {page}");
    }
    let (outcome, received) = scenario().run(vm, DestinationGuest::default(), |_| {});
    let (_, stats) = given(outcome);
    let there = owned(received).vm.guest.unwrap();
    there.pause();
    for page in FREE.iter().cloned().flatten() {
        assert!(content(&there.memory, page) == [0; PAGE_SIZE], "page {page}");
    }
    assert_eq!((stats.verify_match, stats.free_pages), (Some(true), 0));
}

#[test]
fn guest_that_stays_gets_its_free_pages_back() {
    let (mut vm, balloon) = guest(|_, _, stage, state| {
        if stage == Stage::Hinted {
            hint_all(state.hints.last().unwrap(), None);
        }
    });
    let destination = DestinationGuest { fail_load: true, ..DestinationGuest::default() };
    let (outcome, _) = scenario().run(vm, destination, |_| {});
    let (back, _) = kept(outcome);
    vm = back;
    assert!(std::mem::take(&mut balloon.state.lock().unwrap().ended));
    let asked = balloon.state.lock().unwrap().hints.len();
    let (outcome, received) = scenario().run(vm, DestinationGuest::default(), |_| {});
    assert_eq!(given(outcome).1.rounds[0].free_pages, 3000);
    assert!(balloon.state.lock().unwrap().hints.len() > asked);
    owned(received).vm.guest.unwrap().pause();
}

/// A source of pages that have become zero.
struct GivenUp {
    pages: Mutex<Vec<u64>>,
    memory: GuestMemory,
}

impl FreePages for GivenUp {
    fn name(&self) -> &'static str {
        "given up"
    }

    fn zeroed(&self, look: &Look<'_>, zero: &mut PageSet) -> Result<(), vmferry::VmError> {
        for page in self.pages.lock().unwrap().drain(..) {
            assert!(look.sent.bitmap(vmferry_memory::SlotId(0)).is_set(page));
            self.memory.write_at(address(page), &[0; PAGE_SIZE])?;
            zero.bitmap_mut(vmferry_memory::SlotId(0)).set(page);
        }
        Ok(())
    }
}

#[test]
fn discarded_pages_arrive_as_zeros() {
    let (mut vm, _) = guest(|_, _, _, _| {});
    let pages = Mutex::new((500..600).collect());
    let memory = vm.memory();
    vm.free = vec![Arc::new(GivenUp { pages, memory })];
    let (outcome, received) = scenario().run(vm, DestinationGuest::default(), |_| {});
    assert_eq!(given(outcome).1.verify_match, Some(true));
    let there = owned(received).vm.guest.unwrap();
    there.pause();
    for page in 500..600 {
        assert!(content(&there.memory, page) == [0; PAGE_SIZE], "page {page}");
    }
}
