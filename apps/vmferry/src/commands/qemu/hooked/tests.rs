//! A migration with post-copy to a VM that is wrapped for hooks.

use std::time::{Duration, Instant};

use vmferry::config::{BandwidthCap, PostCopy};
use vmferry::destination::{Received, Stop, receive};
use vmferry::source::{SourceOutcome, migrate};
use vmferry::{DestinationConfig, SourceConfig};
use vmferry_microvm::config::GuestConfig;
use vmferry_microvm::embed::{IncomingMachine, MigratingMachine};
use vmferry_microvm::{GuestKind, Machine, MachineConfig, SharedMachine};
use vmferry_transport::{Address, Dialer, Listener};

use super::*;

/// Not shown here, so its process and monitor are never asked for.
impl ReceivingQemu for IncomingMachine {
    fn process(&self) -> Option<u32> {
        None
    }

    fn monitor(&self) -> &Path {
        Path::new("")
    }
}

/// A guest of threads that rewrites 8 MiB of its memory.
fn guest() -> SharedMachine {
    let machine = Machine::shared(MachineConfig {
        identity: GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: "web".into() },
        guest: GuestConfig {
            memory_bytes: 32 << 20,
            vcpus: 1,
            command_line: "hot=8,random ticks".into(),
            balloon: false,
        },
        kind: GuestKind::Process,
        memory_kind: Default::default(),
        dirty_log: Default::default(),
        device_log: Default::default(),
    })
    .unwrap();
    machine.lock().start().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while !machine.lock().report().unwrap().populated {
        assert!(Instant::now() < until, "the guest has not populated its memory");
        std::thread::sleep(Duration::from_millis(5));
    }
    machine
}

#[test]
fn hooked_vm_is_told_of_its_fetch() {
    let directory = tempfile::tempdir().unwrap();
    let address = Address::Unix(directory.path().join("in.sock"));
    let listener = Listener::bind(&address, None).unwrap();
    let dialer = Dialer::new(address, None);
    let mut sending = SourceConfig::new(directory.path().join("source"));
    sending.post_copy = PostCopy::Now;
    sending.downtime_limit = Duration::from_nanos(1);
    // So slow that the guest still lacks pages when it runs.
    sending.max_bandwidth = Some(BandwidthCap::new(8 << 20).unwrap());
    let receiving = DestinationConfig {
        once: true,
        ..DestinationConfig::new(directory.path().join("destination"))
    };
    let (told, fetches) = std::sync::mpsc::channel();
    let on_fetch = Box::new(move |_, fetch: FetchHandle| told.send(fetch.progress()).unwrap());
    let incoming = IncomingMachine { on_fetch: Some(on_fetch), ..IncomingMachine::default() };
    let incoming = Hooked::new(incoming, None, &Output::new(true, true));
    let source = MigratingMachine::new(guest()).unwrap();
    let (outcome, received) = std::thread::scope(|scope| {
        let destination =
            scope.spawn(|| receive(listener, incoming, &receiving, &Stop::default(), &mut |_| {}));
        let outcome = migrate(source, &dialer, sending, &Orders::new(), &mut |_| {});
        (outcome, destination.join().unwrap())
    });
    let SourceOutcome::Given { stats, .. } = outcome else { panic!("the guest stayed") };
    let Received::Owns(owned) = received else { panic!("no guest has come") };
    let progress = fetches.try_recv().expect("told once").expect("the guest lacked pages");
    assert_eq!(progress.stats.missing_pages, stats.missing_pages);
    assert_eq!(owned.vm.vm.machine.unwrap().lock().crash(), None);
}
