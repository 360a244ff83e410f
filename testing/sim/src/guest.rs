//! A guest that writes its memory and knows what must stand there, and the VMMs around it.

mod balloon;
mod write_log;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use vmferry::vmm::free_pages::FreePages;
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, Resume, SourceVm, VmError};
use vmferry_codec::{CompressError, Compressors};
use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestBytes, GuestMemory, MemoryKind, PAGE_SIZE, SlotId, SlotLayout};
use vmferry_wire::GuestIdentity;

use self::balloon::Balloon;
use self::write_log::WriteLog;
use crate::plan::{Host, VmCall};

/// The guest's memory: several stripes of lanes, of which few pages are ever used.
pub fn layout() -> Vec<SlotLayout> {
    vec![
        SlotLayout { slot: SlotId(0), gpa: 0, pages: 2600 },
        SlotLayout { slot: SlotId(1), gpa: 1 << 32, pages: 600 },
    ]
}

/// Who runs the guest, and who ever did; shared by both hosts, as nothing in reality is.
#[derive(Debug, Default)]
pub struct Ledger {
    runs: [bool; 2],
    /// How often the source has set the guest going: a state that was saved before the last time is past.
    stretch: u64,
    ran_there: bool,
    /// What must never happen.
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

    /// The destination is told to run what was saved in this stretch.
    fn runs_there(&mut self, stretch: u64) {
        self.ran_there = true;
        if stretch != self.stretch {
            self.violations.push("the destination runs a guest of which the source ran on".into());
        }
    }
}

/// A page: which slot, and which page of it.
type Page = (u16, u64);

/// What a VMM writes when it loads a state.
const OPTION_ROM: Page = (1, 599);

/// The guest on one host. Clones are the same guest.
#[derive(Clone)]
pub struct Guest(Arc<Mutex<State>>);

struct State {
    host: Host,
    memory: Option<GuestMemory>,
    log: Arc<WriteLog>,
    /// Whether its balloon's driver hints free pages.
    hints: bool,
    balloon: Balloon,
    running: bool,
    /// A state is loaded that has never run here.
    waits: bool,
    quiet: bool,
    /// The version of each page that was ever written; 0 for one that was zeroed.
    written: BTreeMap<Page, u64>,
    next_version: u64,
    /// Of the state that is loaded: the stretch of the source's in which it was saved.
    stretch: u64,
    faults: Vec<VmCall>,
    /// Loading the state writes memory.
    load_writes: bool,
    /// Which process the VMM listens to; the calls of one that has died do nothing.
    process: u64,
    ledger: Arc<Mutex<Ledger>>,
}

impl Guest {
    /// No guest yet.
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

    /// From now on it runs and writes nothing.
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

    /// The process that had the VMM is dead. `with_guest`: and so is the guest.
    pub fn detach(&self, with_guest: bool) {
        let mut state = self.lock();
        state.process += 1;
        if with_guest {
            state.set_running(false);
            state.waits = false;
            state.memory = None;
            state.written.clear();
            state.balloon = Balloon::default();
        }
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
            state.write(rng);
        }
    }

    /// Compares the memory with what the guest has written.
    pub fn check(&self) {
        let state = self.lock();
        if let Err(text) = state.check() {
            state.ledger().violations.push(format!("{:?}: {text}", state.host));
        }
    }

    /// Notes what must never happen.
    pub fn violation(&self, text: String) {
        self.lock().ledger().violations.push(text);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_running(&mut self, runs: bool) {
        self.running = runs;
        self.ledger().set(self.host, runs);
    }

    /// A page is written whole: most of the time one of a few hot ones.
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
        let Some(memory) = &self.memory else { return };
        let gpa = (u64::from(page.0) << 32) + page.1 * PAGE_SIZE as u64;
        if memory.write_at(gpa, &content(page, version)).is_ok() {
            self.log.mark(page);
            self.balloon.uses(page);
            self.written.insert(page, version);
        }
    }

    fn check(&self) -> Result<(), String> {
        let Some(memory) = &self.memory else { return Ok(()) };
        let mut found = vec![0; PAGE_SIZE];
        for (&page, &version) in &self.written {
            let gpa = (u64::from(page.0) << 32) + page.1 * PAGE_SIZE as u64;
            memory.read_at(gpa, &mut found).map_err(|error| error.to_string())?;
            if found != content(page, version) {
                return Err(format!("page {page:?} is not version {version}"));
            }
        }
        let populated = memory.populated().map_err(|error| error.to_string())?;
        for run in populated.runs() {
            for page in run.first..run.first + run.pages {
                let page = (run.slot.0, page);
                if self.balloon.is_free(page) || page == OPTION_ROM {
                    continue;
                }
                let gpa = (u64::from(page.0) << 32) + page.1 * PAGE_SIZE as u64;
                memory.read_at(gpa, &mut found).map_err(|error| error.to_string())?;
                if !self.written.contains_key(&page) && found.iter().any(|&byte| byte != 0) {
                    return Err(format!("page {page:?} was never written and is not zero"));
                }
            }
        }
        Ok(())
    }

    /// Whether this call fails; once for each time that it was told to.
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

/// In the place of a version: the page is free.
const FREE: u64 = u64::MAX;

/// What a page of this version holds, each word of it.
fn content(page: Page, version: u64) -> Vec<u8> {
    if version == 0 {
        return vec![0; PAGE_SIZE];
    }
    let word = version.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (u64::from(page.0) << 48) ^ page.1;
    word.to_le_bytes().repeat(PAGE_SIZE / 8)
}

/// The VMM, as one process of its host has it.
pub struct Vm {
    guest: Guest,
    process: u64,
}

impl Vm {
    /// The guest's state, unless the process is dead.
    fn state(&self) -> Result<MutexGuard<'_, State>, VmError> {
        let state = self.guest.lock();
        if state.process == self.process { Ok(state) } else { Err("the process is dead".into()) }
    }

    /// The compressors of the VMM's host.
    pub fn compressors(&self) -> Compressors {
        let guest = self.guest.clone();
        Compressors::new(move |method| {
            guest.lock().fails(VmCall::Compress).map_err(|error| CompressError::Unavailable {
                method,
                reason: error.to_string(),
            })?;
            Compressors::default().make(method)
        })
    }
}

impl Resume for Vm {
    fn resume(&mut self) -> Result<(), VmError> {
        let mut state = self.state()?;
        state.fails(VmCall::Resume)?;
        if !state.running {
            state.set_running(true);
        }
        Ok(())
    }
}

impl SourceVm for Vm {
    fn describe(&self) -> GuestDescription {
        GuestDescription {
            identity: GuestIdentity { uuid: uuid::Uuid::from_u128(9), name: "simulated".into() },
            vmm: "simulated".into(),
            config: Vec::new(),
            layout: layout(),
        }
    }

    fn memory(&self) -> GuestMemory {
        self.guest.lock().memory.clone().expect("the source's guest has memory")
    }

    fn dirty_log(&self) -> Arc<dyn DirtyLog> {
        self.guest.lock().log.clone()
    }

    fn pause(&mut self) -> Result<Duration, VmError> {
        let mut state = self.state()?;
        state.fails(VmCall::Pause)?;
        state.set_running(false);
        Ok(Duration::from_micros(300))
    }

    fn save(&mut self) -> Result<GuestBytes, VmError> {
        let mut state = self.state()?;
        state.fails(VmCall::Save)?;
        let mut bytes = GuestBytes::from(state.next_version.to_le_bytes());
        bytes.extend_from_slice(&state.ledger().stretch.to_le_bytes());
        let written = state.written.iter().map(|(page, version)| (*page, *version));
        for ((slot, page), version) in written.chain(state.balloon.pages().map(|page| (page, FREE)))
        {
            for word in [u64::from(slot), page, version] {
                bytes.extend_from_slice(&word.to_le_bytes());
            }
        }
        Ok(bytes)
    }

    fn free_pages(&self) -> Vec<Arc<dyn FreePages>> {
        if self.guest.lock().hints { vec![Arc::new(self.guest.clone())] } else { Vec::new() }
    }
}

impl DestinationVm for Vm {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        let mut state = self.state().map_err(PrepareError::Vm)?;
        state.fails(VmCall::Prepare).map_err(PrepareError::Vm)?;
        let memory = GuestMemory::allocate(&guest.layout, MemoryKind::Private)
            .map_err(|error| PrepareError::Vm(error.into()))?;
        state.memory = Some(memory.clone());
        Ok(Landing::Memory(memory))
    }

    fn load(&mut self, bytes: &[u8]) -> Result<(), VmError> {
        let mut state = self.state()?;
        state.fails(VmCall::Load)?;
        let words: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
            .collect();
        let [next_version, stretch, rest @ ..] = &words[..] else { return Err("no state".into()) };
        (state.next_version, state.stretch) = (*next_version, *stretch);
        state.waits = true;
        let pages = rest.chunks_exact(3).map(|page| ((page[0] as u16, page[1]), page[2]));
        let (free, written): (Vec<_>, Vec<_>) = pages.partition(|(_, version)| *version == FREE);
        state.written = written.into_iter().collect();
        free.into_iter().for_each(|(page, _)| state.balloon.frees(page));
        if state.load_writes
            && let Some(memory) = &state.memory
        {
            memory.write_at(
                (u64::from(OPTION_ROM.0) << 32) + OPTION_ROM.1 * PAGE_SIZE as u64,
                &[0x5a; 2],
            )?;
        }
        Ok(())
    }

    fn discard(&mut self) {
        if let Ok(mut state) = self.state() {
            state.waits = false;
            state.memory = None;
            state.written.clear();
            state.balloon = Balloon::default();
        }
    }

    fn run(&mut self) -> Result<(), VmError> {
        let mut state = self.state()?;
        // Once it was told to, the guest is this host's, and a failure is a crash of the guest.
        state.ledger().runs_there(state.stretch);
        state.waits = false;
        state.fails(VmCall::Run)?;
        state.set_running(true);
        if let Err(text) = state.check() {
            let text = format!("what arrived is not what was there: {text}");
            state.ledger().violations.push(text);
        }
        Ok(())
    }
}
