//! What is refused, with its exit status and a message that says what to do.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use vmferry_libvirt_lab::LibvirtVersion;

use crate::hosts::Hosts;
use crate::processes::Host;
use crate::sending::{create_quick, quick, run, send, start_sending};

#[test]
fn wrong_guests_peers_and_options_are_refused() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    hosts.a.libvirt.define_and_start(&quick("off"));
    hosts.a.libvirt.virsh_ok(&["destroy", "off"]);
    send(&hosts, "absent", "host-b", &[]).failed(8, "failed to get domain 'absent'");
    send(&hosts, "off", "host-b", &[]).failed(9, "does not run (libvirt: shut off)");
    create_quick(&hosts, "web");
    send(&hosts, "web", "host-c", &[]).failed(3, "it knows host-b");
    send(&hosts, "web", "host-b:7001", &[]).failed(2, "not an address");
    send(&hosts, "web", "host-b", &["--verify"]).failed(2, "--verify has no effect");
    let hold = ["--pause-before-switchover"];
    send(&hosts, "web", "host-b", &hold).failed(2, "libvirt has no hold");
    let remote = ["--connect", "qemu+ssh://host-b/system"];
    send(&hosts, "web", "host-b", &remote).failed(2, "is not this host's libvirt");
    let nothing = ["--connect", "qemu+unix:///system?socket=/run/nothing"];
    send(&hosts, "web", "host-b", &nothing).failed(15, "start this host's libvirt");
    hosts.a.libvirt.check_guest("web");
}

/// Writes the rule of both hosts' policy.
fn allow(hosts: &Hosts, source: &str, guests: &str) {
    let source = format!("spiffe://vmferry/host/{source}");
    let policy = format!("[[allow]]\nsource = \"{source}\"\nguests = [\"{guests}\"]\n");
    std::fs::write(hosts.directory.path().join("policy.toml"), policy).unwrap();
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn policy_of_the_destination_is_obeyed() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    create_quick(&hosts, "web");
    allow(&hosts, "host-a", "db-*");
    let refused = send(&hosts, "web", "host-b", &[]);
    refused.failed(4, "the policy allows it other guests only");
    refused.failed(4, "The guest runs on this host");
    // libvirt sees only that its connection ends, and the daemon knows why.
    allow(&hosts, "host-c", "*");
    let refused = send(&hosts, "web", "host-b", &[]);
    refused.failed(4, "may not send guests here");
    refused.failed(4, "The guest runs on this host");
    hosts.a.libvirt.check_guest("web");
}

/// libvirt says only `End of file while reading data`.
#[test]
fn unreachable_peer_is_named_with_the_reason() {
    let mut hosts = Hosts::with(LibvirtVersion::V11_3, "reconnect_timeout = \"1s\"");
    create_quick(&hosts, "web");
    hosts.b.daemon = None;
    let unreachable = send(&hosts, "web", "host-b", &[]);
    let address = hosts.b.cable.address;
    unreachable
        .failed(3, &format!("the daemon of host-b at {address} can't be reached: no link to"));
    unreachable.failed(3, "The guest runs on this host");
    hosts.a.libvirt.check_guest("web");
}

#[test]
fn daemon_that_does_not_run_is_reported() {
    let mut hosts = Hosts::start(LibvirtVersion::V9_0);
    create_quick(&hosts, "web");
    // A killed daemon leaves its sockets.
    hosts.a.daemon = None;
    send(&hosts, "web", "host-b", &[]).failed(3, "`vmferry daemon` does not run on this host");
    let sockets = hosts.a.libvirt.path("/run/vmferry");
    std::fs::remove_dir_all(sockets).unwrap();
    send(&hosts, "web", "host-b", &[]).failed(3, "`vmferry daemon` does not run on this host");
    hosts.a.libvirt.check_guest("web");
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn second_migration_of_a_guest_is_refused() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    create_quick(&hosts, "web");
    let mut first = start_sending(&hosts, "web", "host-b", &["--max-bandwidth", "1MiB/s"]);
    first.event("round-started");
    send(&hosts, "web", "host-b", &[]).failed(7, "another job for the guest web");
    run(&hosts, &hosts.a, &["cancel", "web"]).exited(0);
    first.finish().failed(11, "cancelled");
}

#[test]
fn monitor_of_libvirt_is_recognized_at_once() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    create_quick(&hosts, "web");
    let socket = "/var/lib/libvirt/qemu/domain-1-web/monitor.sock";
    let begun = Instant::now();
    let ended = run(&hosts, &hosts.a, &["send", "--qemu", socket, "--to", "host-b:7001"]);
    ended.failed(7, "vmferry send --libvirt web --to host-b`");
    // The wait for a QMP socket that is in use takes 30 s.
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[test]
fn missing_virsh_is_reported() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmferry"));
    command.args(["--json", "send", "--libvirt", "web", "--to", "host-b"]);
    command.env("PATH", "/nonexistent").stdin(Stdio::null()).stdout(Stdio::piped());
    Host::spawn(command).finish().failed(1, "libvirt-clients");
}
