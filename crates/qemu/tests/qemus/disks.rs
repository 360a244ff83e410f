//! Disks of real QEMUs: how they write guest memory, how harvests affect the guest, and which QEMU
//! holds their locks.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::{all, hop, hop_with, versions};
use vmferry::config::RoundLimit;
use vmferry::{DestinationVm, Landing, Resume, SourceVm};
use vmferry_memory::{GuestMemory, PAGE_SIZE};
use vmferry_qemu::{Arrived, Expected, QemuDestination, QemuSource, Qmp};
use vmferry_qemu_lab::{FuseImage, Machine, Qemu, SlowDisk, Version, World};
use vmferry_wire::SessionId;

/// A machine with the disk `disk` on these block nodes.
fn with_nodes(version: Version, workload: &str, nodes: &[String]) -> Machine {
    let mut machine = Machine::new(version, workload);
    for node in nodes {
        let option = if node.starts_with("throttle-group") { "-object" } else { "-blockdev" };
        machine = machine.with(&[option, node]);
    }
    machine.with(&["-device", "virtio-blk-pci,drive=disk"])
}

fn reads_on(qemu: &mut Qemu, rounds: u64) {
    let before = qemu.wait_for("reads its disk", |said| said.get("disk_rounds") > 0);
    let wanted = before.get("disk_rounds") + rounds;
    let after = qemu.wait_for("reads its disk on", |said| said.get("disk_rounds") >= wanted);
    assert_eq!((after.get("corruptions"), after.get("disk_errors")), (0, 0), "{after:?}");
}

/// Each node has its own flag, and the top node's flag says nothing about the nodes below.
#[test]
fn direct_io_is_detected_at_any_block_node() {
    let world = World::new();
    let disk = world.disk(16);
    let raw = |id: &str, options: &str| {
        format!("driver=file,node-name={id},filename={}{options}", disk.display())
    };
    let overlay = world.qcow2("overlay.qcow2", 16);
    let ways: [(&str, Vec<String>, bool); 5] = [
        (
            "below a format",
            vec![raw("file", ",cache.direct=on"), "driver=raw,node-name=disk,file=file".into()],
            true,
        ),
        (
            "below a filter",
            vec![
                "throttle-group,id=limits".into(),
                raw("file", ",cache.direct=on,aio=native"),
                "driver=throttle,node-name=disk,file=file,throttle-group=limits".into(),
            ],
            true,
        ),
        (
            "of a backing file",
            vec![
                raw("backing", ",cache.direct=on,read-only=on"),
                "driver=raw,node-name=base,file=backing,read-only=on".into(),
                format!("driver=file,node-name=file,filename={}", overlay.display()),
                "driver=qcow2,node-name=disk,file=file,backing=base".into(),
            ],
            true,
        ),
        ("of the top alone", vec![raw("disk", ",cache.direct=on,aio=io_uring")], true),
        (
            "nowhere",
            vec![raw("file", ",aio=io_uring"), "driver=raw,node-name=disk,file=file".into()],
            false,
        ),
    ];
    for version in Version::ALL {
        for (number, (way, nodes, pins)) in ways.iter().enumerate() {
            let qemu =
                with_nodes(version, "", nodes).start(&world, &format!("{version:?}-{number}"));
            let source = QemuSource::attach(&qemu.qmp).unwrap();
            assert_eq!(source.habits().pins_pages, *pins, "{version:?}: {way}");
        }
        let drive =
            format!("if=none,id=disk,format=raw,file={},file.cache.direct=on", disk.display());
        let machine = Machine::new(version, "");
        let machine = machine.with(&["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]);
        let qemu = machine.start(&world, &format!("{version:?}-drive"));
        assert!(QemuSource::attach(&qemu.qmp).unwrap().habits().pins_pages, "{version:?}: -drive");
    }
}

#[test]
fn direct_io_is_detected_at_the_file_system() {
    let world = World::new();
    let version = Version::V7_2;
    let on_fuse = FuseImage::mount(&world.disk(16), world.path("mounted"));
    let path = on_fuse.path().display();
    let node = format!("driver=file,node-name=disk,filename={path},read-only=on,locking=off");
    let qemu = with_nodes(version, "", &[node]).start(&world, "on-fuse");
    assert!(QemuSource::attach(&qemu.qmp).unwrap().habits().pins_pages);
}

/// A second monitor of a QEMU, which receives every event.
struct Listener(BufReader<UnixStream>);

impl Listener {
    fn new(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        (&stream).write_all(b"{\"execute\":\"qmp_capabilities\"}\n").unwrap();
        Self(BufReader::new(stream))
    }

    /// How often the guest was stopped before QEMU ended.
    fn stops(self) -> usize {
        let lines = self.0.lines().map_while(Result::ok);
        lines.filter(|line| line.contains("\"event\": \"STOP\"")).count()
    }
}

/// Data that a disk reads past the cache, below a format node, arrives. The only reported pause is
/// the switchover's.
#[test]
fn harvests_wait_for_direct_io_without_stopping_the_guest() {
    for &version in versions() {
        let world = World::new();
        let disk = world.disk(144);
        let file = format!(
            "driver=file,node-name=file,filename={},cache.direct=on,aio=native",
            disk.display()
        );
        let nodes = [file, "driver=raw,node-name=disk,file=file".to_owned()];
        let mut machine = with_nodes(version, "dirty=40 disk=48 rest=0", &nodes);
        machine.devices[5] = "virtio-blk-pci,drive=disk,iothread=requests".into();
        let machine = machine.with(&["-object", "iothread,id=requests"]);
        let second: PathBuf = world.path("second.qmp");
        let monitor = format!("unix:{},server=on,wait=off", second.display());
        let mut here = machine.clone().with(&["-qmp", &monitor]).start(&world, "here");
        reads_on(&mut here, 1);
        let mut there = machine.incoming(&world, "there");
        // Requests are slowed down, so that one is pending at any moment.
        let _slow = SlowDisk::limit(here.child.id(), &disk, 40 << 20).unwrap();
        let listener = Listener::new(&second);
        let stats = hop_with(&world, 1, &here, &there, |config| {
            config.downtime_limit = Duration::from_millis(17);
            config.max_rounds = RoundLimit::new(12).unwrap();
        });
        here.child.wait().unwrap();
        println!("{version:?}: {:.1} ms of waits for requests", stats.harvest_pauses_ms);
        reads_on(&mut there, 2);
        there.check_guest();
        assert_eq!(listener.stops(), 1, "{version:?}: the switchover stops it, and nothing else");
        assert!(stats.harvest_pauses_ms > 0.0, "{version:?}: requests are waited for");
    }
}

/// Copies a whole memory.
fn copy(from: &GuestMemory, to: &GuestMemory) {
    for run in from.populated().unwrap().runs() {
        let mut bytes = vec![0; run.pages as usize * PAGE_SIZE];
        from.copy_out(run, &mut bytes).unwrap();
        to.copy_in(run, &bytes).unwrap();
    }
}

/// The link may be lost between the load and COMMIT: the source then resumes its guest, and the
/// destination does not know.
#[test]
fn disk_locks_stay_at_the_source_until_commit() {
    let ways: &[(Version, &str)] =
        &[(Version::V7_2, "raw"), (Version::V10_0, "qcow2"), (Version::V7_2, "qcow2")];
    for &(version, format) in if all() { ways } else { &ways[..2] } {
        let world = World::new();
        let disk = if format == "raw" { world.disk(64) } else { world.qcow2("disk.qcow2", 64) };
        let nodes = [
            format!("driver=file,node-name=file,filename={},locking=on", disk.display()),
            format!("driver={format},node-name=disk,file=file"),
        ];
        let machine = with_nodes(version, "dirty=5 disk=18", &nodes);
        let mut here = machine.start(&world, "here");
        reads_on(&mut here, 1);
        let lost = machine.incoming(&world, "lost");
        let mut source = QemuSource::attach(&here.qmp).unwrap();
        let mut destination = QemuDestination::attach(&lost.qmp, Expected::default()).unwrap();
        let Landing::Memory(landing) = destination.prepare(&source.describe()).unwrap() else {
            panic!("it is attached")
        };
        source.pause().unwrap();
        let state = source.save().unwrap();
        copy(&source.memory(), &landing);
        destination.load(&state).unwrap();
        // The destination is not notified that the migration has ended.
        source.resume().unwrap_or_else(|error| panic!("{version:?}, {format}: {error}"));
        drop(source);
        reads_on(&mut here, 2);
        drop(destination);
        drop(lost);
        // If COMMIT arrives, the destination takes the locks.
        let mut there = machine.incoming(&world, "there");
        hop(&world, 1, &here, &there);
        here.child.wait().unwrap();
        reads_on(&mut there, 2);
        there.check_guest();
    }
}

/// A disk request never completes, and a QEMU that is told to quit waits for it.
#[test]
fn quit_of_a_qemu_whose_disk_hangs_names_the_process() {
    let world = World::new();
    let drive = format!(
        "if=none,id=disk,driver=raw,file.driver=blkdebug,file.image.driver=file,\
         file.image.filename={}",
        world.disk(16).display()
    );
    let machine = Machine::new(Version::V10_0, "");
    let machine = machine.with(&["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]);
    let mut there = machine.incoming(&world, "there");
    let journals = world.path("journals");
    std::fs::create_dir(&journals).unwrap();
    let destination = QemuDestination::attach(&there.qmp, Expected::default()).unwrap();
    let mut destination = destination.received_by("this one");
    destination.opened(SessionId([7; 16]), &journals).unwrap();
    drop(destination);
    let mut qmp = Qmp::connect(&there.qmp).unwrap();
    for order in ["break read_aio held", "aio_read 0 512"] {
        qmp.human(&format!("qemu-io disk \"{order}\"")).unwrap();
    }
    drop(qmp);
    let find = || Arrived::find(&journals, "this one").unwrap();
    let error = find().remove(0).end().unwrap_err();
    assert!(error.is_timeout(), "{error}");
    // QEMU hangs either before it answers or after it.
    let text = format!("QEMU's process {}", there.child.id());
    assert!(error.to_string().contains(&text), "{error}");
    assert!(there.child.try_wait().unwrap().is_none(), "it hangs");
    assert_eq!(find().len(), 1, "the next receiver finds it too");
}
