//! A guest that writes its memory and knows the expected content, and the VMMs around it.

mod balloon;
mod missing;
mod vm;
mod write_log;

use std::collections::BTreeMap;
use std::sync::Arc;

use fastrand::Rng;
use parking_lot::{Mutex, MutexGuard};
use vmferry::VmError;
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, SlotId, SlotLayout};
use vmferry_wire::GuestIdentity;

use self::balloon::Balloon;
pub use self::missing::Fetched;
use self::missing::Missing;
pub use self::vm::Vm;
use self::write_log::WriteLog;
use crate::host::Host;
use crate::plan::VmCall;

/// The guest's name.
pub fn identity() -> GuestIdentity {
    GuestIdentity { uuid: uuid::Uuid::from_u128(9), name: "simulated".into() }
}

/// The guest's memory: several stripes of each lane, of which few pages are ever used.
pub fn layout() -> Vec<SlotLayout> {
    vec![
        SlotLayout { slot: SlotId(0), gpa: 0, pages: 2600 },
        SlotLayout { slot: SlotId(1), gpa: 1 << 32, pages: 600 },
    ]
}

/// Which host runs the guest, and which have run it. Shared by both hosts, unlike anything in
/// reality.
#[derive(Debug, Default)]
pub struct Ledger {
    runs: [bool; 2],
    /// How often the source has resumed the guest: a state saved before the last time is outdated.
    stretch: u64,
    ran_there: bool,
    /// Pages that the guest at the destination lacks.
    lacking: u64,
    /// What it has fetched.
    pub fetched: Fetched,
    /// The violations of the promises.
    pub violations: Vec<String>,
}

impl Ledger {
    fn set(&mut self, host: Host, runs: bool) {
        self.runs[host as usize] = runs;
        if self.runs == [true, true] {
            self.violations.push("two hosts run the guest".into());
        }
        if host == Host::Source && runs {
            self.stretch += 1;
            if self.ran_there {
                self.violations.push("the source runs a guest that ran on elsewhere".into());
            }
        }
    }

    /// The destination runs a state that was saved in this stretch.
    fn runs_there(&mut self, stretch: u64) {
        self.ran_there = true;
        if stretch != self.stretch {
            self.violations.push("the destination runs a guest of which the source ran on".into());
        }
    }
}

/// A page: its slot, and its number in the slot.
type Page = (u16, u64);

/// A page's guest-physical address.
fn gpa_of(page: Page) -> u64 {
    (u64::from(page.0) << 32) + page.1 * PAGE_SIZE as u64
}

/// The page that a VMM writes when it loads a state.
const OPTION_ROM: Page = (1, 599);

/// The guest on one host. Clones are the same guest.
#[derive(Clone)]
pub struct Guest(Arc<Mutex<State>>);

struct State {
    host: Host,
    memory: Option<GuestMemory>,
    log: Arc<WriteLog>,
    /// Whether its balloon driver hints free pages.
    hints: bool,
    balloon: Balloon,
    running: bool,
    /// A state is loaded that has never run here.
    waits: bool,
    quiet: bool,
    /// The version of each page that was ever written; 0 for a zeroed page.
    written: BTreeMap<Page, u64>,
    next_version: u64,
    missing: Missing,
    /// The stretch of the source in which the loaded state was saved.
    stretch: u64,
    faults: Vec<VmCall>,
    /// Loading the state writes memory.
    load_writes: bool,
    /// The process that the VMM serves; the calls of a dead process do nothing.
    process: u64,
    ledger: Arc<Mutex<Ledger>>,
}

impl Guest {
    /// A host without the guest.
    pub fn absent(host: Host, ledger: &Arc<Mutex<Ledger>>) -> Self {
        Self(Arc::new(Mutex::new(State {
            host,
            memory: None,
            log: Arc::default(),
            hints: false,
            balloon: Balloon::default(),
            running: false,
            waits: false,
            quiet: false,
            written: BTreeMap::new(),
            next_version: 1,
            missing: Missing::default(),
            stretch: 0,
            faults: Vec::new(),
            load_writes: false,
            process: 0,
            ledger: Arc::clone(ledger),
        })))
    }

    /// A running guest that has populated some of its memory.
    pub fn running(ledger: &Arc<Mutex<Ledger>>, rng: &mut Rng) -> Self {
        let guest = Self::absent(Host::Source, ledger);
        let memory = GuestMemory::allocate(&layout(), MemoryKind::Private);
        guest.lock().memory = Some(memory.expect("a few MiB can be mapped"));
        guest.lock().set_running(true);
        guest.lock().hints = rng.bool();
        guest.work(rng, 30);
        guest
    }

    /// From now on it runs without writing.
    pub fn be_quiet(&self) {
        self.lock().quiet = true;
    }

    /// Makes the log lose a page at each harvest.
    pub fn forget_pages(&self) {
        self.lock().log.forget();
    }

    /// From now on its VMM writes memory when it loads a state, as QEMU does for its VAPIC.
    pub fn load_writes(&self) {
        self.lock().load_writes = true;
    }

    /// Makes a call of the VMM fail.
    pub fn fail(&self, call: VmCall) {
        self.lock().faults.push(call);
    }

    /// The VMM for a new process of the host.
    pub fn attach(&self) -> Vm {
        let mut state = self.lock();
        state.process += 1;
        let free = state.balloon.pages().collect::<Vec<_>>();
        state.balloon = Balloon::default();
        free.into_iter().for_each(|page| state.balloon.frees(page));
        Vm { guest: self.clone(), process: state.process }
    }

    /// The process that had the VMM is dead. With `with_guest` the guest is dead too.
    pub fn detach(&self, with_guest: bool) {
        let mut state = self.lock();
        state.process += 1;
        if with_guest {
            state.set_running(false);
            state.vanish();
        }
    }

    /// It crashes: its VMM ends.
    pub fn crash(&self) {
        let mut state = self.lock();
        state.set_running(false);
        state.vanish();
    }

    /// Whether nothing of it is there.
    pub fn is_gone(&self) -> bool {
        self.lock().memory.is_none()
    }

    /// Whether it runs.
    pub fn is_running(&self) -> bool {
        self.lock().running
    }

    /// Whether a state is loaded that has never run here.
    pub fn waits(&self) -> bool {
        self.lock().waits
    }

    /// Writes some pages, if it runs.
    pub fn work(&self, rng: &mut Rng, writes: usize) {
        let mut state = self.lock();
        if !state.running || state.quiet {
            return;
        }
        for _ in 0..writes {
            if state.missing.stops_the_guest() {
                return;
            }
            state.write(rng);
        }
    }

    /// Compares the memory with the guest's writes. It must be complete.
    pub fn check(&self) {
        let state = self.lock();
        let whole = match state.missing.left() {
            0 => state.check(),
            left => Err(format!("{left} pages are missing")),
        };
        if let Err(text) = whole {
            state.ledger.lock().violations.push(format!("{:?}: {text}", state.host));
        }
    }

    /// Records a violation.
    pub fn violation(&self, text: String) {
        self.lock().ledger.lock().violations.push(text);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}

impl State {
    fn set_running(&mut self, runs: bool) {
        self.running = runs;
        self.ledger.lock().set(self.host, runs);
    }

    /// Writes a whole page: mostly one of a few hot ones.
    fn write(&mut self, rng: &mut Rng) {
        if self.hints {
            self.balloon.work(rng);
            if rng.u32(..4) == 0 && !self.written.is_empty() {
                let page = self.written.keys().nth(rng.usize(..self.written.len())).copied();
                if let Some(page) = page {
                    self.written.remove(&page);
                    self.balloon.frees(page);
                }
            }
        }
        // Never `OPTION_ROM`.
        let page: Page = match rng.u32(..10) {
            0..6 => (0, 500 + rng.u64(..24)),
            6..8 => (1, rng.u64(..40)),
            _ => (0, rng.u64(..2600)),
        };
        let version = if rng.u32(..8) == 0 { 0 } else { self.next_version };
        self.next_version += 1;
        if self.missing.has(page) {
            return self.missing.touch(page);
        }
        if self.missing.is_known()
            && let Err(text) = self.check_page(page)
        {
            self.ledger.lock().violations.push(format!("the guest reads a wrong page: {text}"));
        }
        self.store(page, version);
    }

    /// Writes a page that is there.
    fn store(&mut self, page: Page, version: u64) {
        let Some(memory) = &self.memory else { return };
        if memory.write_at(gpa_of(page), &content(page, version)).is_ok() {
            self.log.mark(page);
            self.balloon.uses(page);
            self.written.insert(page, version);
        }
    }

    /// The guest is gone.
    fn vanish(&mut self) {
        self.waits = false;
        self.memory = None;
        self.written.clear();
        self.balloon = Balloon::default();
        self.missing = Missing::default();
        self.count_missing();
    }

    /// Compares the pages that are there with the guest's writes.
    fn check(&self) -> Result<(), String> {
        let Some(memory) = &self.memory else { return Ok(()) };
        self.written.keys().try_for_each(|&page| self.check_page(page))?;
        let populated = memory.populated().map_err(|error| error.to_string())?;
        for run in populated.runs() {
            for page in run.first..run.first + run.pages {
                let page = (run.slot.0, page);
                if !self.written.contains_key(&page) {
                    self.check_page(page)?;
                }
            }
        }
        Ok(())
    }

    /// Compares a page with the guest's writes, unless it is missing.
    fn check_page(&self, page: Page) -> Result<(), String> {
        let version = self.written.get(&page);
        let matters = version.is_some() || !self.balloon.is_free(page) && page != OPTION_ROM;
        let Some(memory) = self.memory.as_ref().filter(|_| matters && !self.missing.has(page))
        else {
            return Ok(());
        };
        let mut found = [0; PAGE_SIZE];
        memory.read_at(gpa_of(page), &mut found).map_err(|error| error.to_string())?;
        match version {
            Some(&version) if found[..] != content(page, version) => {
                Err(format!("page {page:?} is not version {version}"))
            }
            None if found.iter().any(|&byte| byte != 0) => {
                Err(format!("page {page:?} was never written and is not zero"))
            }
            _ => Ok(()),
        }
    }

    /// Whether this call must fail. Each failure that was requested happens once.
    fn fails(&mut self, call: VmCall) -> Result<(), VmError> {
        match self.faults.iter().position(|&fault| fault == call) {
            Some(at) => {
                self.faults.swap_remove(at);
                Err(format!("the simulated VMM can't {call:?}").into())
            }
            None => Ok(()),
        }
    }
}

/// Used as a version: the page is free.
const FREE: u64 = u64::MAX;

/// The content of a page with this version: the same word throughout.
fn content(page: Page, version: u64) -> Vec<u8> {
    if version == 0 {
        return vec![0; PAGE_SIZE];
    }
    let word = version.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (u64::from(page.0) << 48) ^ page.1;
    word.to_le_bytes().repeat(PAGE_SIZE / 8)
}
