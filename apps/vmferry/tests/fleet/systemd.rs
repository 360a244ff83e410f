//! Hosts of a fleet as packages install them: each with a real systemd, which runs the daemon by
//! its unit with all its restrictions.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use vmferry_etcd_lab::EtcdCluster;
use vmferry_kit::Systemd;
use vmferry_qemu_lab::{Machine, Version, World as Lab};

use crate::members::{is_only_on, shows};
use crate::place::{host_table_at, init};
use crate::receivers::Arrived;
use crate::support::{Host, Running, World, text};

/// Bounds the waits: reaching it is a failure.
const PATIENCE: Duration = Duration::from_secs(120);

/// Two hosts, and a QEMU guest on the first one.
struct Place {
    a: Systemd,
    b: Systemd,
    world: World,
    lab: Lab,
    operator: Host,
    table: PathBuf,
    _etcd: EtcdCluster,
}

/// An address of this machine for the daemon of a host: the unit allows one port.
fn own_address() -> String {
    static NUMBER: AtomicU8 = AtomicU8::new(128);
    let [_, _, middle, low] = std::process::id().to_be_bytes();
    format!("127.{}.{middle}.{low}:7002", NUMBER.fetch_add(1, Ordering::Relaxed))
}

fn dist(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/systemd").join(path)
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// The /etc of a host, as an administrator has set it up by docs/fleet.md, except for the lines
/// that moves need.
fn set_up(world: &World, etcd: &EtcdCluster, name: &str, address: &str, more: &str) -> PathBuf {
    let etc = world.path(&format!("etc-{name}"));
    let ours = etc.join("vmferry");
    copy(&world.certificate_of(name, "ca", &format!("tls-{name}")), &ours.join("tls"));
    copy(&etcd.client("host"), &ours.join("etcd"));
    let client = etcd.client("host");
    let fleet = host_table_at(etcd, "/vmferry", name, address, more);
    let fleet = fleet.replace(text(&client), "/etc/vmferry/etcd");
    let config = format!(
        "listen = {address:?}\ntls = \"/etc/vmferry/tls\"\ndirectory = \"/run/vmferry-peers\"\n\
         qemu_user = \"root\"\n{fleet}"
    );
    std::fs::write(ours.join("daemon.toml"), config).unwrap();
    let units = etc.join("systemd/system");
    std::fs::create_dir_all(&units).unwrap();
    let unit = std::fs::read_to_string(dist("vmferry-daemon.service")).unwrap();
    let unit = unit.replace("/usr/local/bin/vmferry", env!("CARGO_BIN_EXE_vmferry"));
    std::fs::write(units.join("vmferry-daemon.service"), unit).unwrap();
    // QEMU's console is a file there.
    let lines = format!("StandardOutput=append:{}\nReadWritePaths=/tmp", log(world, name));
    add(&etc, "lab.conf", &lines);
    etc
}

fn log(world: &World, name: &str) -> String {
    text(&world.path(&format!("daemon-{name}.log"))).to_owned()
}

/// Adds lines to the daemon's unit.
fn add(etc: &Path, name: &str, lines: &str) {
    std::fs::write(drop_ins(etc).join(name), format!("[Service]\n{lines}\n")).unwrap();
}

fn drop_ins(etc: &Path) -> PathBuf {
    let directory = etc.join("systemd/system/vmferry-daemon.service.d");
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

/// A unit that runs QEMU with the guest.
fn guest_unit(machine: &Machine, lab: &Lab) -> String {
    let libraries = machine.libraries().unwrap();
    let words = machine.command_line(lab, "here");
    let words: Vec<_> = words.iter().map(|word| format!("\"{}\"", word.display())).collect();
    format!(
        "[Service]\nRuntimeDirectory=qemu\nEnvironment=LD_LIBRARY_PATH={}\n\
         ExecStart={} -qmp unix:/run/qemu/tested.qmp,server=on,wait=off\n",
        libraries.display(),
        words.join(" ")
    )
}

/// A template with a QEMU like the guest's.
fn template(machine: &Machine, lab: &Lab) -> String {
    let libraries = machine.libraries().unwrap();
    let words = machine.command_line(lab, "there");
    let words: Vec<_> = words.iter().map(|word| format!("\"{}\"", word.display())).collect();
    format!(
        "[[receive]]\nname = \"default\"\nexec = '''env LD_LIBRARY_PATH={}\n {}'''\n",
        libraries.display(),
        words.join("\n ")
    )
}

impl Place {
    fn new() -> Self {
        let (world, lab, etcd) = (World::new(), Lab::new(), EtcdCluster::start(1));
        let machine = Machine::on_kvm(Version::V10_0, "freed=40 hot=8,rate=40000");
        let table = init(&world, &etcd, "/vmferry");
        let (to_a, to_b) = (own_address(), own_address());
        let of_a = set_up(&world, &etcd, "a", &to_a, "qemu = [\"/run/qemu\"]\n");
        std::fs::write(of_a.join("systemd/system/guest.service"), guest_unit(&machine, &lab))
            .unwrap();
        let of_b = set_up(&world, &etcd, "b", &to_b, &template(&machine, &lab));
        let (a, b) = (Systemd::boot(&of_a), Systemd::boot(&of_b));
        a.systemctl_ok(&["start", "guest"]);
        for host in [&a, &b] {
            host.systemctl_ok(&["start", "vmferry-daemon"]);
        }
        let operator = world.host("operator");
        shows(&operator, &table, "status", |shown| shown["hosts_present"] == 2);
        let place = Self { a, b, world, lab, operator, table, _etcd: etcd };
        place.is_shown_on("a");
        place
    }

    /// Waits until the guest is shown on this host only, and runs: agents look once a second.
    fn is_shown_on(&self, host: &str) -> Value {
        shows(&self.operator, &self.table, "guests", |shown| is_only_on(shown, host, "running"))
    }

    /// Adds what the documentation says that moves need.
    fn allow_moves(&self, name: &str) {
        let lines = std::fs::read_to_string(dist("vmferry-daemon.service.d/fleet.conf")).unwrap();
        let etc = self.world.path(&format!("etc-{name}"));
        std::fs::write(drop_ins(&etc).join("fleet.conf"), lines).unwrap();
        let host = if name == "a" { &self.a } else { &self.b };
        host.systemctl_ok(&["daemon-reload"]);
        self.restart(name);
    }

    /// Restarts the daemon, and waits until its next agent has joined.
    fn restart(&self, name: &str) {
        let joined = || {
            let said = std::fs::read_to_string(log(&self.world, name)).unwrap();
            said.matches("\"fleet-joined\"").count()
        };
        let before = joined();
        let host = if name == "a" { &self.a } else { &self.b };
        host.systemctl_ok(&["restart", "vmferry-daemon"]);
        let deadline = Instant::now() + PATIENCE;
        while joined() == before {
            assert!(Instant::now() < deadline, "no agent has joined");
            // A file causes no wake-up.
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the guest is on `b` only, and checks it there.
    fn has_arrived(&self) {
        let shown = self.is_shown_on("b");
        let qmp = self.b.path(shown["guests"][0]["socket"].as_str().unwrap());
        let arrived = Arrived::with_console(qmp, |_| self.lab.path("there.out"));
        arrived.check();
        let ended = self.a.systemctl_ok(&["show", "--property=SubState,Result", "guest"]);
        assert_eq!(ended, "Result=success\nSubState=dead\n");
        arrived.quit();
    }

    fn order(&self, arguments: &[&str]) -> Running {
        let config = ["--config", text(&self.table)];
        self.operator.start(&[&["fleet", "move", "tested"], arguments, &config].concat())
    }
}

#[test]
fn daemons_unit_alone_runs_no_qemu_and_traces_none() {
    let place = Place::new();
    let refused = "Could not access KVM kernel module: Operation not permitted";
    place.order(&[]).finish().failed(1, refused);
    place.allow_moves("b");
    place.is_shown_on("a");
    // The source's agent sends it as it can.
    let moved = place.order(&[]).finish().exited(0);
    let why = moved.last()["carried"].as_str().expect("it was carried");
    assert!(why.contains("can't be found from here"), "{why}");
    place.has_arrived();
}

#[test]
fn guest_moves_between_hosts_while_their_daemons_are_restarted() {
    let place = Place::new();
    place.allow_moves("a");
    place.allow_moves("b");
    let mut order = place.order(&["--max-bandwidth", "30M"]);
    order.event_where(|event| event["event"] == "move" && event["phase"] == "sending");
    place.restart("a");
    place.restart("b");
    let moved = order.finish().exited(0);
    assert_eq!(moved.last()["carried"], Value::Null, "{moved:?}");
    place.has_arrived();
}
