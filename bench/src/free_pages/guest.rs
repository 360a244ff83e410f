//! A guest that wanders from machine to machine, and what each move took.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use vmferry::destination::{Received, Stop, receive};
use vmferry::source::{Orders, SourceOutcome, migrate};
use vmferry::{DestinationConfig, SourceConfig};
use vmferry_dirty::{LogChoice, SoftwareWay};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageRun, SlotId, SlotLayout};
use vmferry_microvm::account::{BLOCK_BYTES, FreeAccount};
use vmferry_microvm::config::GuestConfig;
use vmferry_microvm::embed::{IncomingMachine, MigratingMachine};
use vmferry_microvm::report::Report;
use vmferry_microvm::{GuestKind, Machine, MachineConfig, SharedMachine};
use vmferry_transport::{Address, Dialer, Listener};
use vmferry_wire::GuestIdentity;

use super::Case;

/// The guest's memory is asked for in huge pages, and so is the destination's: otherwise populating it takes
/// longer than all that is measured.
const MEMORY: MemoryKind = MemoryKind::Thp;

/// Populating 8 GB takes some ten seconds; a limit for what hangs.
const PATIENCE: Duration = Duration::from_secs(600);

/// For so long its work is counted before it moves.
const BEFORE: Duration = Duration::from_secs(1);

/// What one move took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    pub total_ms: f64,
    pub downtime_ms: f64,
    pub rounds: f64,
    pub sent_bytes: f64,
    pub page_bytes: f64,
    pub nonfree_bytes: f64,
    pub fragments_bytes: f64,
    pub hinted_bytes: f64,
    pub work_per_s_before: f64,
    pub work_per_s_during: f64,
    /// Of the whole span, in seconds, and what the guest did in it wherever it was.
    pub span_s: f64,
    pub work_per_s_in_span: f64,
    pub source_cpu_s: f64,
    pub destination_cpu_s: f64,
}

/// A running guest, and how much of its memory it has used.
pub struct Guest {
    machine: SharedMachine,
    used_mib: u64,
}

impl Guest {
    /// One that has used its memory and freed most of it.
    pub fn start(case: &Case) -> anyhow::Result<Self> {
        let machine = Machine::shared(MachineConfig {
            identity: GuestIdentity { uuid: uuid::Uuid::nil(), name: "bench".into() },
            guest: GuestConfig {
                memory_bytes: case.memory_mib << 20,
                vcpus: 4,
                command_line: case.workload(),
                balloon: true,
            },
            kind: GuestKind::Kvm,
            memory_kind: MEMORY,
            dirty_log: LogChoice::Auto,
            device_log: SoftwareWay::Switch,
        })?;
        let guest = Self { machine, used_mib: case.used_mib };
        guest.lock().start()?;
        let begun = Instant::now();
        while !guest.report()?.populated {
            ensure!(begun.elapsed() < PATIENCE, "it has not used its memory within {PATIENCE:?}");
            // It reports by its memory, which wakes nobody.
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(guest)
    }

    /// Moves it to a new machine, and returns it there. Its work is counted for `span` seconds from the beginning, or
    /// until it runs there if that is longer.
    pub fn move_on(self, hints: bool, span: f64) -> anyhow::Result<(Self, Sample)> {
        warm_up(self.used_mib)?;
        let directory = tempfile::tempdir()?;
        let mut config = SourceConfig::new(directory.path().join("source"));
        config.free_page_hints = hints;
        config.downtime_limit = Duration::from_millis(400);
        let mut sample =
            Sample { work_per_s_before: self.work_per_s(BEFORE)?, ..Sample::default() };

        let listener = Listener::bind(&Address::Tcp { host: "127.0.0.1".into(), port: 0 }, None)?;
        let dialer = Dialer::new(listener.local_address().clone(), None);
        let receiving = DestinationConfig {
            once: true,
            ..DestinationConfig::new(directory.path().join("destination"))
        };
        let incoming = IncomingMachine { memory_kind: MEMORY, ..IncomingMachine::default() };
        let machine = MigratingMachine::new(Arc::clone(&self.machine))?;
        let (begun, work) = (Instant::now(), self.report()?.churn_work);
        let (outcome, took, received) = std::thread::scope(|scope| {
            let destination = scope
                .spawn(|| receive(listener, incoming, &receiving, &Stop::default(), &mut |_| {}));
            let outcome = migrate(machine, &dialer, config, &Orders::new(), &mut |_| {});
            (outcome, begun.elapsed(), destination.join())
        });
        let received = received.map_err(|_| anyhow!("the destination has panicked"))?;
        let stats = match outcome {
            SourceOutcome::Given { stats, .. } => stats,
            SourceOutcome::Kept { error, .. } => bail!("it stayed: {}", vmferry::chain(&error)),
        };
        let Received::Owns(owned) = received else { bail!("no guest came") };

        // It is paused here, as it was when it was given away.
        let did = self.report()?.churn_work - work;
        let ran = took.as_secs_f64() - stats.downtime_ms / 1e3;
        sample.work_per_s_during = did as f64 / ran;
        sample.total_ms = stats.total_ms;
        sample.downtime_ms = stats.downtime_ms;
        sample.rounds = stats.rounds.len() as f64;
        sample.sent_bytes = stats.sent_bytes as f64;
        sample.page_bytes = bytes(stats.encoded.content());
        sample.hinted_bytes = bytes(stats.free_pages);
        let (in_use, fragments) = account(self.lock().memory())?;
        (sample.nonfree_bytes, sample.fragments_bytes) = (bytes(in_use), bytes(fragments));
        sample.source_cpu_s = stats.engine_cpu_s;
        sample.destination_cpu_s = owned.stats.engine_cpu_s;
        let machine = owned.vm.machine.context("the destination has no machine")?;
        let there = Self { machine, used_mib: self.used_mib };
        // What is measured is what it does in this time.
        std::thread::sleep(Duration::from_secs_f64(span).saturating_sub(begun.elapsed()));
        sample.span_s = begun.elapsed().as_secs_f64();
        sample.work_per_s_in_span = (there.report()?.churn_work - work) as f64 / sample.span_s;
        Ok((there, sample))
    }

    /// Its own checks have found nothing.
    pub fn check(&self) -> anyhow::Result<()> {
        let report = self.report()?;
        ensure!(
            report.corruptions == 0,
            "it found its memory corrupted: {:?}",
            report.first_corruption
        );
        Ok(())
    }

    fn work_per_s(&self, over: Duration) -> anyhow::Result<f64> {
        let (begun, before) = (Instant::now(), self.report()?.churn_work);
        // What is measured is what it does in this time.
        std::thread::sleep(over);
        Ok((self.report()?.churn_work - before) as f64 / begun.elapsed().as_secs_f64())
    }

    fn report(&self) -> anyhow::Result<Report> {
        let machine = self.lock();
        if let Some(crash) = machine.crash() {
            bail!("it has crashed: {crash}");
        }
        Ok(machine.report()?)
    }

    fn lock(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Has the system find so much memory, and gives it back: on a machine that is a guest itself, memory that was not used for a
/// while comes from its host, which takes longer than all that is measured. A destination without hints has to
/// take all of the guest's memory; with hints it needs little.
fn warm_up(mib: u64) -> anyhow::Result<()> {
    let pages = mib << 8;
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages }];
    let memory = GuestMemory::allocate(&layout, MEMORY)?;
    Ok(memory.populate(PageRun { slot: SlotId(0), first: 0, pages })?)
}

/// Populated pages that the guest does not count as free, and free pages in blocks of which it uses others: only whole
/// blocks are hinted.
fn account(memory: &GuestMemory) -> anyhow::Result<(u64, u64)> {
    let account = FreeAccount::read(memory)?.context("the guest keeps no account")?;
    let mut in_use = memory.populated()?;
    in_use.subtract(&account.pages);
    let whole = u64::from(account.blocks - account.whole - account.split);
    let fragments = account.pages.count() - whole * BLOCK_BYTES / PAGE_SIZE as u64;
    Ok((in_use.count(), fragments))
}

fn bytes(pages: u64) -> f64 {
    pages as f64 * PAGE_SIZE as f64
}
