//! Attached guests of QEMU on KVM that run before all their pages have arrived. The command's tests
//! have emulated ones too, and processes that die.

use crate::support::{all, migrate_to};
use vmferry::config::{BandwidthCap, PostCopy, WhenStuck};
use vmferry_qemu::{Expected, QemuDestination};
use vmferry_qemu_lab::{Backend, Machine, Version, World};

/// Moves a guest there and back, each time with post-copy. It checks its memory all the time.
fn travel(machine: &Machine) {
    let world = World::new();
    let mut here = machine.start_booted(&world, "qemu-0");
    for number in 1..=2 {
        let there = machine.incoming(&world, &format!("qemu-{number}"));
        let destination = QemuDestination::attach(&there.qmp, Expected::default()).unwrap();
        let stats = migrate_to(&world, number, &here, destination, |config| {
            config.verify = false;
            config.when_stuck = WhenStuck::Refuse;
            config.post_copy = PostCopy::Now;
            config.downtime_limit = std::time::Duration::from_millis(1);
            // The background takes a while, so that the guest touches missing pages.
            config.max_bandwidth = Some(BandwidthCap::new(32 << 20).unwrap());
        });
        let stats = stats.unwrap_or_else(|error| panic!("kept: {}", vmferry::chain(&error)));
        println!(
            "{} pages fetched in {:.0} ms, downtime {:.1} ms",
            stats.missing_pages, stats.serving_ms, stats.downtime_ms
        );
        assert!(stats.missing_pages > 1000, "{stats:?}");
        assert_eq!(stats.digest_match, Some(true));
        here.child.wait().unwrap();
        here = there;
        here.check_guest();
        let said = here.wait_for("has checked its memory", |said| said.get("corruptions") == 0);
        assert_eq!(said.get("corruptions"), 0, "{said:?}");
    }
}

#[test]
fn guests_on_kvm_fetch_their_pages() {
    let workload = "fill=16,incompressible hot=24,random,rate=40000";
    let versions = if all() { &Version::ALL[..] } else { &[Version::V10_0] };
    for &version in versions {
        let machine = Machine { vcpus: 2, ..Machine::on_kvm(version, workload) };
        travel(&machine);
        travel(&Machine { backend: Backend::TwoNodes, ..machine });
    }
}
