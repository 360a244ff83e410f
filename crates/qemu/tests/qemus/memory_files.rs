//! Memory files of real QEMUs: which processes use them, what they keep, and how much space they
//! need.

use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use vmferry::ErrorClass;
use vmferry::config::ProtocolVersions;
use vmferry::{DestinationVm, MigrateError, SourceConfig, SourceVm};
use vmferry_qemu::{Expected, QemuDestination, QemuSource};
use vmferry_qemu_lab::{HugePages, Machine, Mounted, Qemu, Version, World};

use crate::support::{attach_fails, hop, migrate_to};

fn usual() -> Machine {
    Machine { mib: 128, ..Machine::new(Version::V10_0, "dirty=8") }
}

fn attach(qemu: &Qemu) -> QemuDestination {
    QemuDestination::attach(&qemu.qmp, Expected::default()).unwrap()
}

fn blocks(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks()
}

/// Between the attach and BEGIN, a guest is started on the memory file of the waiting QEMU.
#[test]
fn begin_is_refused_when_a_guest_runs_on_the_memory_file() {
    let (world, machine) = (World::new(), usual());
    let mut here = machine.start_booted(&world, "here");
    let there = machine.incoming(&world, "there");
    let destination = attach(&there);
    symlink(world.path_on_tmpfs("there-ram"), world.path_on_tmpfs("other-ram")).unwrap();
    let mut other = machine.start_booted(&world, "other");
    let error = migrate_to(&world, 1, &here, destination, |_| {}).unwrap_err();
    let (text, pid) = (vmferry::chain(&error), other.child.id().to_string());
    assert_eq!(error.class(), ErrorClass::Busy, "{text}");
    assert!(text.contains("there-ram") && text.contains(&pid), "{text}");
    assert!(text.contains("file of its own"), "{text}");
    other.check_guest();
    here.check_guest();
}

/// A failed attempt empties the memory again, but not if another process uses it by then.
#[test]
fn discard_leaves_a_memory_file_in_use_alone() {
    let (world, machine) = (World::new(), usual());
    let here = machine.start_booted(&world, "here");
    let there = machine.incoming(&world, "there");
    let mut destination = attach(&there);
    let source = QemuSource::attach(&here.qmp).unwrap();
    destination.prepare(&source.describe()).unwrap();
    symlink(world.path_on_tmpfs("there-ram"), world.path_on_tmpfs("other-ram")).unwrap();
    let mut other = machine.start_booted(&world, "other");
    destination.discard();
    assert!(destination.is_spent(), "memory that another process uses is not its own");
    other.check_guest();
}

#[test]
fn memory_files_with_data_are_neither_moved_nor_emptied() {
    let world = World::new();
    for (name, options, bytes) in [("data", "", 2), ("image", ",readonly=on", 4)] {
        let path = world.path_on_tmpfs(name);
        let content = vec![0x5a; bytes << 20];
        std::fs::write(&path, &content).unwrap();
        let object = format!(
            "memory-backend-file,id=nv,size={bytes}M,share=on,mem-path={}{options}",
            path.display()
        );
        let device =
            if options.is_empty() { "nvdimm,memdev=nv" } else { "nvdimm,memdev=nv,unarmed=on" };
        let mut machine = usual().with(&["-object", &object, "-device", device]);
        machine.kind = "q35,nvdimm=on";
        machine = machine.with(&["-m", "128M,slots=2,maxmem=1G"]);
        let here = machine.start(&world, &format!("here-{name}"));
        let text = attach_fails(&here);
        assert!(text.contains("`nv`") && text.contains("nvdimm"), "{text}");
        // A waiting QEMU refuses each guest that would be put into its memory, and touches nothing.
        let plain = usual().start_booted(&world, &format!("plain-{name}"));
        let there = machine.incoming(&world, &format!("there-{name}"));
        drop(here);
        let mut destination = attach(&there);
        let offered = QemuSource::attach(&plain.qmp).unwrap().describe();
        let error = vmferry::chain(&destination.prepare(&offered).unwrap_err());
        assert!(error.contains("nvdimm"), "{error}");
        assert!(std::fs::read(&path).unwrap() == content, "{name} is as it was");
    }
}

/// Space for more than the guest uses, but less than its size, is enough.
#[test]
fn destination_with_too_little_memory_refuses_before_anything_is_sent() {
    let (world, machine) = (World::new(), usual());
    let mut here = machine.start_booted(&world, "here");
    for (mib, fits) in [(16, false), (120, true)] {
        let directory = world.path(&format!("tmpfs-{mib}"));
        let mounted = Mounted::new(&directory, HugePages::None, mib).unwrap();
        let small = Machine { memory_directory: Some(directory.clone()), ..machine.clone() };
        let mut there = small.incoming(&world, &format!("there-{mib}"));
        let moved = migrate_to(&world, mib as u32, &here, attach(&there), |_| {});
        if fits {
            moved.unwrap();
            there.check_guest();
        } else {
            let error = moved.unwrap_err();
            let text = vmferry::chain(&error);
            assert!(matches!(error, MigrateError::Refused { .. }), "{text}");
            assert_eq!(error.class(), ErrorClass::Incompatible, "{text}");
            let file = directory.join("there-16-ram");
            assert!(text.contains(file.to_str().unwrap()), "{text}");
            assert!(text.contains("(16.0 MiB)") && text.contains("has room for"), "{text}");
            here.check_guest();
        }
        drop((there, mounted));
    }
}

/// A source that speaks version 1 does not send how much memory its guest uses.
#[test]
fn full_memory_file_system_is_named_on_both_sides() {
    let (world, machine) = (World::new(), usual());
    let mut here = machine.start_booted(&world, "here");
    let directory = world.path("tmpfs");
    let _mounted = Mounted::new(&directory, HugePages::None, 16).unwrap();
    let small = Machine { memory_directory: Some(directory.clone()), ..machine };
    let there = small.incoming(&world, "there");
    let version_1 =
        |config: &mut SourceConfig| config.protocol = ProtocolVersions::new(1..=1).unwrap();
    let error = migrate_to(&world, 1, &here, attach(&there), version_1).unwrap_err();
    let text = vmferry::chain(&error);
    assert!(matches!(error, MigrateError::EndedByPeer { .. }), "{text}");
    let file = directory.join("there-ram");
    assert!(text.contains(file.to_str().unwrap()) && text.contains("(16.0 MiB)"), "{text}");
    assert!(text.contains("no page could be had"), "{text}");
    here.check_guest();
}

/// Preallocated memory guarantees that the guest can touch all of it.
#[test]
fn huge_pages_stay_allocated_through_begin_abort_and_a_migration() {
    let world = World::new();
    let directory = world.path("huge");
    let _mounted = Mounted::new(&directory, HugePages::Hugetlb, 512).unwrap();
    let machine = Machine {
        memory_directory: Some(directory.clone()),
        backend_options: ",prealloc=on",
        ..usual()
    };
    let here = machine.start_booted(&world, "here");
    let there = machine.incoming(&world, "there");
    let file = directory.join("there-ram");
    let all = (128 << 20) / 512;
    let mut destination = attach(&there);
    assert_eq!(blocks(&file), all, "QEMU has allocated it all");
    let offered = QemuSource::attach(&here.qmp).unwrap().describe();
    destination.prepare(&offered).unwrap();
    assert_eq!(blocks(&file), all, "after BEGIN");
    destination.discard();
    assert_eq!(blocks(&file), all, "after an attempt that failed");
    drop(destination);
    let mut there = there;
    hop(&world, 1, &here, &there);
    assert_eq!(blocks(&file), all, "after the migration");
    there.check_guest();
}

#[test]
fn source_memory_file_frees_its_pages_after_the_guest_left() {
    let (world, machine) = (World::new(), usual());
    let mut here = machine.start_booted(&world, "here");
    let file = world.path_on_tmpfs("here-ram");
    assert!(blocks(&file) > 0);
    let there = machine.incoming(&world, "there");
    hop(&world, 1, &here, &there);
    here.child.wait().unwrap();
    assert_eq!(blocks(&file), 0, "its guest is elsewhere");
}
