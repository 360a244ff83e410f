//! Each way in which libvirt moves a guest, with each version.

use std::path::Path;

use vmferry_libvirt_lab::LibvirtVersion::{V9_0, V11_3};
use vmferry_libvirt_lab::{Disk, Domain, ImageFormat, LibvirtVersion, QemuUser};

use crate::support::{Host, Hosts, Setup, linux, must_succeed};

/// The options of several connections of memory.
const SEVERAL: [&str; 3] = ["--parallel", "--parallel-connections", "2"];

/// The options of post-copy after a round of memory.
const POST_COPY: [&str; 2] = ["--postcopy", "--postcopy-after-precopy"];

/// Moves a guest and checks it. Its consoles have the name `console`.
fn moves(hosts: &Hosts, (from, to): (&Host, &Host), guest: &str, options: &[&str]) {
    let moved = from.migrate(guest, to.libvirt.name(), options);
    must_succeed(hosts, &moved);
    assert_eq!(from.libvirt.domain_state(guest), None, "{options:?}");
    to.libvirt.check_guest(guest);
}

/// The option that names the socket of copied disks.
fn disks_uri(to: &Host, guest: &str) -> String {
    format!("unix:///run/vmferry-peers/{}/{guest}.disks", to.libvirt.name())
}

/// A transient guest on q35, with a disk that both hosts see.
fn guest_with_a_shared_disk_moves_in_every_way(version: LibvirtVersion) {
    let hosts = Hosts::start(version);
    let disk = Disk::shared(hosts.directory.path(), "shared.raw", 12, ImageFormat::Raw);
    let guest = Domain::linux("web", "static=24 dirty=8 disk=4 rest=20000").with_disk(disk);
    hosts.a.libvirt.create(&guest);
    hosts.a.libvirt.check_guest("web");
    let (there, back) = ((&hosts.a, &hosts.b), (&hosts.b, &hosts.a));
    // libvirt takes a directory of this machine for storage that hosts do not share.
    moves(&hosts, there, "web", &["--unsafe"]);
    moves(&hosts, back, "web", &[&SEVERAL[..], &["--unsafe"]].concat());
    moves(&hosts, there, "web", &[&POST_COPY[..], &["--unsafe"]].concat());
    moves(&hosts, back, "web", &["--auto-converge", "--timeout", "60", "--unsafe"]);
}

/// A persistent guest on pc, with a disk that each host has for itself.
fn guest_moves_with_its_disk(setup: Setup<'_>) {
    let hosts = Hosts::set_up(setup);
    let disk = hosts.a.libvirt.create_disk("own.qcow2", 12, ImageFormat::Qcow2);
    hosts.b.libvirt.create_disk("own.qcow2", 12, ImageFormat::Qcow2);
    let workload = "static=24 dirty=8 disk=4 rest=20000";
    let guest = Domain { machine: "pc", ..Domain::linux("web", workload) }.with_disk(disk);
    hosts.a.libvirt.define_and_start(&guest);
    hosts.a.libvirt.check_guest("web");
    for (way, more) in [((&hosts.a, &hosts.b), &[][..]), ((&hosts.b, &hosts.a), &SEVERAL)] {
        let disks = disks_uri(way.1, "web");
        let options =
            ["--persistent", "--undefinesource", "--copy-storage-all", "--disks-uri", &disks];
        moves(&hosts, way, "web", &[&options, more].concat());
    }
}

fn guests_move_in_opposite_directions_at_once(version: LibvirtVersion) {
    let hosts = Hosts::start(version);
    hosts.a.libvirt.create(&linux("one"));
    hosts.b.libvirt.create(&Domain { machine: "pc", ..linux("two") });
    hosts.a.libvirt.check_guest("one");
    hosts.b.libvirt.check_guest("two");
    let there = hosts.a.migrate_command("one", "host-b", &[]).spawn().unwrap();
    let back = hosts.b.migrate_command("two", "host-a", &SEVERAL).spawn().unwrap();
    must_succeed(&hosts, &there.wait_with_output().unwrap());
    must_succeed(&hosts, &back.wait_with_output().unwrap());
    hosts.b.libvirt.check_guest("one");
    hosts.a.libvirt.check_guest("two");
}

fn bare_metal_guest_on_kvm_moves_in_every_way(version: LibvirtVersion) {
    vmferry_kit::need_kvm();
    let hosts = Hosts::start(version);
    hosts.a.libvirt.define_and_start(&Domain::on_kvm("bare", "hot=8,rate=4000"));
    hosts.a.libvirt.check_guest("bare");
    let (there, back) = ((&hosts.a, &hosts.b), (&hosts.b, &hosts.a));
    let kept = ["--persistent", "--undefinesource"];
    moves(&hosts, there, "bare", &kept);
    moves(&hosts, back, "bare", &[&SEVERAL[..], &kept].concat());
    moves(&hosts, there, "bare", &[&POST_COPY[..], &kept].concat());
}

/// Tests of all versions.
macro_rules! of_each_version {
    ($($test:ident: $of_9_0:ident, $of_11_3:ident;)+) => {$(
        #[test]
        #[cfg_attr(
            not(feature = "long-tests"),
            ignore = "a part of the full matrix: make test-all"
        )]
        fn $of_9_0() {
            $test(V9_0);
        }

        #[test]
        #[cfg_attr(
            not(feature = "long-tests"),
            ignore = "a part of the full matrix: make test-all"
        )]
        fn $of_11_3() {
            $test(V11_3);
        }
    )+};
}

of_each_version! {
    guest_with_a_shared_disk_moves_in_every_way: shared_disk_9_0, shared_disk_11_3;
    guest_of_root_moves_with_its_disk: own_disk_9_0, own_disk_11_3;
    guest_of_another_user_moves_with_its_disk: qemu_user_9_0, qemu_user_11_3;
    guests_move_in_opposite_directions_at_once: opposite_9_0, opposite_11_3;
    bare_metal_guest_on_kvm_moves_in_every_way: kvm_9_0, kvm_11_3;
}

fn guest_of_root_moves_with_its_disk(version: LibvirtVersion) {
    guest_moves_with_its_disk(Setup { version, config: "", qemu_user: QemuUser::Root });
}

/// The user that Debian's packages use.
fn guest_of_another_user_moves_with_its_disk(version: LibvirtVersion) {
    guest_moves_with_its_disk(Setup { version, config: "", qemu_user: QemuUser::LibvirtQemu });
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn guest_is_renamed_and_redefined_on_the_way() {
    vmferry_kit::need_kvm();
    let hosts = Hosts::start(V11_3);
    hosts.a.libvirt.create(&Domain::on_kvm("web", "hot=8,rate=4000"));
    hosts.a.libvirt.check_guest("web");
    must_succeed(&hosts, &hosts.a.migrate("web", "host-b", &["--dname", "shop"]));
    assert_eq!(hosts.a.libvirt.domain_state("web"), None);
    assert_eq!(hosts.b.libvirt.domain_state("shop").as_deref(), Some("running"));
    // Its console keeps its name.
    hosts.b.libvirt.check_guest("web");

    let xml = hosts.b.libvirt.virsh_ok(&["dumpxml", "--migratable", "shop"]);
    let file = Path::new("/run/changed.xml");
    std::fs::write(hosts.b.libvirt.path(file), xml.replace("web.console", "changed.console"))
        .unwrap();
    let changed = ["--xml", file.to_str().unwrap()];
    must_succeed(&hosts, &hosts.b.migrate("shop", "host-a", &changed));
    assert_eq!(hosts.a.libvirt.domain_state("shop").as_deref(), Some("running"));
    hosts.a.libvirt.check_guest("changed");
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn definition_of_a_guest_that_is_off_moves_alone() {
    for version in LibvirtVersion::ALL {
        let hosts = Hosts::start(version);
        hosts.a.libvirt.define(&linux("web"));
        let offline = ["--offline", "--persistent", "--undefinesource"];
        must_succeed(&hosts, &hosts.a.migrate("web", "host-b", &offline));
        assert_eq!(hosts.a.libvirt.domain_state("web"), None);
        assert_eq!(hosts.b.libvirt.domain_state("web").as_deref(), Some("shut off"));
    }
}
