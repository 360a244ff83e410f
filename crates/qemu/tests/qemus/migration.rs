//! Guests of real QEMUs, moved by the engine.

use crate::support::{all, attach_fails, hop, migrate_between};
use vmferry::ErrorClass;
use vmferry_qemu::{Expected, QemuDestination};
use vmferry_qemu_lab::{Backend, HugePages, Machine, Mounted, Version, World};

/// The guest of most tests, on KVM.
fn usual(version: Version) -> Machine {
    Machine::on_kvm(version, "hot=8,rate=40000")
}

/// Moves a guest from QEMU to QEMU, and checks it on each.
fn travel(machine: &Machine, hops: u32) {
    travel_in(&World::new(), machine, hops);
}

fn travel_in(world: &World, machine: &Machine, hops: u32) {
    let mut here = machine.start_booted(world, "qemu-0");
    here.check_guest();
    for number in 1..=hops {
        let there = machine.incoming(world, &format!("qemu-{number}"));
        let stats = hop(world, number, &here, &there);
        assert_eq!((stats.digest_match, stats.verify_match), (Some(true), Some(true)));
        here.child.wait().unwrap();
        here = there;
        here.check_guest();
    }
}

/// The whole matrix with `VMFERRY_TEST_ALL`, otherwise each kind of machine with one version.
fn machines() -> Vec<Machine> {
    let all = all();
    let mut machines = Vec::new();
    for version in Version::ALL {
        let newest = version == Version::V10_0;
        let machine = |workload: &str| Machine::new(version, workload);
        if all || newest {
            // QEMU carries video memory; memory above 4 GiB is the same block at another address.
            let large = Machine { mib: 4096, vcpus: 2, ..machine("static=40 dirty=20") };
            machines.push(large.with(&["-device", "VGA"]));
        }
        if all || !newest {
            let backend = Backend::TwoNodes;
            machines.push(Machine { backend, kind: "pc", ..machine("static=60 dirty=10") });
        }
        if all && !newest {
            machines.push(Machine { backend: Backend::Memfd, ..machine("dirty=20") });
        }
        if all {
            machines.push(Machine { vcpus: 2, ..machine("static=40 dirty=20") });
            machines.push(machine("static=10"));
            machines.push(Machine { mib: 512, ..machine("dirty=100") });
            machines.push(Machine { kind: "pc", vcpus: 2, ..machine("static=100 dirty=5") });
        }
    }
    machines
}

/// Pages that vmferry has placed are in the file and not in QEMU's page table: the next hop must
/// not lose them.
#[test]
fn linux_guests_move_from_qemu_to_qemu() {
    let hops = if all() { 10 } else { 2 };
    for machine in machines() {
        println!("{machine:?}");
        travel(&machine, hops);
    }
}

#[test]
fn guests_of_huge_pages_move() {
    for kind in [HugePages::Transparent, HugePages::Hugetlb] {
        let world = World::new();
        let directory = world.path("huge");
        let mounted = Mounted::new(&directory, kind, 2 * 128 + 2).unwrap();
        let machine = Machine {
            memory_directory: Some(directory),
            ..Machine::on_kvm(Version::V10_0, "fill=40,incompressible hot=20,rate=40000")
        };
        travel_in(&world, &machine, 3);
        drop(mounted);
    }
}

#[test]
fn guest_that_can_not_be_attached_is_refused_untouched() {
    for version in Version::ALL {
        let world = World::new();
        let private = Machine { backend: Backend::Private, ..usual(version) };
        let mut qemu = private.start_booted(&world, "private");
        let text = attach_fails(&qemu);
        assert!(text.contains("memory-backend-file"), "{text}");
        qemu.check_guest();
    }
    let world = World::new();
    let memfd = Machine { backend: Backend::Memfd, ..usual(Version::V10_0) };
    let mut qemu = memfd.start_booted(&world, "memfd");
    let text = attach_fails(&qemu);
    assert!(text.contains("is a memfd") && text.contains("mem-path"), "{text}");
    qemu.check_guest();
    // QEMU sends it itself although it is a shared file, because it has no name.
    let shm = Machine { backend: Backend::Shm, ..usual(Version::V10_0) };
    let mut qemu = shm.start_booted(&world, "shm");
    let text = attach_fails(&qemu);
    assert!(text.contains("is a memory-backend-shm") && text.contains("mem-path"), "{text}");
    qemu.check_guest();
}

#[test]
fn memory_shared_with_others_is_refused() {
    let world = World::new();
    let shared = format!(
        "memory-backend-file,id=shared,size=1M,share=on,mem-path={}",
        world.path_on_tmpfs("shared").display()
    );
    let machine = usual(Version::V10_0);
    // QEMU itself forbids the first, and vmferry the second.
    for (role, says) in [("off", "peer mode"), ("on", "device_del")] {
        let device = format!("ivshmem-plain,memdev=shared,master={role}");
        let with_shared = machine.clone().with(&["-object", &shared, "-device", &device]);
        let mut qemu = with_shared.start(&world, &format!("master-{role}"));
        let text = attach_fails(&qemu);
        assert!(text.contains("ivshmem") && text.contains(says), "{text}");
        qemu.check_guest();
    }

    // The destination's memory is the source's, under another name.
    let mut here = machine.start_booted(&world, "here");
    std::os::unix::fs::symlink(world.path_on_tmpfs("here-ram"), world.path_on_tmpfs("there-ram"))
        .unwrap();
    let there = machine.incoming(&world, "there");
    let error = QemuDestination::attach(&there.qmp, Expected::default()).err().unwrap();
    let (text, pid) = (vmferry::chain(&error), here.child.id().to_string());
    assert!(text.contains("file of its own") && text.contains(&pid), "{text}");
    here.check_guest();
}

#[test]
fn mismatched_destination_is_refused_and_the_guest_runs_on() {
    let world = World::new();
    let machine = usual(Version::V10_0);
    let mut here = machine.start_booted(&world, "here");
    here.check_guest();

    let small = Machine { mib: 64, ..machine.clone() };
    let there = small.incoming(&world, "small");
    let error = migrate_between(&world, 1, &here, &there).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Incompatible, "{error}");
    here.check_guest();

    // The same memory, and one extra device: QEMU itself would notice late or never.
    let there = machine.clone().with(&["-device", "virtio-rng-pci"]).incoming(&world, "more");
    let error = migrate_between(&world, 2, &here, &there).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Incompatible, "{error}");
    assert!(vmferry::chain(&error).contains("virtio-rng-pci"), "{error}");
    here.check_guest();

    let two = Machine { vcpus: 2, ..machine.clone() };
    let there = two.incoming(&world, "two");
    let error = migrate_between(&world, 3, &here, &there).unwrap_err();
    assert!(vmferry::chain(&error).contains("-smp"), "{error}");
    here.check_guest();

    // A state that QEMU can't load, when the guest is already paused: the number of vectors is not
    // part of the compared description.
    let with = |device: &str| machine.clone().with(&["-device", device]);
    let mut odd = with("virtio-rng-pci,vectors=2").start(&world, "odd");
    odd.check_guest();
    let there = with("virtio-rng-pci,vectors=4").incoming(&world, "even");
    let error = migrate_between(&world, 4, &odd, &there).unwrap_err();
    assert!(vmferry::chain(&error).contains("state"), "{error}");
    odd.check_guest();

    // After all this the guest can still be moved.
    let mut there = machine.incoming(&world, "there");
    hop(&world, 5, &here, &there);
    there.check_guest();
}
