//! Guests that are paused by something other than vmferry, or that power off, before a migration
//! and during one.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Backend, Machine, Qemu, Version, World as Lab};

use crate::support::proxy::{Message, Proxy};
use crate::support::scene::{Scene, Way};
use crate::support::{BEFORE_COMMIT, Running, all, in_parallel, run_ok, text};

fn ways() -> Vec<Way> {
    if all() { vec![Way::Attached, Way::Carried] } else { vec![Way::Attached] }
}

/// Writes 48 MiB and then rewrites 8 MiB of them. At 1 MB/s none of the guest's migrations ends
/// before it is paused.
const WORKLOAD: &str = "freed=40 hot=8,rate=40000";

const HELD: fn(&Value) -> bool = |event| event["event"] == "held";

/// Bounds how long a guest runs on until it is paused: reaching it is a failure.
const PATIENCE: Duration = Duration::from_secs(30);

/// A guest whose QEMU has a second monitor for an operator, and checks of its status.
struct Operated {
    scene: Scene,
    operator: Qmp,
    _directory: tempfile::TempDir,
}

impl Operated {
    /// A guest on KVM that has written 48 MiB.
    fn new(way: Way) -> Self {
        Self::of(Machine::on_kvm(Version::V10_0, WORKLOAD), way)
    }

    /// The same with a disk that reads and writes memory past every page table, so every harvest
    /// waits for QEMU's disks.
    fn with_direct_disk() -> (Self, Lab) {
        let lab = Lab::new();
        let disk = format!("file={},format=raw,if=virtio,cache=none", lab.disk(8).display());
        let machine = Machine::on_kvm(Version::V10_0, WORKLOAD);
        (Self::of(machine.with(&["-drive", &disk]), Way::Attached), lab)
    }

    /// An emulated guest whose kernel panics on command and ends with that: its QEMU sees a
    /// shutdown.
    fn mortal(way: Way, more: &[&str]) -> Self {
        let machine = Machine::new(Version::V10_0, "dirty=8 unknown_nmi_panic=1");
        Self::of(Machine { mib: 128, ..machine }.with(more), way)
    }

    fn of(machine: Machine, way: Way) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path: PathBuf = directory.path().join("operator.qmp");
        let backend = match way {
            Way::Attached => Backend::File,
            Way::Carried => Backend::Private,
        };
        let monitor = format!("unix:{},server=on,wait=off", path.display());
        let machine = Machine { backend, ..machine }.with(&["-qmp", &monitor]);
        let scene = Scene::of(machine, way);
        // The next QEMU takes over the socket's path; this connection stays open.
        let operator = Qmp::connect(&path).unwrap();
        Self { scene, operator, _directory: directory }
    }

    /// A migration whose first round lasts a minute, until it is [hurried](Self::hurry).
    fn send_slowly(&self, address: &str) -> Running {
        let tls = self.scene.world.tls();
        let link = ["--tls", &tls, "--reconnect-timeout", "2s"];
        self.scene.send_capped(address, &link, "1M")
    }

    /// A migration that is held before its switchover and harvests once a second.
    fn send_held(&self, address: &str) -> Running {
        let tls = self.scene.world.tls();
        let link = ["--tls", &tls, "--pause-before-switchover"];
        self.scene.send_capped(address, &link, "1G")
    }

    fn hurry(&self) {
        run_ok(&self.scene.a, &["set", "tested", "--max-bandwidth", "none"]);
    }

    fn stop(&mut self) {
        self.operator.execute("stop", json!({})).unwrap();
    }

    fn status(&mut self) -> Value {
        self.operator.execute("query-status", json!({})).unwrap()["status"].take()
    }
}

fn status(qemu: &Qemu) -> Value {
    let mut qmp = Qmp::connect(&qemu.qmp).unwrap();
    qmp.execute("query-status", json!({})).unwrap()["status"].take()
}

fn cont(qemu: &Qemu) {
    Qmp::connect(&qemu.qmp).unwrap().execute("cont", json!({})).unwrap();
}

#[test]
fn paused_guest_arrives_and_stays_paused() {
    let versions = if all() { &Version::ALL[..] } else { &Version::ALL[1..] };
    for version in versions {
        // vmferry itself pauses a guest of QEMU 7.2 without KVM that is carried; another test
        // covers that.
        let ways = if *version == Version::V10_0 { ways() } else { vec![Way::Attached] };
        in_parallel(ways, |way| {
            let mut scene = Scene::new(*version, way);
            Qmp::connect(&scene.here.qmp).unwrap().execute("stop", json!({})).unwrap();
            let (mut there, mut receiving, address) = scene.receive_tls();
            scene.send_tls(&address).finish().exited(0);
            receiving.event_where(|event| event["event"] == "paused");
            assert_eq!(receiving.event("received")["paused"], true);
            assert_eq!(status(&there), "paused");
            assert!(scene.here.child.wait().unwrap().success());
            // The next receiver does not continue it either.
            receiving.kill();
            let tls = scene.world.tls();
            let arguments = ["--qemu", text(&there.qmp), "--listen", "127.0.0.1:0", "--tls", &tls];
            let (mut next, _) = scene.b.receive(&arguments);
            assert_eq!(next.event("found")["running"], false);
            assert_eq!(status(&there), "paused");
            cont(&there);
            there.check_guest();
        });
    }
}

#[test]
fn guest_paused_during_the_migration_arrives_paused() {
    let cases = [Some(Way::Attached), Some(Way::Carried), None];
    in_parallel(cases.to_vec(), |way| {
        let (mut operated, _lab) = match way {
            Some(way) => (Operated::new(way), None),
            None => {
                let (operated, lab) = Operated::with_direct_disk();
                (operated, Some(lab))
            }
        };
        let (mut there, mut receiving, address) = operated.scene.receive_tls();
        let mut send = operated.send_slowly(&address);
        send.event_where(BEFORE_COMMIT[1].1);
        operated.stop();
        assert_eq!(operated.status(), "paused", "before the switchover");
        operated.hurry();
        let sent = send.finish();
        assert_eq!(sent.code, Some(0), "{way:?}: {sent:?}");
        assert_eq!(receiving.event("received")["paused"], true, "{way:?}");
        assert_eq!(status(&there), "paused", "{way:?}");
        cont(&there);
        there.check_guest();
    });
}

/// Why QEMU pauses a guest by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// A write to a disk has failed (`werror=stop`).
    Disk,
    /// The guest's kernel has panicked (`-action panic=pause`).
    Panic,
    /// The guest's watchdog has expired (`-action watchdog=pause`).
    Watchdog,
}

impl Cause {
    fn operated(self, way: Way, lab: &Lab) -> Operated {
        let on_kvm = Machine::on_kvm(Version::V10_0, WORKLOAD);
        match self {
            Self::Disk => {
                // The first write after a write of zeros fails; the operator causes that write.
                let rules = "file.set-state.0.event=pwritev_zero,file.set-state.0.new_state=2,\
                             file.inject-error.0.event=pwritev,file.inject-error.0.iotype=write,\
                             file.inject-error.0.state=2,file.inject-error.0.once=on";
                let disk = format!(
                    "if=none,id=disk,driver=raw,werror=stop,file.driver=blkdebug,\
                     file.image.driver=file,file.image.filename={},{rules}",
                    lab.disk(DISK_MIB).display()
                );
                let devices = ["-drive", &disk, "-device", "virtio-blk-pci,drive=disk"];
                let machine = Machine::new(Version::V10_0, "dirty=8 disk=4").with(&devices);
                Operated::of(Machine { mib: 128, ..machine }, way)
            }
            Self::Panic => {
                let devices = ["-device", "pvpanic", "-action", "panic=pause"];
                Operated::of(on_kvm.with(&devices), way)
            }
            Self::Watchdog => {
                let devices = ["-device", "ib700", "-action", "watchdog=pause"];
                Operated::of(on_kvm.with(&devices), way)
            }
        }
    }

    /// The human monitor command that causes it.
    fn order(self) -> String {
        match self {
            // The guest does not use the end of its disk.
            Self::Disk => format!("qemu-io disk \"write -z {} 4k\"", (DISK_MIB << 20) - 4096),
            // The same as a write of the guest to the device's port.
            Self::Panic => "o /b 0x505 1".to_owned(),
            Self::Watchdog => "o /b 0x443 0xf".to_owned(),
        }
    }

    fn status(self) -> &'static str {
        match self {
            Self::Disk => "io-error",
            Self::Panic => "guest-panicked",
            Self::Watchdog => "watchdog",
        }
    }
}

/// Six times the memory that the guest uses.
const DISK_MIB: u64 = 24;

#[test]
fn guest_paused_by_qemu_during_the_migration_arrives_paused() {
    let causes = [Cause::Disk, Cause::Panic, Cause::Watchdog];
    let cases = causes.iter().flat_map(|&cause| ways().into_iter().map(move |way| (cause, way)));
    in_parallel(cases.collect(), |(cause, way): (Cause, Way)| {
        let lab = Lab::new();
        let mut operated = cause.operated(way, &lab);
        let (mut there, mut receiving, address) = operated.scene.receive_tls();
        let mut send = operated.send_slowly(&address);
        send.event_where(BEFORE_COMMIT[1].1);
        operated.operator.human(&cause.order()).unwrap();
        let deadline = Instant::now() + PATIENCE;
        while operated.status() != cause.status() {
            assert!(Instant::now() < deadline, "{cause:?}: {}", operated.status());
            // A harvest may have paused it, too.
            std::thread::sleep(Duration::from_millis(5));
        }
        operated.hurry();
        let sent = send.finish();
        assert_eq!(sent.code, Some(0), "{cause:?} {way:?}: {sent:?}");
        assert_eq!(receiving.event("received")["paused"], true, "{cause:?} {way:?}");
        let arrived = status(&there);
        assert!(arrived != "running", "{cause:?} {way:?}");
        println!("{cause:?} {way:?}: {arrived}");
        cont(&there);
        let said = there.check_guest();
        if cause == Cause::Disk {
            // The failed request is done here.
            let said = there
                .wait_for("uses its disk", |now| now.get("disk_rounds") > said.get("disk_rounds"));
            assert_eq!((said.get("disk_errors"), said.get("corruptions")), (0, 0), "{said:?}");
        }
    });
}

#[test]
fn operators_pause_outlives_a_canceled_migration() {
    in_parallel(vec![Some(Way::Carried), None], |way| {
        let (mut operated, _lab) = match way {
            Some(way) => (Operated::new(way), None),
            None => {
                let (operated, lab) = Operated::with_direct_disk();
                (operated, Some(lab))
            }
        };
        let (_there, receiving, address) = operated.scene.receive_tls();
        let mut send = match way {
            Some(_) => operated.send_slowly(&address),
            None => operated.send_held(&address),
        };
        send.event_where(if way.is_some() { BEFORE_COMMIT[1].1 } else { HELD });
        operated.stop();
        if way.is_none() {
            // Harvests after the operator's pause, each of which waits for the disk. The first of
            // these rounds may have begun before it.
            (0..3).for_each(|_| drop(send.event("round-started")));
        }
        assert_eq!(operated.status(), "paused", "before the switchover");
        run_ok(&operated.scene.a, &["cancel", "tested"]);
        let sent = send.finish();
        assert_eq!(sent.code, Some(11), "{way:?}: {sent:?}");
        receiving.finish().exited(11);
        assert_eq!(operated.status(), "paused", "{way:?}");
        cont(&operated.scene.here);
        operated.scene.here.check_guest();
    });
}

#[test]
fn guest_shutdown_ends_the_migration_and_is_named_on_both_sides() {
    in_parallel(ways(), |way| {
        let mut operated = Operated::mortal(way, &["-no-reboot"]);
        let (_there, receiving, send) = operated.scene.migrate_until(BEFORE_COMMIT[1].1);
        operated.operator.execute("inject-nmi", json!({})).unwrap();
        send.finish().failed(9, "the guest has powered off");
        receiving.finish().failed(9, "the guest has powered off");
        operated.scene.here.child.wait().unwrap();
    });
}

#[test]
fn shut_down_guest_is_left_as_it_is() {
    let mut operated = Operated::mortal(Way::Attached, &["-no-reboot", "-no-shutdown"]);
    let (_there, receiving, send) = operated.scene.migrate_until(BEFORE_COMMIT[1].1);
    operated.operator.execute("inject-nmi", json!({})).unwrap();
    send.finish().failed(9, "the guest has powered off");
    receiving.finish().failed(9, "the guest has powered off");
    assert_eq!(operated.status(), "shutdown");
    // It is not sent afterward either.
    let tls = operated.scene.world.tls();
    let qmp = text(&operated.scene.here.qmp).to_owned();
    let send = ["send", "--qemu", &qmp, "--to", "127.0.0.1:1", "--tls", &tls];
    operated.scene.a.run(&send).failed(9, "the guest has powered off");
    assert_eq!(operated.status(), "shutdown");
}

/// By then QEMU has migrated the guest, and it has not run since.
#[test]
fn paused_guest_is_sent_again_after_a_late_failure_once_it_ran() {
    in_parallel(Version::ALL.to_vec(), |version| {
        let mut scene = Scene::new(version, Way::Attached);
        let mut operator = Qmp::connect(&scene.here.qmp).unwrap();
        operator.execute("stop", json!({})).unwrap();
        drop(operator);
        let (_there, _receiving, address) = scene.receive_plain();
        let proxy = Proxy::holding(&address, "127.0.0.1", Some(Message::Ready));
        let link = ["--plain", "--reconnect-timeout", "2s"];
        let send = scene.send(&proxy.address, &link);
        proxy.await_held();
        proxy.cut();
        let sent = send.finish();
        assert_ne!(sent.code, Some(0), "{version:?}: {sent:?}");
        assert_eq!(status(&scene.here), "postmigrate", "{version:?}");
        let (mut there, mut receiving, address) = scene.receive_plain();
        scene.send(&address, &link).finish().failed(9, "`stop` right after that pauses it again");
        let mut operator = Qmp::connect(&scene.here.qmp).unwrap();
        for order in ["cont", "stop"] {
            operator.execute(order, json!({})).unwrap();
        }
        drop(operator);
        let sent = scene.send(&address, &link).finish();
        assert_eq!(sent.code, Some(0), "{version:?}: {sent:?}");
        assert_eq!(receiving.event("received")["paused"], true, "{version:?}");
        cont(&there);
        there.check_guest();
    });
}
