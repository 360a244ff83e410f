//! A guest that another program moves over two `[[forward]]` rules, as Proxmox VE moves guests
//! over `ssh -L`: its memory and its own disk each go through a Unix socket. vmferry does not know
//! the guest.

use std::path::Path;

use serde_json::json;
use vmferry_kit::Cable;
use vmferry_qemu_lab::{Machine, Monitor, Qemu, Version, World as Lab};

use crate::place::{HOST, start};
use crate::support::{Host, Running, World};

/// Both of QEMU's sockets, at one host.
struct Sockets {
    memory: std::path::PathBuf,
    disk: std::path::PathBuf,
}

impl Sockets {
    fn of(world: &World, host: &str) -> Self {
        let path = |file: &str| world.path(&format!("{host}-{file}"));
        Self { memory: path("101.migrate"), disk: path("101_nbd.migrate") }
    }
}

/// The daemon of host `name` with two rules, which have these lines.
fn daemon(world: &World, name: &str, more: &str, memory: &str, disk: &str, to: &Cable) -> Running {
    let host: Host = world.host(name);
    let config = world.path(&format!("{name}.toml"));
    let written = format!(
        "listen = \"127.0.0.1:0\"\ntls = {:?}\ndirectory = {:?}\nqemu_user = \"root\"\n{more}\n\
         [[forward]]\nname = \"101\"\n{memory}\n[[forward]]\nname = \"101-nbd\"\n{disk}\n",
        world.tls(),
        world.path(&format!("{name}-peers")),
    );
    std::fs::write(&config, written).unwrap();
    start(&host, &config, to)
}

/// A guest with a disk that only this host has.
fn machine(lab: &Lab, disk: &str) -> Machine {
    let disk = lab.path(disk);
    std::fs::File::create(&disk).unwrap().set_len(48 << 20).unwrap();
    let drive = format!("if=none,id=drive-virtio0,format=raw,file={}", disk.display());
    let machine = Machine { mib: 128, ..Machine::new(Version::V10_0, "dirty=8 disk=16") };
    machine.with(&["-drive", &drive, "-device", "virtio-blk-pci,drive=drive-virtio0"])
}

/// Waits until the guest has checked its memory and its disk once more.
fn check(qemu: &mut Qemu) {
    let before = qemu.check_guest().get("disk_rounds");
    let said = qemu.wait_for("uses its disk", |said| said.get("disk_rounds") > before + 1);
    assert_eq!((said.get("disk_errors"), said.get("corruptions")), (0, 0), "{said:?}");
}

/// Makes the destination's QEMU wait for the disk and for the memory.
fn prepare(there: &mut Monitor, sockets: &Sockets) {
    let address = json!({ "type": "unix", "data": { "path": sockets.disk } });
    there.execute("nbd-server-start", json!({ "addr": address }));
    there.execute("nbd-server-add", json!({ "device": "drive-virtio0", "writable": true }));
    there.execute("migrate-incoming", json!({ "uri": unix(&sockets.memory) }));
}

fn unix(socket: &Path) -> String {
    format!("unix:{}", socket.display())
}

/// Copies the disk, and from then on every write to it.
fn mirror(here: &mut Monitor, sockets: &Sockets) {
    let target = format!("nbd:{}:exportname=drive-virtio0", unix(&sockets.disk));
    let mirror = json!({
        "device": "drive-virtio0", "target": target, "sync": "full", "mode": "existing",
        "format": "raw",
    });
    here.execute("drive-mirror", mirror);
    here.wait_for("query-block-jobs", |jobs| jobs[0]["ready"] == true);
}

/// Moves memory and devices, and breaks all links meanwhile. The mirror of the disk ends when
/// nothing is written any more.
fn migrate(here: &mut Monitor, sockets: &Sockets, cable: &Cable) {
    here.execute("migrate-set-parameters", json!({ "max-bandwidth": 32 << 20 }));
    let hold = json!([{ "capability": "pause-before-switchover", "state": true }]);
    here.execute("migrate-set-capabilities", json!({ "capabilities": hold }));
    here.execute("migrate", json!({ "uri": unix(&sockets.memory) }));
    here.wait_for("query-migrate", |said| said["ram"]["transferred"].as_u64() > Some(4 << 20));
    cable.break_links();
    here.execute("migrate-set-parameters", json!({ "max-bandwidth": 4_u64 << 30 }));
    here.wait_for("query-migrate", |said| said["status"] == "pre-switchover");
    here.execute("block-job-cancel", json!({ "device": "drive-virtio0" }));
    here.wait_for("query-block-jobs", |jobs| jobs.as_array().unwrap().is_empty());
    here.execute("migrate-continue", json!({ "state": "pre-switchover" }));
    here.wait_for("query-migrate", |said| said["status"] == "completed");
}

/// Waits until a daemon has reported a break of a stream's link.
fn link_was_broken(daemon: &mut Running, target: &str) {
    daemon.event_where(|event| {
        event["event"] == "link-broken" && event["stream"]["target"] == target
    });
}

#[test]
fn guest_moves_with_its_disk_over_rules_while_links_break() {
    let (world, lab, cable) = (World::new(), Lab::new(), Cable::new());
    let (near, far) = (Sockets::of(&world, "a"), Sockets::of(&world, "b"));
    let connect = |path: &Path| format!("connect = {path:?}\nfrom = [{HOST:?}]");
    let listen = |path: &Path| format!("listen = {path:?}\npeer = \"b\"");
    let peer = format!("[[peer]]\nname = \"b\"\naddress = \"{}\"\nid = {HOST:?}", cable.address);
    let allow = format!("[[allow]]\nsource = {HOST:?}\nguests = [\"tested\"]\n");
    std::fs::write(world.path("policy.toml"), allow).unwrap();
    let policy = format!("policy = {:?}", world.path("policy.toml"));
    let _b = daemon(&world, "b", &policy, &connect(&far.memory), &connect(&far.disk), &cable);
    let mut a =
        daemon(&world, "a", &peer, &listen(&near.memory), &listen(&near.disk), &Cable::new());

    let mut here = machine(&lab, "here.raw").start(&lab, "here");
    check(&mut here);
    // The program that moves the guest also continues it.
    let mut there = machine(&lab, "there.raw").with(&["-S"]).incoming(&lab, "there");
    let (mut of_here, mut of_there) = (Monitor::connect(&here.qmp), Monitor::connect(&there.qmp));
    prepare(&mut of_there, &far);
    // The disk compresses well.
    cable.break_after(16 << 10);
    mirror(&mut of_here, &near);
    link_was_broken(&mut a, "forward 101-nbd");
    migrate(&mut of_here, &near, &cable);
    link_was_broken(&mut a, "forward 101");

    of_there.wait_for("query-migrate", |said| said["status"] == "completed");
    of_there.execute("nbd-server-stop", json!({}));
    of_there.execute("cont", json!({}));
    check(&mut there);
    here.quit(of_here);
}
