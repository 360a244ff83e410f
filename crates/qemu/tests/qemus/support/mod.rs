//! Migrations from one QEMU to another, by the engine.

use std::thread::JoinHandle;

use vmferry::config::WhenStuck;
use vmferry::destination::{Received, Stop, receive};
use vmferry::source::{Orders, SourceOutcome, migrate, migrate_streamed};
use vmferry::stats::SourceStats;
use vmferry::{DestinationConfig, MigrateError, SourceConfig, SourceVm};
use vmferry_qemu::{CarriedSource, Expected, QemuDestination, QemuSource};
use vmferry_transport::{Address, Dialer, Listener};

use vmferry_qemu_lab::{Qemu, Version, World};

/// Whether the whole matrices run (`make test-all`), or samples of them.
pub fn all() -> bool {
    std::env::var_os("VMFERRY_TEST_ALL").is_some()
}

/// Every version of QEMU, or the newest one as a sample.
pub fn versions() -> &'static [Version] {
    if all() { &Version::ALL } else { &Version::ALL[1..] }
}

/// Moves a guest and quits the QEMU that it has left.
pub fn hop(world: &World, number: u32, from: &Qemu, to: &Qemu) -> SourceStats {
    hop_with(world, number, from, to, |_| {})
}

/// The same with other settings.
pub fn hop_with(
    world: &World,
    number: u32,
    from: &Qemu,
    to: &Qemu,
    change: impl FnOnce(&mut SourceConfig),
) -> SourceStats {
    migrate_with(world, number, from, to, change)
        .unwrap_or_else(|error| panic!("kept: {}", vmferry::chain(&error)))
}

/// Moves a guest, or returns the error. On an error both QEMUs are left as the engine leaves them.
pub fn migrate_between(
    world: &World,
    number: u32,
    from: &Qemu,
    to: &Qemu,
) -> Result<SourceStats, MigrateError> {
    migrate_with(world, number, from, to, |_| {})
}

/// The same with other settings.
pub fn migrate_with(
    world: &World,
    number: u32,
    from: &Qemu,
    to: &Qemu,
    change: impl FnOnce(&mut SourceConfig),
) -> Result<SourceStats, MigrateError> {
    let destination = QemuDestination::attach(&to.qmp, Expected::default()).unwrap();
    migrate_to(world, number, from, destination, change)
}

/// The same with a destination that is attached already.
pub fn migrate_to(
    world: &World,
    number: u32,
    from: &Qemu,
    to: QemuDestination,
    change: impl FnOnce(&mut SourceConfig),
) -> Result<SourceStats, MigrateError> {
    let mut source = QemuSource::attach(&from.qmp).unwrap();
    let (vm, stats) = migrate_source_to(world, number, to, |config| {
        change(config);
        if config.throttle.get() > 0 {
            source.allow_throttling().unwrap();
        }
        source
    })?;
    vm.quit().unwrap();
    Ok(stats)
}

/// Moves the guest of a source that the test creates, and leaves its QEMU as the engine does.
pub fn migrate_source<V: SourceVm>(
    world: &World,
    number: u32,
    to: &Qemu,
    make: impl FnOnce(&mut SourceConfig) -> V,
) -> Result<(V, SourceStats), MigrateError> {
    let to = QemuDestination::attach(&to.qmp, Expected::default()).unwrap();
    migrate_source_to(world, number, to, make)
}

fn migrate_source_to<V: SourceVm>(
    world: &World,
    number: u32,
    to: QemuDestination,
    make: impl FnOnce(&mut SourceConfig) -> V,
) -> Result<(V, SourceStats), MigrateError> {
    let (address, receiving) = receive_with(world, number, to);
    let mut config = config(world);
    config.verify = true;
    let source = make(&mut config);
    let dialer = Dialer::new(address, None);
    let outcome = migrate(source, &dialer, config, &Orders::default(), &mut |_| {});
    ended(outcome, receiving)
}

/// A migration that fails because of what `meanwhile` does after the source has described its
/// guest. Returns the errors of both sides.
pub fn migrate_after(
    world: &World,
    number: u32,
    from: &Qemu,
    to: &Qemu,
    meanwhile: impl FnOnce(),
) -> (MigrateError, MigrateError) {
    let (address, receiving) = receive_into(world, number, to);
    let source = QemuSource::attach(&from.qmp).unwrap();
    meanwhile();
    let dialer = Dialer::new(address, None);
    let outcome = migrate(source, &dialer, config(world), &Orders::default(), &mut |_| {});
    match (outcome, receiving.join().unwrap()) {
        (SourceOutcome::Kept { error, .. }, Received::Nothing { error: there, .. }) => {
            (error, there)
        }
        _ => panic!("it is moved"),
    }
}

/// The error of attaching to a QEMU that can't be attached.
pub fn attach_fails(qemu: &Qemu) -> String {
    match QemuSource::attach(&qemu.qmp) {
        Ok(_) => panic!("it can be attached"),
        Err(error) => vmferry::chain(&error),
    }
}

/// How fast a guest writes depends on the machine, so a stuck migration switches over unless a test
/// changes it.
pub fn config(world: &World) -> SourceConfig {
    SourceConfig { when_stuck: WhenStuck::SwitchOver, ..SourceConfig::new(world.path("here")) }
}

/// Runs the destination in a thread. Also returns where it listens.
pub fn receive_into(
    world: &World,
    number: u32,
    to: &Qemu,
) -> (Address, JoinHandle<Received<QemuDestination>>) {
    receive_with(world, number, QemuDestination::attach(&to.qmp, Expected::default()).unwrap())
}

fn receive_with(
    world: &World,
    number: u32,
    destination: QemuDestination,
) -> (Address, JoinHandle<Received<QemuDestination>>) {
    let address = Address::Unix(world.path(&format!("link-{number}")));
    let listener = Listener::bind(&address, None).unwrap();
    let directory = world.path("there");
    let receiving = std::thread::spawn(move || {
        let mut config = DestinationConfig::new(directory);
        config.once = true;
        receive(listener, destination, &config, &Stop::default(), &mut |_| {})
    });
    (address, receiving)
}

/// Carries a guest and quits the QEMU that it has left. Otherwise returns why not, with both QEMUs
/// as the engine leaves them.
pub fn carry(
    world: &World,
    number: u32,
    from: &Qemu,
    to: &Qemu,
    channels: u8,
    change: impl FnOnce(&mut SourceConfig),
) -> Result<SourceStats, MigrateError> {
    let (address, receiving) = receive_into(world, number, to);
    let source = CarriedSource::attach(&from.qmp, channels).unwrap();
    let mut config = config(world);
    change(&mut config);
    let dialer = Dialer::new(address, None);
    let outcome = migrate_streamed(source, &dialer, config, &Orders::default(), &mut |_| {});
    let (vm, stats) = ended(outcome, receiving)?;
    vm.quit().unwrap();
    Ok(stats)
}

/// The VM that the guest has left, or the source's error. Both sides must agree on the outcome.
pub fn ended<V>(
    outcome: SourceOutcome<V>,
    receiving: JoinHandle<Received<QemuDestination>>,
) -> Result<(V, SourceStats), MigrateError> {
    match (outcome, receiving.join().unwrap()) {
        (SourceOutcome::Given { vm, stats }, Received::Owns(owned)) => {
            assert!(owned.crash.is_none(), "{:?}", owned.crash);
            Ok((vm, *stats))
        }
        (SourceOutcome::Kept { error, .. }, Received::Nothing { error: there, .. }) => {
            println!("destination: {}", vmferry::chain(&there));
            Err(error)
        }
        _ => panic!("both have it, or neither has"),
    }
}
