//! A guest without a VMM for tests of the engine: threads that write memory, tracked by
//! userfaultfd, over real channels.

#![allow(dead_code, reason = "each test uses a part of it")]

pub mod compressors;
pub mod content;
pub mod cutter;
pub mod guest;
pub mod logs;
pub mod relay;
pub mod streamer;
pub mod taker;

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub use guest::{Guest, PAGES, address};
use streamer::Streamer;
use vmferry::config::RoundLimit;
use vmferry::destination::{Owned, Received, Stop, receive};
use vmferry::source::{Orders, Report, SourceOutcome, migrate, migrate_streamed};
use vmferry::stats::SourceStats;
use vmferry::vmm::free_pages::FreePages;
use vmferry::{
    DestinationConfig, DestinationVm, GuestDescription, Landing, PrepareError, Resume,
    SourceConfig, SourceVm, VmError,
};
use vmferry_dirty::{DirtyLog, UffdLog};
use vmferry_doubles::FilteredLog;
use vmferry_memory::{GuestBytes, GuestMemory, MemoryKind, SlotId};
use vmferry_net_lab::{Namespaces, enter};
use vmferry_transport::{Address, Dialer, Listener, TlsIdentity};
use vmferry_wire::GuestIdentity;

pub struct SourceGuest {
    pub guest: Guest,
    pub log: Arc<dyn DirtyLog>,
    pub name: String,
    /// Sources of information about its free pages.
    pub free: Vec<Arc<dyn FreePages>>,
    /// Its VMM can no longer resume it.
    pub stuck: bool,
    /// Minimum time to pause and to save.
    pub slow: Duration,
}

impl SourceGuest {
    /// A guest that runs in this memory and rewrites `hot` pages.
    pub fn start(memory: GuestMemory, hot: u64) -> Self {
        let log = Arc::new(UffdLog::new(&memory).unwrap());
        let guest = Guest::new(memory, hot);
        guest.start();
        let (free, stuck, slow) = (Vec::new(), false, Duration::ZERO);
        Self { guest, log, name: "web".into(), free, stuck, slow }
    }
}

impl Resume for SourceGuest {
    fn resume(&mut self) -> Result<(), VmError> {
        if self.stuck {
            return Err("its vCPUs are gone".into());
        }
        self.guest.start();
        Ok(())
    }
}

impl SourceVm for SourceGuest {
    fn describe(&self) -> GuestDescription {
        GuestDescription {
            identity: GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: self.name.clone() },
            vmm: "threads".into(),
            config: vec![1, 2, 3],
            layout: self.guest.memory.layout(),
        }
    }

    fn memory(&self) -> GuestMemory {
        self.guest.memory.clone()
    }

    fn dirty_log(&self) -> Arc<dyn DirtyLog> {
        Arc::clone(&self.log)
    }

    fn pause(&mut self) -> Result<Duration, VmError> {
        let begun = Instant::now();
        self.guest.pause();
        std::thread::sleep(self.slow);
        Ok(begun.elapsed())
    }

    fn save(&mut self) -> Result<GuestBytes, VmError> {
        std::thread::sleep(self.slow);
        Ok(self.guest.hot_pages.to_le_bytes().into())
    }

    fn free_pages(&self) -> Vec<Arc<dyn FreePages>> {
        self.free.clone()
    }
}

#[derive(Default)]
pub struct DestinationGuest {
    pub guest: Option<Guest>,
    /// The memory prepared, kept when the guest is discarded.
    pub prepared: Arc<Mutex<Option<GuestMemory>>>,
    pub refuse: Option<&'static str>,
    pub fail_load: bool,
    /// Minimum time to prepare and to load.
    pub slow: Duration,
    /// Loading the state writes guest memory, as QEMU's VAPIC does.
    pub load_writes: bool,
    /// Loading the state reads the first page.
    pub load_reads: bool,
    /// It may run before all its pages have arrived.
    pub post_copy: bool,
    /// It is never started.
    pub idle: bool,
}

impl DestinationVm for DestinationGuest {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        if let Some(expected) = self.refuse {
            return Err(PrepareError::Identity {
                expected: expected.into(),
                offered: guest.identity.to_string(),
            });
        }
        // A VMM with much to do, such as reserving huge pages.
        std::thread::sleep(self.slow);
        let memory = GuestMemory::allocate(&guest.layout, MemoryKind::Private)
            .map_err(|error| PrepareError::Vm(error.into()))?;
        *self.prepared.lock().unwrap() = Some(memory.clone());
        self.guest = Some(Guest::new(memory.clone(), 0));
        Ok(Landing::Memory(memory))
    }

    fn load(&mut self, state: &[u8]) -> Result<(), VmError> {
        if self.fail_load {
            return Err("section `cpu` is damaged".into());
        }
        std::thread::sleep(self.slow);
        let hot_pages = u64::from_le_bytes(state.try_into()?);
        let guest = self.guest.as_mut().ok_or("not prepared")?;
        guest.hot_pages = hot_pages;
        if self.load_reads {
            guest.memory.read_at(address(0), &mut [0; 8])?;
        }
        if self.load_writes {
            // A page that no guest of these tests writes.
            guest.memory.write_at(address(PAGES - 1), &[0x5a; 2])?;
        }
        Ok(())
    }

    fn takes_post_copy(&self) -> Result<(), VmError> {
        self.post_copy.then_some(()).ok_or_else(|| "these tests do not let it".into())
    }

    fn discard(&mut self) {
        self.guest = None;
    }

    fn run(&mut self) -> Result<(), VmError> {
        if self.idle {
            return Ok(());
        }
        self.guest.as_ref().ok_or("not prepared")?.start();
        Ok(())
    }
}

/// A running guest with content in a quarter of its pages, which rewrites `hot` pages.
pub fn running_guest(hot: u64) -> SourceGuest {
    let memory = GuestMemory::allocate(&Guest::layout(), MemoryKind::Private).unwrap();
    for page in 0..PAGES / 4 {
        memory.write_at(address(page * 3) + 100, &(page * 77 + 1).to_le_bytes()).unwrap();
    }
    SourceGuest::start(memory, hot)
}

/// One migration between two threads of this process.
pub struct Scenario {
    pub directory: tempfile::TempDir,
    pub orders: Orders,
    pub stop: Stop,
    pub source: SourceConfig,
    pub destination: DestinationConfig,
    /// The address on which the destination listens.
    pub listen_at: Address,
    /// The address that the source dials, if it is a different one.
    pub dial: Option<Address>,
    /// The network namespaces of source and destination, if they have their own.
    pub namespaces: Option<Arc<Namespaces>>,
    /// Certificates of source and destination.
    pub identities: Option<[Arc<TlsIdentity>; 2]>,
}

/// Whether to run the long test matrices completely.
pub fn test_all() -> bool {
    std::env::var_os("VMFERRY_TEST_ALL").is_some()
}

impl Scenario {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut source = SourceConfig::new(directory.path().join("a"));
        source.verify = true;
        source.when_stuck = vmferry::config::WhenStuck::SwitchOver;
        source.max_rounds = RoundLimit::new(6).unwrap();
        let mut destination = DestinationConfig::new(directory.path().join("b"));
        destination.once = true;
        let listen_at = Address::Unix(directory.path().join("in.sock"));
        let (orders, stop) = (Orders::new(), Stop::default());
        Self {
            directory,
            orders,
            stop,
            source,
            destination,
            listen_at,
            dial: None,
            namespaces: None,
            identities: None,
        }
    }

    /// Over TCP instead of a Unix socket.
    pub fn over_tcp(mut self) -> Self {
        self.listen_at = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
        self
    }

    /// Runs both sides. `watch` receives the source's reports. With namespaces the calling thread
    /// moves into one.
    pub fn run(
        &self,
        vm: SourceGuest,
        destination: DestinationGuest,
        mut watch: impl FnMut(&Report),
    ) -> (SourceOutcome<SourceGuest>, Received<DestinationGuest>) {
        self.between(destination, |dialer| {
            migrate(vm, dialer, self.source.clone(), &self.orders, &mut watch)
        })
    }

    /// Runs both sides with a log that loses a page as soon as the guest is paused.
    pub fn run_forgetful(
        &self,
        mut vm: SourceGuest,
    ) -> (SourceOutcome<SourceGuest>, Received<DestinationGuest>) {
        let armed = Arc::new(AtomicBool::new(false));
        let loses = Arc::clone(&armed);
        vm.log = FilteredLog::new(vm.dirty_log(), move |dirty| {
            let pages = dirty.bitmap_mut(SlotId(0));
            if loses.load(Ordering::Acquire)
                && let Some((first, _)) = pages.runs().next()
            {
                pages.clear(first);
            }
        });
        let guest = vm.guest.clone();
        self.run(vm, DestinationGuest::default(), |report| {
            // The loss of a page that was only written before it was copied would not be noticed.
            content::let_work_between_rounds(&guest, report);
            if matches!(report, Report::Paused { .. }) {
                armed.store(true, Ordering::Release);
            }
        })
    }

    /// The same as [`run`](Self::run) for a carried guest. `watch` is dropped when the source ends.
    pub fn run_streamed<D: DestinationVm>(
        &self,
        vm: Streamer,
        destination: D,
        mut watch: impl FnMut(&Report),
    ) -> (SourceOutcome<Streamer>, Received<D>) {
        self.between(destination, move |dialer| {
            migrate_streamed(vm, dialer, self.source.clone(), &self.orders, &mut watch)
        })
    }

    fn between<D: DestinationVm, R>(
        &self,
        destination: D,
        send: impl FnOnce(&Dialer) -> R,
    ) -> (R, Received<D>) {
        let (bound, address) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let receiving = scope.spawn(move || {
                if let Some(namespaces) = &self.namespaces {
                    enter(File::open(namespaces.destination_path()).unwrap().as_fd()).unwrap();
                }
                let identity = self.identities.as_ref().map(|[_, there]| Arc::clone(there));
                let listener = Listener::bind(&self.listen_at, identity).unwrap();
                bound.send(listener.local_address().clone()).unwrap();
                receive(listener, destination, &self.destination, &self.stop, &mut |notice| {
                    eprintln!("destination: {notice:?}");
                })
            });
            if let Some(namespaces) = &self.namespaces {
                enter(File::open(namespaces.source_path()).unwrap().as_fd()).unwrap();
            }
            let bound = address.recv().unwrap();
            let identity = self.identities.as_ref().map(|[here, _]| Arc::clone(here));
            let dialer = Dialer::new(self.dial.clone().unwrap_or(bound), identity);
            (send(&dialer), receiving.join().unwrap())
        })
    }
}

pub fn given<V>(outcome: SourceOutcome<V>) -> (V, SourceStats) {
    match outcome {
        SourceOutcome::Given { vm, stats } => (vm, *stats),
        SourceOutcome::Kept { error, stats, .. } | SourceOutcome::Lost { error, stats, .. } => {
            panic!("kept: {}: {stats:?}", vmferry::chain(&error))
        }
    }
}

pub fn kept<V>(outcome: SourceOutcome<V>) -> (V, vmferry::MigrateError) {
    match outcome {
        SourceOutcome::Kept { vm, error, .. } => (vm, error),
        SourceOutcome::Given { stats, .. } | SourceOutcome::Lost { stats, .. } => {
            panic!("the guest was given away: {stats:?}")
        }
    }
}

pub fn owned<V>(received: Received<V>) -> Owned<V> {
    match received {
        Received::Owns(owned) => *owned,
        Received::Nothing { error, .. } => {
            panic!("no guest has arrived: {}", vmferry::chain(&error))
        }
    }
}

pub fn nothing<V>(received: Received<V>) -> vmferry::MigrateError {
    match received {
        Received::Nothing { error, .. } => error,
        Received::Owns(_) => panic!("the guest runs at the destination"),
    }
}

/// The state of both sides' sessions according to their journals.
pub fn journals(directory: &Path) -> Vec<vmferry_handover::journal::SessionSummary> {
    let mut all = vmferry_handover::journal::sessions(&directory.join("a")).unwrap();
    all.extend(vmferry_handover::journal::sessions(&directory.join("b")).unwrap());
    all
}

pub const SHORT: Duration = Duration::from_millis(300);
