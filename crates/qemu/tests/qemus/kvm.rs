//! Guests of QEMUs on KVM, moved several times each: machine types, kinds of memory, attached and
//! carried, numbers of vCPUs. They write continuously, and KVM itself writes their memory: clock,
//! steal time, end-of-interrupt flags.

use crate::support::{all, carry, hop};
use vmferry_qemu_lab::{Backend, HugePages, Machine, Mounted, Qemu, Said, Version, World};

/// Hops of each guest.
fn hops() -> u32 {
    if all() { 5 } else { 2 }
}

/// How a guest is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Attached,
    Carried,
}

/// The kind of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    Of(Backend),
    /// A file of huge pages.
    Hugetlbfs,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    version: Version,
    kind: &'static str,
    memory: Memory,
    way: Way,
    vcpus: u32,
}

/// All combinations that are possible with this machine type.
fn cases(kind: &'static str) -> Vec<Case> {
    let mut cases = Vec::new();
    let memories = [Backend::File, Backend::Memfd, Backend::Private, Backend::TwoNodes];
    let memories = memories.map(Memory::Of).into_iter().chain([Memory::Hugetlbfs]);
    for version in Version::ALL {
        for memory in memories.clone() {
            for way in [Way::Attached, Way::Carried] {
                let case = Case { version, kind, memory, way, vcpus: 1 };
                let each = [1, 2, 4].map(|vcpus| Case { vcpus, ..case });
                cases.extend(each.into_iter().filter(Case::is_possible));
            }
        }
    }
    cases
}

impl Case {
    fn is_possible(&self) -> bool {
        // By QEMU: `microvm` has no NUMA nodes. By vmferry: see docs/qemu.md.
        let has_nodes = self.kind != "microvm";
        let can_be_attached = match self.memory {
            Memory::Of(Backend::Private) => false,
            Memory::Of(Backend::Memfd) => self.version == Version::V7_2,
            _ => true,
        };
        (has_nodes || self.memory != Memory::Of(Backend::TwoNodes))
            && (can_be_attached || self.way == Way::Carried)
    }

    fn run(&self) {
        println!("{self:?}");
        let world = World::new();
        let mut machine = Machine {
            kind: self.kind,
            vcpus: self.vcpus,
            ..Machine::on_kvm(self.version, "fill=16,incompressible hot=24,random,rate=40000")
        };
        if self.vcpus == 2 {
            // The firmware that QEMU gives a user's guest. It takes long to boot on PVM.
            let is_pc = self.kind != "microvm";
            let firmware = if is_pc { "bios-256k.bin" } else { "bios-microvm.bin" };
            machine = machine.with(&["-bios", firmware]);
        }
        let mut mounted = None;
        match self.memory {
            Memory::Of(backend) => machine.backend = backend,
            Memory::Hugetlbfs => {
                let directory = world.path("huge");
                // Two guests at a time, and one more page because QEMU rounds up.
                mounted = Some(Mounted::new(&directory, HugePages::Hugetlb, 2 * 128 + 2).unwrap());
                machine.memory_directory = Some(directory);
            }
        }
        self.travel(&world, &machine);
        drop(mounted);
    }

    fn travel(&self, world: &World, machine: &Machine) {
        let mut here = machine.start_booted(world, "qemu-0");
        let mut before = check(&mut here, &Said::default());
        assert_eq!(before.get("vcpus"), u64::from(self.vcpus));
        for number in 1..=hops() {
            let there = machine.incoming(world, &format!("qemu-{number}"));
            match self.way {
                Way::Attached => {
                    let stats = hop(world, number, &here, &there);
                    let same = (stats.digest_match, stats.verify_match);
                    assert_eq!(same, (Some(true), Some(true)), "{self:?}");
                }
                Way::Carried => {
                    let channels = if number % 2 == 1 { 2 } else { 0 };
                    let stats = carry(world, number, &here, &there, channels, |_| {}).unwrap();
                    assert_eq!(stats.digest_match, Some(true), "{self:?}");
                }
            }
            here.child.wait().unwrap();
            here = there;
            before = check(&mut here, &before);
        }
    }
}

/// Waits until the guest has checked all of its memory, including what KVM writes, without an
/// error, and until KVM has written to it again.
fn check(qemu: &mut Qemu, before: &Said) -> Said {
    qemu.check_guest();
    let said = qemu.wait_for("sees what KVM writes", |said| {
        let grown = |name: &str, by: u64| said.get(name) >= before.get(name) + by;
        grown("clock_updates", 2) && grown("clock_us", 1) && grown("steal_updates", 2)
    });
    for feature in ["has_clock", "has_steal", "has_eoi"] {
        assert_eq!(
            said.get(feature),
            1,
            "this KVM offers its guests less than these tests need: {said:?}"
        );
    }
    assert_eq!(said.get("corruptions"), 0, "{said:?}");
    said
}

/// The cases that run without `VMFERRY_TEST_ALL`.
const SAMPLE: [Case; 5] = [
    Case {
        version: Version::V10_0,
        kind: "q35",
        memory: Memory::Of(Backend::File),
        way: Way::Attached,
        vcpus: 1,
    },
    Case {
        version: Version::V7_2,
        kind: "q35",
        memory: Memory::Of(Backend::Memfd),
        way: Way::Attached,
        vcpus: 4,
    },
    Case {
        version: Version::V7_2,
        kind: "pc",
        memory: Memory::Of(Backend::TwoNodes),
        way: Way::Attached,
        vcpus: 2,
    },
    Case {
        version: Version::V7_2,
        kind: "microvm",
        memory: Memory::Of(Backend::Private),
        way: Way::Carried,
        vcpus: 1,
    },
    Case {
        version: Version::V10_0,
        kind: "microvm",
        memory: Memory::Hugetlbfs,
        way: Way::Attached,
        vcpus: 4,
    },
];

/// Runs the matrix of a machine type and a number of vCPUs, or its part of the sample.
fn travel(kind: &'static str, vcpus: u32) {
    let cases = if all() { cases(kind) } else { SAMPLE.into() };
    let of_this_test = |case: &&Case| case.kind == kind && case.vcpus == vcpus;
    let mut run = 0;
    for case in cases.iter().filter(of_this_test) {
        assert!(case.is_possible(), "{case:?}");
        case.run();
        run += 1;
    }
    assert!(run > 0, "a test without a sample is for the full matrix");
}

#[test]
fn q35_guests_with_one_vcpu_move_on_kvm() {
    travel("q35", 1);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn q35_guests_with_two_vcpus_move_on_kvm() {
    travel("q35", 2);
}

#[test]
fn q35_guests_with_four_vcpus_move_on_kvm() {
    travel("q35", 4);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn pc_guests_with_one_vcpu_move_on_kvm() {
    travel("pc", 1);
}

#[test]
fn pc_guests_with_two_vcpus_move_on_kvm() {
    travel("pc", 2);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn pc_guests_with_four_vcpus_move_on_kvm() {
    travel("pc", 4);
}

#[test]
fn microvm_guests_with_one_vcpu_move_on_kvm() {
    travel("microvm", 1);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn microvm_guests_with_two_vcpus_move_on_kvm() {
    travel("microvm", 2);
}

#[test]
fn microvm_guests_with_four_vcpus_move_on_kvm() {
    travel("microvm", 4);
}

/// Whether KVM lets the guest skip the end-of-interrupt write to the LAPIC.
#[test]
#[ignore = "needs a KVM that runs ring 0 natively: one that emulates it (PVM) takes each offer \
     back before the guest sees it"]
fn kvm_lets_the_guest_skip_end_of_interrupt_writes() {
    let world = World::new();
    let mut qemu = Machine::on_kvm(Version::V10_0, "hot=8,rate=40000").start_booted(&world, "qemu");
    qemu.wait_for("saves ends of interrupts", |said| said.get("eois_saved") > 0);
}

/// KVM writes that word of memory in any case, and the other vCPU sees it.
#[test]
fn kvm_offers_to_skip_end_of_interrupt_writes() {
    let world = World::new();
    let machine = Machine { vcpus: 2, ..Machine::on_kvm(Version::V10_0, "hot=8,rate=40000") };
    let mut qemu = machine.start_booted(&world, "qemu");
    let said =
        qemu.wait_for("sees offers", |said| said.get("eois_offered") + said.get("eois_saved") > 0);
    assert_eq!((said.get("has_eoi"), said.get("corruptions")), (1, 0), "{said:?}");
}
