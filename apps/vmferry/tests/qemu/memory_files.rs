//! Ownership of QEMU's memory files, as `send --qemu`, `receive --qemu` and `receive --exec` see
//! it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vmferry_memory::{GuestMemory, PAGE_SIZE, SlotId, SlotLayout};
use vmferry_qemu_lab::{HugePages, Mounted, Version};

use crate::support::scene::{Scene, Way};
use crate::support::text;

/// Maps a file into this process, which vmferry does not know.
fn map(path: &Path) -> GuestMemory {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let layout = SlotLayout { slot: SlotId(0), gpa: 0, pages: 1 };
    GuestMemory::map_files(vec![(layout, file, 0)]).unwrap()
}

fn blocks(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks()
}

/// Number of pages that are not zero. The kernel may reclaim pages of a tmpfs that were never
/// written, as DAMON and `memory.reclaim` do, so a file may have fewer blocks with the same
/// content.
fn pages_with_data(path: &Path) -> usize {
    let content = std::fs::read(path).unwrap();
    content.chunks(PAGE_SIZE).filter(|page| page.iter().any(|&byte| byte != 0)).count()
}

fn send<'a>(qmp: &'a Path, address: &'a str) -> Vec<&'a str> {
    // How fast a loaded machine sends is not under test.
    let moves = ["--when-stuck", "switch-over"];
    [&["send", "--qemu", text(qmp), "--to", address, "--plain"], &moves[..]].concat()
}

/// A second receiver with the same memory file, while the guest that arrived first runs on it. (A
/// receiver that is started again by the same command line finds its guest.)
#[test]
fn receiver_refuses_a_memory_file_that_a_guest_runs_on() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let command = scene.command("started");
    let listen = ["--listen", "tcp:127.0.0.1:0", "--plain", "--exec", &command];
    let (mut receiving, address) = scene.b.receive(&listen);
    scene.a.run(&send(&scene.here.qmp, &address)).exited(0);
    let received = receiving.event("received");
    let qmp = PathBuf::from(received["qmp"].as_str().unwrap());
    receiving.kill();
    let other = ["receive", "--listen", "tcp:127.0.0.2:0", "--plain", "--exec", &command];
    scene.b.run(&other).failed(7, "may run a guest on it");
    // The first guest runs on, and its memory is intact.
    let (mut there, mut receiving, address) = scene.receive_plain();
    scene.b.run(&send(&qmp, &address)).exited(0);
    receiving.event("received");
    there.check_guest();
}

#[test]
fn memory_file_mapped_by_another_process_is_refused_on_both_sides() {
    for way in [Way::Attached, Way::Carried] {
        let mut scene = Scene::new(Version::V10_0, Way::Attached);
        let (_there, receiving, address) = scene.receive_plain();
        let file = scene.lab.path_on_tmpfs("there-1-ram");
        let mapped = map(&file);
        mapped.write_at(0, b"somebody's").unwrap();
        let mut arguments = send(&scene.here.qmp, &address);
        if way == Way::Carried {
            arguments.extend(["--mode", "carried"]);
        }
        let says = format!("{} (", std::process::id());
        let sent = scene.a.run(&arguments);
        sent.failed(7, &says);
        receiving.finish().failed(7, &says);
        let mut content = [0; 10];
        mapped.read_at(0, &mut content).unwrap();
        assert_eq!(&content, b"somebody's", "{way:?}");
        drop(mapped);
        scene.runs_on_here();
    }
}

#[test]
fn guest_larger_than_the_memory_file_system_is_refused_on_both_sides() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let directory = scene.lab.path("small");
    let mounted = Mounted::new(&directory, HugePages::None, 16).unwrap();
    scene.machine.memory_directory = Some(directory);
    let (there, receiving, address) = scene.receive_plain();
    let sent = scene.a.run(&send(&scene.here.qmp, &address));
    for ended in [sent, receiving.finish()] {
        ended.failed(6, "there-1-ram (16.0 MiB) has room for 1");
        ended.failed(6, "the guest uses");
    }
    drop((there, mounted));
    scene.runs_on_here();
}

#[test]
fn source_memory_file_is_emptied_after_the_guest_moved() {
    // For a carried guest as well: its memory is a file that remains.
    for way in ["attached", "carried"] {
        let mut scene = Scene::new(Version::V10_0, Way::Attached);
        let file = scene.lab.path_on_tmpfs("here-ram");
        let used = blocks(&file) * 512;
        assert!(used > 16 << 20, "{used}");
        let (mut there, mut receiving, address) = scene.receive_plain();
        let mut arguments = send(&scene.here.qmp, &address);
        arguments.extend(["--mode", way]);
        let sent = scene.a.run(&arguments).exited(0);
        receiving.event("received");
        assert_eq!(blocks(&file), 0, "{way}");
        let freed = sent.last()["qemu"]["freed_bytes"].as_u64().unwrap();
        // Memory that QEMU freed itself when it ended is not counted.
        assert!(freed > used / 2, "{freed} of {used}");
        there.check_guest();
    }
}

#[test]
fn source_memory_file_keeps_its_pages_on_request_or_when_shared() {
    for keep in [true, false] {
        let mut scene = Scene::new(Version::V10_0, Way::Attached);
        let file = scene.lab.path_on_tmpfs("here-ram");
        let used = pages_with_data(&file);
        assert!(used * PAGE_SIZE > 16 << 20, "{used}");
        let (mut there, mut receiving, address) = scene.receive_plain();
        let mut arguments = send(&scene.here.qmp, &address);
        let mapped = (!keep).then(|| map(&file));
        if keep {
            arguments.push("--keep-source");
        }
        let sent = scene.a.run(&arguments).exited(0);
        receiving.event("received");
        let left = pages_with_data(&file);
        assert!(left >= used, "{left} of {used} pages, --keep-source: {keep}: {sent:?}");
        let kept = sent.lines.iter().find(|line| line["event"] == "memory-kept");
        assert_eq!(kept.is_some(), !keep, "{sent:?}");
        if let Some(kept) = kept {
            let why = kept["reason"].as_str().unwrap();
            assert!(why.contains(&std::process::id().to_string()), "{why}");
        }
        drop(mapped);
        there.check_guest();
    }
}
