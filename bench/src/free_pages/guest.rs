//! A guest that migrates from machine to machine, and the cost of each migration.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use parking_lot::MutexGuard;
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

/// Both sides use transparent huge pages. Otherwise populating the memory would take longer than
/// everything that is measured.
const MEMORY: MemoryKind = MemoryKind::Thp;

/// Time limit for populating the memory. 8 GB take about ten seconds.
const PATIENCE: Duration = Duration::from_secs(600);

/// Time over which the guest's work is counted before the migration.
const BEFORE: Duration = Duration::from_secs(1);

/// The cost of one migration.
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
    /// The length of the span in seconds, and the guest's work in it on either side.
    pub span_s: f64,
    pub work_per_s_in_span: f64,
    pub source_cpu_s: f64,
    pub destination_cpu_s: f64,
}

/// A running guest.
pub struct Guest {
    machine: SharedMachine,
    used_mib: u64,
}

impl Guest {
    /// Starts a guest and waits until it has used its memory and freed most of it.
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
            ensure!(
                begun.elapsed() < PATIENCE,
                "the guest did not use its memory within {PATIENCE:?}"
            );
            // The guest reports in its memory, so there is nothing to wait on.
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(guest)
    }

    /// Migrates the guest to a new machine. Its work is counted for `span` seconds from the start
    /// of the migration, or until the guest runs at the destination if that is later.
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
        let received = received.map_err(|_| anyhow!("the destination's thread panicked"))?;
        let stats = match outcome {
            SourceOutcome::Given { stats, .. } => stats,
            SourceOutcome::Kept { error, .. } | SourceOutcome::Lost { error, .. } => {
                bail!("the migration failed: {}", vmferry::chain(&error))
            }
        };
        let Received::Owns(owned) = received else {
            bail!("the destination does not own the guest")
        };

        // The guest is paused on this machine since the switchover.
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
        let machine = owned.vm.machine.context("the destination's machine is missing")?;
        let there = Self { machine, used_mib: self.used_mib };
        // The guest works during this sleep.
        std::thread::sleep(Duration::from_secs_f64(span).saturating_sub(begun.elapsed()));
        sample.span_s = begun.elapsed().as_secs_f64();
        sample.work_per_s_in_span = (there.report()?.churn_work - work) as f64 / sample.span_s;
        Ok((there, sample))
    }

    /// Checks that the guest found no corruption in its memory.
    pub fn check(&self) -> anyhow::Result<()> {
        let report = self.report()?;
        ensure!(
            report.corruptions == 0,
            "the guest found its memory corrupted: {:?}",
            report.first_corruption
        );
        Ok(())
    }

    fn work_per_s(&self, over: Duration) -> anyhow::Result<f64> {
        let (begun, before) = (Instant::now(), self.report()?.churn_work);
        // The guest works during this sleep.
        std::thread::sleep(over);
        Ok((self.report()?.churn_work - before) as f64 / begun.elapsed().as_secs_f64())
    }

    fn report(&self) -> anyhow::Result<Report> {
        let machine = self.lock();
        if let Some(crash) = machine.crash() {
            bail!("the guest crashed: {crash}");
        }
        Ok(machine.report()?)
    }

    fn lock(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock()
    }
}

/// Allocates memory once and frees it. On a virtual machine, memory that was unused for long comes
/// from its host again, which takes longer than everything that is measured. A destination without
/// hints needs memory for the whole guest; with hints it needs little.
fn warm_up(mib: u64) -> anyhow::Result<()> {
    let pages = mib << 8;
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages }];
    let memory = GuestMemory::allocate(&layout, MEMORY)?;
    Ok(memory.populate(PageRun { slot: SlotId(0), first: 0, pages })?)
}

/// Returns the populated pages that the guest does not count as free, and the free pages in partly
/// used blocks. Only whole blocks are hinted.
fn account(memory: &GuestMemory) -> anyhow::Result<(u64, u64)> {
    let account = FreeAccount::read(memory)?.context("the guest does not report its free pages")?;
    let mut in_use = memory.populated()?;
    in_use.subtract(&account.pages);
    let whole = u64::from(account.blocks - account.whole - account.split);
    let fragments = account.pages.count() - whole * BLOCK_BYTES / PAGE_SIZE as u64;
    Ok((in_use.count(), fragments))
}

fn bytes(pages: u64) -> f64 {
    pages as f64 * PAGE_SIZE as f64
}
