//! Commands on a host.

use vmferry_libvirt_lab::Domain;

use crate::hosts::{Host, Hosts};
use crate::processes::{self, Ended, Running};

/// Starts `vmferry --json` with arguments on a host. Its control sockets are in a directory of the
/// host.
pub fn start(hosts: &Hosts, host: &Host, arguments: &[&str]) -> Running {
    let mut command = host.libvirt.command(env!("CARGO_BIN_EXE_vmferry"));
    command.arg("--json").args(arguments);
    let directory = hosts.directory.path().join(format!("{}-sockets", host.libvirt.name()));
    command.env("VMFERRY_RUNTIME_DIR", directory).env_remove("VMFERRY_STATE_DIR");
    command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped());
    processes::Host::spawn(command)
}

/// Runs it to its end.
pub fn run(hosts: &Hosts, host: &Host, arguments: &[&str]) -> Ended {
    start(hosts, host, arguments).finish()
}

/// Starts to send a guest from `host-a` to a peer.
pub fn start_sending(hosts: &Hosts, guest: &str, peer: &str, more: &[&str]) -> Running {
    let file = hosts.directory.path().join("host-a.toml");
    let file = file.to_str().unwrap();
    let usual = ["send", "--libvirt", guest, "--to", peer, "--daemon-config", file];
    start(hosts, &hosts.a, &[&usual[..], more].concat())
}

/// Sends a guest from `host-a` to a peer.
pub fn send(hosts: &Hosts, guest: &str, peer: &str, more: &[&str]) -> Ended {
    start_sending(hosts, guest, peer, more).finish()
}

/// A guest on KVM, which boots in a second.
pub fn quick(name: &str) -> Domain {
    vmferry_kit::need_kvm();
    Domain::on_kvm(name, "hot=8,rate=4000")
}

/// Starts a transient guest on KVM on `host-a`, and waits until it has written its memory.
pub fn create_quick(hosts: &Hosts, name: &str) {
    hosts.a.libvirt.create(&quick(name));
    hosts.a.libvirt.check_guest(name);
}
