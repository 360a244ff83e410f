//! Both machines are compared before anything is sent: each row of the table in docs/qemu.md.

use std::fs::File;
use std::path::Path;

use serde_json::{Value, json};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Backend, Machine, Version, qcow2_image};

use crate::support::scene::{Scene, Way};
use crate::support::{in_parallel, text};

/// The arguments of a source with everything that is compared. `IMAGES` is a directory.
const DEVICES: [&str; 14] = [
    "-smp",
    "2,maxcpus=4,sockets=2,cores=2",
    "-device",
    "VGA,vgamem_mb=16",
    "-device",
    "qemu-xhci",
    "-device",
    "usb-tablet",
    "-drive",
    "file=IMAGES/disk,format=raw,if=none,id=d",
    "-device",
    "virtio-blk-pci,drive=d,id=disk",
    "-drive",
    "file=IMAGES/cd,format=raw,media=cdrom,if=none,id=optical",
];

/// What the destination has instead, and the refusal.
const REFUSED: [(&str, &str, &str); 9] = [
    ("maxcpus=4,sockets=2", "maxcpus=2,sockets=1", "maxcpus=4 and the destination maxcpus=2"),
    ("sockets=2,cores=2", "sockets=1,cores=4", "has cores=2 and the destination cores=4"),
    ("vgamem_mb=16", "vgamem_mb=32", "32 MiB"),
    ("usb-tablet", "usb-mouse", "device `usb-mouse`: the source has 0 and the destination 1"),
    ("=optical", "=other", "lacks the source's disk device `optical`"),
    ("IMAGES/disk,", "IMAGES/disk,readonly=on,", "is writable at the source and read-only"),
    ("file=IMAGES/disk,", "file=IMAGES/copy,", "which is another one"),
    (
        "file=IMAGES/disk,format=raw",
        "file=IMAGES/formatted,format=qcow2",
        "as `raw` and the destination as `qcow2`",
    ),
    ("file=IMAGES/cd,format=raw,", "", "the drive `optical` is empty at the destination"),
];

fn machine(version: Version, way: Way, images: &Path, (from, to): (&str, &str)) -> Machine {
    let mut devices: Vec<&str> = DEVICES.into();
    devices.extend(["-device", "ide-cd,drive=optical,id=optical"]);
    let changed = devices.iter().any(|device| device.contains(from));
    assert!(changed, "no argument has `{from}`");
    let devices =
        devices.iter().map(|device| device.replace(from, to).replace("IMAGES", text(images)));
    let backend = if way == Way::Attached { Backend::File } else { Backend::Private };
    let machine = Machine::on_kvm(version, "hot=2,rate=1000");
    Machine { devices: devices.collect(), backend, ..machine }
}

/// A guest with disks, and the directory of its images.
fn scene(version: Version, way: Way) -> (Scene, tempfile::TempDir) {
    let images = tempfile::tempdir().unwrap();
    for (name, mib) in [("disk", 8), ("copy", 8), ("small", 4), ("cd", 4)] {
        File::create(images.path().join(name)).unwrap().set_len(mib << 20).unwrap();
    }
    std::fs::write(images.path().join("formatted"), qcow2_image(8)).unwrap();
    let scene = Scene::of(machine(version, way, images.path(), ("", "")), way);
    (scene, images)
}

fn each(test: impl Fn(Version, Way) + Sync) {
    let versions = [Version::V7_2, Version::V10_0];
    let all = versions.into_iter().flat_map(|it| [(it, Way::Attached), (it, Way::Carried)]);
    in_parallel(all.collect(), |(version, way)| test(version, way));
}

fn disks(qmp: &Path) -> Value {
    Qmp::connect(qmp).unwrap().execute("query-block", json!({})).unwrap()
}

/// The drive of a device in `query-block`.
fn drive<'a>(disks: &'a Value, device: &str) -> &'a Value {
    let found = disks.as_array().unwrap().iter();
    let mut found = found.filter(|disk| disk["qdev"].as_str().unwrap_or_default().contains(device));
    found.next().unwrap()
}

#[test]
fn machines_that_differ_in_one_row_are_refused_before_anything_is_sent() {
    each(|version, way| {
        let (mut scene, images) = scene(version, way);
        for (from, to, says) in REFUSED {
            scene.machine = machine(version, way, images.path(), (from, to));
            let (there, _receiving, address) = scene.receive_tls();
            scene.send_at_once(&address, &[]).failed(6, says);
            there.kill();
            scene.runs_on_here();
        }
        // The same sizes and formats are still asked for.
        let small = ("file=IMAGES/disk,", "file=IMAGES/small,");
        scene.machine = machine(version, way, images.path(), small);
        let (there, _receiving, address) = scene.receive_tls();
        let says = "8388608 bytes at the source and 4194304 at the destination";
        scene.send_at_once(&address, &["--disks-differ"]).failed(6, says);
        there.kill();
        scene.runs_on_here();
        // The control: a copy, with the permission for it.
        let copy = ("file=IMAGES/disk,", "file=IMAGES/copy,");
        scene.machine = machine(version, way, images.path(), copy);
        let (there, mut receiving, address) = scene.receive_tls();
        scene.send_at_once(&address, &["--disks-differ"]).exited(0);
        receiving.event("received");
        scene.moved_to(there);
    });
}

#[test]
fn what_was_set_while_the_guest_ran_is_so_at_the_destination_too() {
    each(|version, way| {
        let (mut scene, images) = scene(version, way);
        let (there, mut receiving, address) = scene.receive_tls();
        let mut qmp = Qmp::connect(&scene.here.qmp).unwrap();
        qmp.execute("eject", json!({ "id": "optical", "force": true })).unwrap();
        let limits = json!({
            "id": "/machine/peripheral/disk/virtio-backend", "bps": 1 << 20, "bps_max": 2 << 20,
            "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0,
        });
        qmp.execute("block_set_io_throttle", limits).unwrap();
        let node = drive(&qmp.execute("query-block", json!({})).unwrap(), "disk").clone();
        let bitmap = json!({ "node": node["inserted"]["node-name"], "name": "backup" });
        qmp.execute("block-dirty-bitmap-add", bitmap).unwrap();
        let resize = json!({ "device": "d", "size": 16 << 20 });
        qmp.execute("block_resize", resize).unwrap();
        drop(qmp);
        let sent = scene.send_at_once(&address, &[]).exited(0);
        assert_eq!(sent.last()["qemu"]["ending_bitmaps"], json!(["backup of disk"]), "{sent:?}");
        receiving.event("received");
        let disks = disks(&there.qmp);
        assert!(drive(&disks, "optical")["inserted"].is_null(), "it was ejected: {disks}");
        let disk = &drive(&disks, "disk")["inserted"];
        assert_eq!((&disk["bps"], &disk["bps_max"]), (&json!(1 << 20), &json!(2 << 20)), "{disk}");
        assert_eq!(disk["image"]["virtual-size"], 16 << 20, "{disk}");
        scene.moved_to(there);
        drop(images);
    });
}

/// What a driver in the guest reads from its device.
const REGISTERS: [(&str, u64); 2] = [
    // The link is up, bit 0: `status` of struct virtio_net_config.
    ("virtio-net", 6),
    // How many pages of 4 KiB it shall give back: `num_pages` of struct virtio_balloon_config.
    ("virtio-balloon", 0),
];

/// A field of the configuration of a legacy virtio device, by its I/O ports: virtio 1.2, 4.1.4.10.
fn register(qmp: &mut Qmp, (kind, offset): (&str, u64)) -> u64 {
    /// Where the device's own configuration begins without MSI-X.
    const CONFIGURATION: u64 = 20;
    /// The ports by which the PCI configuration space is accessed, and ports that nothing uses.
    const ADDRESS: u64 = 0xcf8;
    const DATA: u64 = 0xcfc;
    const FREE: u64 = 0xc000;
    let pci = qmp.execute("query-pci", json!({})).unwrap();
    let devices = pci[0]["devices"].as_array().unwrap();
    let device = devices.iter().find(|device| device["qdev_id"] == kind).unwrap();
    let ports = FREE + 0x100 * device["slot"].as_u64().unwrap();
    // The lab's guest has no firmware that would enable the first BAR.
    let configuration = 1 << 31 | device["slot"].as_u64().unwrap() << 11;
    for (field, value) in [(0x10, ports), (0x04, 1)] {
        qmp.human(&format!("o/w {ADDRESS:#x} {:#x}", configuration | field)).unwrap();
        qmp.human(&format!("o/w {DATA:#x} {value:#x}")).unwrap();
    }
    let said = qmp.human(&format!("i/hx {:#x}", ports + CONFIGURATION + offset)).unwrap();
    let value = said.trim().rsplit_once("0x").unwrap().1;
    u64::from_str_radix(value, 16).unwrap()
}

#[test]
fn link_and_balloon_are_as_they_were_set_while_the_guest_ran() {
    each(|version, way| {
        let devices = [
            "-netdev",
            "user,id=net,restrict=on",
            "-device",
            "virtio-net-pci,netdev=net,id=virtio-net,romfile=",
            "-device",
            "virtio-balloon-pci,id=virtio-balloon",
        ];
        let backend = if way == Way::Attached { Backend::File } else { Backend::Private };
        let machine = Machine { backend, ..Machine::on_kvm(version, "hot=2,rate=1000") };
        let mut scene = Scene::of(machine.with(&devices), way);
        let registers = |qemu: &Path| {
            let mut qmp = Qmp::connect(qemu).unwrap();
            REGISTERS.map(|field| register(&mut qmp, field))
        };
        let before = registers(&scene.here.qmp);
        let mut qmp = Qmp::connect(&scene.here.qmp).unwrap();
        qmp.execute("set_link", json!({ "name": "virtio-net", "up": false })).unwrap();
        qmp.execute("balloon", json!({ "value": 64 << 20 })).unwrap();
        drop(qmp);
        let set = registers(&scene.here.qmp);
        assert_eq!((before, set), ([1, 0], [0, 64 << 8]));
        let (there, mut receiving, address) = scene.receive_tls();
        scene.send_at_once(&address, &[]).exited(0);
        receiving.event("received");
        assert_eq!(registers(&there.qmp), set);
        scene.moved_to(there);
    });
}

#[test]
fn device_plugged_while_the_guest_ran_must_be_at_the_destination_too() {
    each(|version, way| {
        let (mut scene, _images) = scene(version, way);
        let (there, _receiving, address) = scene.receive_tls();
        let mut qmp = Qmp::connect(&scene.here.qmp).unwrap();
        qmp.execute("device_add", json!({ "driver": "usb-mouse", "id": "mouse" })).unwrap();
        drop(qmp);
        let says = "device `usb-mouse`: the source has 1 and the destination 0";
        scene.send_at_once(&address, &[]).failed(6, says);
        there.kill();
        scene.runs_on_here();
        scene.machine.devices.extend(["-device".into(), "usb-mouse,id=mouse".into()]);
        let (there, mut receiving, address) = scene.receive_tls();
        scene.send_at_once(&address, &[]).exited(0);
        receiving.event("received");
        scene.moved_to(there);
    });
}

#[test]
fn guest_whose_writes_are_in_a_temporary_file_is_refused() {
    each(|version, way| {
        let images = tempfile::tempdir().unwrap();
        File::create(images.path().join("disk")).unwrap().set_len(8 << 20).unwrap();
        let file = format!("file={},format=raw,if=virtio,snapshot=on", text(images.path()));
        let file = file.replace(",format", "/disk,format");
        let backend = if way == Way::Attached { Backend::File } else { Backend::Private };
        let machine = Machine::on_kvm(version, "hot=2,rate=1000").with(&["-drive", &file]);
        let mut scene = Scene::of(Machine { backend, ..machine }, way);
        let (there, _receiving, address) = scene.receive_tls();
        scene.send_at_once(&address, &[]).failed(6, "are in a temporary file of this QEMU");
        there.kill();
        scene.runs_on_here();
    });
}
