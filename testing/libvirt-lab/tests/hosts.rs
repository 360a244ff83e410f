//! Real libvirt daemons with real guests.

use std::path::Path;
use std::time::{Duration, Instant};

use vmferry_libvirt_lab::{Disk, Domain, ImageFormat, LibvirtHost, LibvirtVersion};
use vmferry_net_lab::Namespaces;

/// How long a killed QEMU may take to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A Linux guest that leaves the processor to other tests most of the time.
fn linux(name: &str) -> Domain {
    Domain::linux(name, "static=24 dirty=8 rest=20000")
}

fn on_kvm(name: &str) -> Domain {
    Domain::on_kvm(name, "hot=8,rate=4000")
}

/// Moves a domain by libvirt itself, over sockets in a directory that both hosts have.
fn migrate(from: &LibvirtHost, to: &LibvirtHost, name: &str, sockets: &Path, more: &[&str]) {
    let memory = format!("unix://{}", sockets.join(format!("{name}-{}", to.name())).display());
    let uri = to.uri();
    let usual = ["migrate", "--live", "--p2p", "--domain", name, "--desturi", &uri];
    from.virsh_ok(&[&usual[..], &["--migrateuri", &memory], more].concat());
    assert_eq!(to.domain_state(name).as_deref(), Some("running"));
}

fn linux_domain_moves(version: LibvirtVersion) {
    let sockets = tempfile::tempdir().unwrap();
    let disk = Disk::shared(sockets.path(), "shared.raw", 8, ImageFormat::Raw);
    let here = LibvirtHost::start("here", version, None);
    let there = LibvirtHost::start("there", version, None);
    let domain = linux("emulated").with_disk(disk);
    here.create(&domain);
    let before = here.check_guest("emulated");
    // libvirt takes a directory of this machine for storage that hosts do not share.
    migrate(&here, &there, "emulated", sockets.path(), &["--unsafe"]);
    assert_eq!(here.domain_state("emulated"), None);
    let after = there.check_guest("emulated");
    assert!(after.get("uptime_us") > before.get("uptime_us"), "{before:?} {after:?}");
}

fn bare_metal_domain_moves(version: LibvirtVersion) {
    vmferry_kit::need_kvm();
    let sockets = tempfile::tempdir().unwrap();
    let here = LibvirtHost::start("here", version, None);
    let there = LibvirtHost::start("there", version, None);
    here.define_and_start(&on_kvm("bare"));
    here.check_guest("bare");
    migrate(&here, &there, "bare", sockets.path(), &["--persistent", "--undefinesource"]);
    assert_eq!(here.domain_state("bare"), None);
    there.check_guest("bare");
    migrate(&there, &here, "bare", sockets.path(), &[]);
    assert_eq!(there.domain_state("bare").as_deref(), Some("shut off"));
    here.check_guest("bare");
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn linux_domain_moves_with_libvirt_9_0() {
    linux_domain_moves(LibvirtVersion::V9_0);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn linux_domain_moves_with_libvirt_11_3() {
    linux_domain_moves(LibvirtVersion::V11_3);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn bare_metal_domain_moves_there_and_back_with_libvirt_9_0() {
    bare_metal_domain_moves(LibvirtVersion::V9_0);
}

#[test]
fn bare_metal_domain_moves_there_and_back_with_libvirt_11_3() {
    bare_metal_domain_moves(LibvirtVersion::V11_3);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn disk_of_one_host_is_copied() {
    let sockets = tempfile::tempdir().unwrap();
    let here = LibvirtHost::start("here", LibvirtVersion::V11_3, None);
    let there = LibvirtHost::start("there", LibvirtVersion::V11_3, None);
    let disk = here.create_disk("own.qcow2", 16, ImageFormat::Qcow2);
    there.create_disk("own.qcow2", 16, ImageFormat::Qcow2);
    here.create(&Domain { machine: "pc", ..linux("with-disk").with_disk(disk) });
    here.check_guest("with-disk");
    let disks = format!("unix://{}", sockets.path().join("disks").display());
    let copy = ["--copy-storage-all", "--disks-uri", &disks];
    migrate(&here, &there, "with-disk", sockets.path(), &copy);
    there.check_guest("with-disk");
}

#[test]
fn host_has_its_own_names_files_and_network() {
    let networks = Namespaces::make().unwrap();
    let network = networks.source_path();
    let host = LibvirtHost::start("a-host", LibvirtVersion::V11_3, Some(&network));
    let script = "hostname >/run/name && ip -brief address >/run/addresses";
    assert!(host.command("sh").args(["-c", script]).status().unwrap().success());
    let read = |name: &str| std::fs::read_to_string(host.path_in_run(name)).unwrap();
    assert_eq!(read("name").trim(), "a-host");
    let address = vmferry_net_lab::SOURCE_ADDRESS.to_string();
    assert!(read("addresses").contains(&address), "{}", read("addresses"));
    assert!(!Path::new("/run/addresses").exists());
}

#[test]
fn domain_outlives_the_daemon_and_ends_with_the_host() {
    vmferry_kit::need_kvm();
    let host = LibvirtHost::start("host", LibvirtVersion::V11_3, None);
    host.create(&on_kvm("kept"));
    let qemu = host.qemu_pid("kept").unwrap();
    let first = host.libvirtd_pid();
    host.kill_libvirtd();
    host.check_guest("kept");
    host.start_libvirtd();
    assert_ne!(host.libvirtd_pid(), first);
    host.wait_for_state("kept", Some("running"));
    assert_eq!(host.qemu_pid("kept"), Some(qemu));
    assert_eq!(host.domain_state("absent"), None);
    let mut other = host.command("sleep").arg("1000").spawn().unwrap();
    drop(host);
    // It was killed, and a busy host needs some time to take its memory back. Then it is a zombie
    // until its parent, which is another one, waits for it.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let state = std::fs::read_to_string(format!("/proc/{qemu}/stat")).unwrap_or_default();
        if state.is_empty() || state.contains(") Z ") {
            break;
        }
        assert!(Instant::now() < deadline, "QEMU still runs: {state}");
        std::thread::yield_now();
    }
    assert!(!other.wait().unwrap().success());
}
