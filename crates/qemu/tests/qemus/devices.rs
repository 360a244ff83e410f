//! Guests of real QEMUs that use devices while they are moved: disks on shared storage, network,
//! balloon.

use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::{all, hop, hop_with, migrate_between, migrate_with, versions};
use vmferry::ErrorClass;
use vmferry::SourceConfig;
use vmferry::config::compression::CompressionWay;
use vmferry::config::{BandwidthCap, RoundLimit, ThrottleLimit, WhenStuck};
use vmferry_qemu::QemuSource;
use vmferry_qemu_lab::{Machine, Qemu, Said, SlowDisk, Version, World};

/// Waits until a figure has grown by `more`.
fn grows(qemu: &mut Qemu, name: &str, more: u64) -> Said {
    let before = qemu.wait_for("works", |said| said.get("uptime_us") > 0).get(name);
    let after = qemu.wait_for(name, |said| said.get(name) >= before + more);
    assert_eq!(after.get("corruptions"), 0, "{after:?}");
    assert_eq!(after.get("disk_errors"), 0, "{after:?}");
    after
}

/// A disk that bypasses the host's page cache writes guest memory without a fault: a harvest
/// between a request and its completion would miss its data.
#[test]
fn direct_io_of_a_disk_loses_no_data() {
    let ways: &[(Version, &str)] = &[
        (Version::V10_0, "cache=none,aio=io_uring"),
        (Version::V7_2, "cache=none,aio=native"),
        (Version::V10_0, "cache=writeback"),
        (Version::V7_2, "cache=directsync,aio=threads"),
    ];
    for (version, way) in if all() { ways } else { &ways[..2] } {
        let world = World::new();
        // It does not rest, so that a request is always pending.
        let (mib, hops) = if all() { (96, 4) } else { (48, 1) };
        let disk = world.disk(3 * mib);
        let drive = format!("if=none,id=disk,format=raw,file={},{way}", disk.display());
        let machine = Machine::new(*version, &format!("dirty=40 disk={mib} rest=0")).with(&[
            "-drive",
            &drive,
            "-device",
            "virtio-blk-pci,drive=disk",
        ]);
        let mut here = machine.start(&world, "qemu-0");
        grows(&mut here, "disk_rounds", 1);
        for number in 1..=hops {
            let mut there = machine.incoming(&world, &format!("qemu-{number}"));
            // If the system allows it, requests are slowed down, so that one is pending at any
            // moment.
            let slow = SlowDisk::limit(here.child.id(), &disk, 40 << 20);
            if let Err(error) = &slow {
                println!("requests are not slowed down here: {error}");
            }
            // Many rounds, each with a harvest that could miss data.
            let stats = hop_with(&world, number, &here, &there, |config| {
                config.downtime_limit = Duration::from_millis(17);
                config.max_rounds = RoundLimit::new(12).unwrap();
            });
            println!("{way}: {:.1} ms of pauses for harvests", stats.harvest_pauses_ms);
            assert_eq!(stats.harvest_pauses_ms > 0.0, !way.contains("writeback"), "{way}");
            here.child.wait().unwrap();
            grows(&mut there, "disk_rounds", 2);
            there.check_guest();
            here = there;
        }
    }
}

/// Echoes datagrams on this host.
struct Echo {
    port: u16,
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Echo {
    fn start() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let over = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            let mut bytes = [0; 2048];
            while let Ok((size, from)) = socket.recv_from(&mut bytes) {
                if is_over.load(Ordering::Acquire) {
                    return;
                }
                let _ = socket.send_to(&bytes[..size], from);
            }
        });
        Self { port, over, thread: Some(thread) }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        let waker = UdpSocket::bind("127.0.0.1:0").unwrap();
        waker.send_to(&[0], ("127.0.0.1", self.port)).unwrap();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

#[test]
fn network_traffic_continues_after_the_move() {
    let echo = Echo::start();
    for version in if all() { &Version::ALL[..] } else { &Version::ALL[1..] } {
        let world = World::new();
        let machine = Machine::new(*version, &format!("dirty=5 net={}", echo.port)).with(&[
            "-netdev",
            "user,id=net",
            "-device",
            "virtio-net-pci,netdev=net",
        ]);
        let mut here = machine.start(&world, "qemu-0");
        grows(&mut here, "net_replies", 50);
        for number in 1..=2 {
            let mut there = machine.incoming(&world, &format!("qemu-{number}"));
            hop(&world, number, &here, &there);
            here.child.wait().unwrap();
            let said = grows(&mut there, "net_replies", 50);
            // Only the datagrams in flight in the old QEMU's user network may be lost.
            assert!(said.get("net_lost") <= 2 * u64::from(number), "{said:?}");
            there.check_guest();
            here = there;
        }
    }
}

/// Pages that the guest returns are punched out of the file, and the log does not see it. They must
/// be zero at the destination: the guest's kernel relies on it when it allocates them.
#[test]
fn pages_the_guest_returned_are_zero_at_the_destination() {
    for version in versions() {
        let world = World::new();
        let machine = Machine::new(*version, "dirty=5 churn=64")
            .with(&["-device", "virtio-balloon-pci,free-page-reporting=on"]);
        let mut here = machine.start(&world, "qemu-0");
        assert!(QemuSource::attach(&here.qmp).unwrap().habits().gives_pages_back);
        grows(&mut here, "churn_rounds", 1);
        for number in 1..=2 {
            let mut there = machine.incoming(&world, &format!("qemu-{number}"));
            // Memory is returned during the migration.
            let stats = hop_with(&world, number, &here, &there, |config| {
                config.max_bandwidth = Some(BandwidthCap::new(20 << 20).unwrap());
                config.compression.way = CompressionWay::Off;
            });
            assert_eq!(stats.verify_match, Some(true));
            here.child.wait().unwrap();
            grows(&mut there, "churn_rounds", 1);
            there.check_guest();
            here = there;
        }
    }
}

/// The possible paths of the control group of a QEMU's vCPUs, in either version of control groups.
fn groups_of_its_vcpus(qemu: &Qemu) -> Vec<PathBuf> {
    let pid = qemu.child.id();
    let own = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let paths = own.lines().filter_map(|line| line.rsplit_once(":/")).map(|(_, path)| path);
    let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/cpu"].map(Path::new);
    paths
        .flat_map(|path| mounts.map(|mount| mount.join(path).join(format!("vmferry-{pid}"))))
        .collect()
}

/// A guest that writes faster than its link carries stays at the source without throttling, and
/// moves with it.
#[test]
fn throttle_moves_a_guest_that_outruns_its_link() {
    /// A busy machine can delay the guest so much that it converges without a throttle. Then
    /// another guest is moved.
    const MOST_ATTEMPTS: usize = 8;
    assert!((0..MOST_ATTEMPTS).any(|_| move_with_a_throttle()), "no guest outran the link");
}

/// Moves a guest, and returns whether only a throttle made it converge.
fn move_with_a_throttle() -> bool {
    let world = World::new();
    let machine = Machine::new(Version::V10_0, "dirty=24 rest=0");
    let mut here = machine.start_booted(&world, "here");
    let (before, after) = (here.check_guest(), here.check_guest());
    let since = |name| after.get(name) - before.get(name);
    let written_per_s = 4096 * since("checked") * 1_000_000 / since("uptime_us");
    let mut source = QemuSource::attach(&here.qmp).unwrap();
    if let Err(error) = source.allow_throttling() {
        panic!("this test needs what is missing: {}", vmferry::chain(&error));
    }
    let groups = groups_of_its_vcpus(&here);
    let is_there = || groups.iter().any(|group| group.exists());
    assert!(is_there(), "none of {groups:?}");
    drop(source);
    assert!(!is_there(), "a control group is left");
    let slow = |config: &mut SourceConfig| {
        // Even if other work slows the guest down to a third of its speed, it outruns the link.
        let cap = (written_per_s / 3).min(80 << 20);
        config.max_bandwidth = Some(BandwidthCap::new(cap).unwrap());
        config.compression.way = CompressionWay::Off;
        config.downtime_limit = Duration::from_millis(100);
        config.max_rounds = RoundLimit::new(12).unwrap();
        config.when_stuck = WhenStuck::Refuse;
    };
    let mut there = machine.incoming(&world, "kept");
    let Err(error) = migrate_with(&world, 1, &here, &there, slow) else {
        there.check_guest();
        return false;
    };
    assert_eq!(error.class(), ErrorClass::NotConverging, "{error}");
    here.check_guest();

    let mut there = machine.incoming(&world, "there");
    let stats = hop_with(&world, 2, &here, &there, |config| {
        slow(config);
        config.throttle = ThrottleLimit::new(99).unwrap();
    });
    assert!(!is_there(), "a control group is left");
    there.check_guest();
    stats.rounds.iter().any(|round| round.throttle_percent > 0)
}

#[test]
fn sandboxed_qemu_can_be_attached() {
    let world = World::new();
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    let machine = Machine::new(Version::V10_0, "dirty=5").with(&["-sandbox", sandbox]);
    let mut here = machine.start(&world, "here");
    here.check_guest();
    let mut there = machine.incoming(&world, "there");
    migrate_between(&world, 1, &here, &there).unwrap();
    there.check_guest();
}
