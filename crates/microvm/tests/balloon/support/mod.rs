//! Guests with a balloon, and their migration from one machine to another.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmferry::destination::{Received, Stop, receive};
use vmferry::source::{Orders, SourceOutcome, migrate};
use vmferry::stats::SourceStats;
use vmferry::{DestinationConfig, SourceConfig, VmError};
use vmferry_dirty::{LogChoice, SoftwareWay};
use vmferry_doubles::DestinationDouble;
use vmferry_kit::need_kvm;
use vmferry_memory::{GuestMemory, MemoryKind, PageRun, whole_hash_except};
use vmferry_microvm::account::FreeAccount;
use vmferry_microvm::config::GuestConfig;
use vmferry_microvm::embed::{IncomingMachine, MigratingMachine};
use vmferry_microvm::report::Report;
use vmferry_microvm::{GuestKind, Machine, MachineConfig, SharedMachine};
use vmferry_transport::{Address, Dialer, Listener};
use vmferry_wire::GuestIdentity;

/// Ends a test that hangs. Creating a machine alone may take more than ten seconds on a busy host,
/// because KVM waits for all CPUs when slots and eventfds are added.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;

/// A running guest with a balloon, which has populated the memory of its workload.
pub fn guest(workload: &str, log: LogChoice, kind: MemoryKind) -> SharedMachine {
    need_kvm();
    let machine = Machine::shared(MachineConfig {
        identity: GuestIdentity { uuid: uuid::Uuid::from_u128(8), name: "hints".into() },
        guest: GuestConfig {
            memory_bytes: 256 * MIB,
            vcpus: 2,
            command_line: workload.into(),
            balloon: true,
        },
        kind: GuestKind::Kvm,
        memory_kind: kind,
        dirty_log: log,
        device_log: SoftwareWay::Switch,
    })
    .unwrap();
    with(&machine, |machine| machine.start().unwrap());
    wait_for(&machine, "populated, its driver ready", |report| {
        report.populated && report.balloon.is_some()
    });
    machine
}

/// Calls `act` with the machine locked.
pub fn with<T>(machine: &SharedMachine, act: impl FnOnce(&mut Machine) -> T) -> T {
    act(&mut machine.lock())
}

/// The guest's report. The guest must not have crashed.
pub fn report(machine: &SharedMachine) -> Report {
    with(machine, |machine| {
        assert_eq!(machine.crash(), None);
        machine.report().unwrap()
    })
}

/// Waits until the guest's report satisfies `done`.
pub fn wait_for(machine: &SharedMachine, what: &str, done: impl Fn(&Report) -> bool) {
    let begun = Instant::now();
    loop {
        let report = report(machine);
        if done(&report) {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "not {what}: {report:?}");
        // The guest reports in its memory, so there is no event to wait for.
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The guest's account of its free pages, from its memory.
pub fn account(memory: &GuestMemory) -> FreeAccount {
    FreeAccount::read(memory).unwrap().expect("the guest keeps an account")
}

/// A destination that compares the memory on both sides before it runs the guest.
type ComparingMachine = DestinationDouble<IncomingMachine>;

/// Whether all used pages are equal on both sides. The source's guest is paused, and stays so.
fn are_equal(
    source: &SharedMachine,
    incoming: &IncomingMachine,
    damage: Damage,
) -> Result<bool, VmError> {
    let here = with(source, |machine| machine.memory().clone());
    let there = incoming.machine.as_ref().ok_or("no machine")?;
    let there = with(there, |machine| machine.memory().clone());
    let free = account(&here).pages;
    if damage == Damage::OnePage {
        let mut in_use = here.populated()?;
        in_use.subtract(&free);
        let run = in_use.runs().last().ok_or("nothing is in use")?;
        there.zero(PageRun { pages: 1, ..run })?;
    }
    Ok(whole_hash_except(&here, &free)? == whole_hash_except(&there, &free)?)
}

/// Whether the destination damages the guest's memory before the comparison.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    None,
    /// Zeros a page that is in use.
    OnePage,
}

/// A guest that has moved.
pub struct Moved {
    /// The machine at the destination.
    pub machine: SharedMachine,
    /// The source's statistics.
    pub stats: SourceStats,
    /// Whether all used pages were equal on both sides before the guest ran.
    pub equal: bool,
}

/// The result of an attempt to migrate a guest.
pub struct Attempt {
    pub outcome: SourceOutcome<MigratingMachine>,
    received: Received<ComparingMachine>,
    equal: Arc<Mutex<Option<bool>>>,
}

/// Migrates a guest to a new machine.
pub fn move_on(
    source: &SharedMachine,
    log: LogChoice,
    kind: MemoryKind,
    damage: Damage,
    set: impl FnOnce(&mut SourceConfig),
) -> Moved {
    let attempt = attempt(source, log, kind, damage, set, |_| {});
    let stats = match attempt.outcome {
        SourceOutcome::Given { stats, .. } => *stats,
        SourceOutcome::Kept { error, .. } | SourceOutcome::Lost { error, .. } => {
            panic!("kept: {}", vmferry::chain(&error))
        }
    };
    let Received::Owns(owned) = attempt.received else { panic!("no guest came") };
    let equal = attempt.equal.lock().take().expect("both memories were compared");
    Moved { machine: owned.vm.vm.machine.expect("a machine"), stats, equal }
}

/// Tries to migrate a guest. `meanwhile` runs during the migration and may give orders.
pub fn attempt(
    source: &SharedMachine,
    log: LogChoice,
    kind: MemoryKind,
    damage: Damage,
    set: impl FnOnce(&mut SourceConfig),
    meanwhile: impl FnOnce(&Orders) + Send,
) -> Attempt {
    let directory = tempfile::tempdir().unwrap();
    let mut config = SourceConfig::new(directory.path().join("source"));
    config.verify = true;
    config.timeouts.silence = PATIENCE;
    set(&mut config);
    let address = Address::Unix(directory.path().join("in.sock"));
    let listener = Listener::bind(&address, None).unwrap();
    let dialer = Dialer::new(address, None);
    let mut receiving = DestinationConfig {
        once: true,
        ..DestinationConfig::new(directory.path().join("destination"))
    };
    receiving.timeouts.silence = PATIENCE;
    let equal = Arc::new(Mutex::new(None));
    let incoming = IncomingMachine { memory_kind: kind, dirty_log: log, ..Default::default() };
    let (here, compared) = (Arc::clone(source), Arc::clone(&equal));
    let incoming = DestinationDouble::before_run(incoming, move |incoming| {
        *compared.lock() = Some(are_equal(&here, incoming, damage)?);
        Ok(())
    });
    let machine = MigratingMachine::new(Arc::clone(source)).unwrap();
    let orders = Orders::new();
    let (outcome, received) = std::thread::scope(|scope| {
        let destination =
            scope.spawn(|| receive(listener, incoming, &receiving, &Stop::default(), &mut |_| {}));
        scope.spawn(|| meanwhile(&orders));
        let outcome = migrate(machine, &dialer, config, &orders, &mut |_| {});
        (outcome, destination.join().unwrap())
    });
    Attempt { outcome, received, equal }
}
