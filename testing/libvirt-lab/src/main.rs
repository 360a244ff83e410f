//! `make demo-libvirt`: moves a guest of libvirt between two hosts of this machine and back. The
//! hosts have real libvirt daemons and network namespaces with a cable between them. The guest has
//! a disk that both hosts see, and one that each host has for itself. Needs root.

#![forbid(unsafe_code)]

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vmferry_libvirt_lab::{Disk, Domain, ImageFormat, LibvirtHost, LibvirtVersion};
use vmferry_net_lab::{DESTINATION_ADDRESS, Namespaces, SOURCE_ADDRESS};

/// The port of the daemons.
const PORT: u16 = 7002;

/// Ends a daemon with the demo.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn main() {
    let vmferry = std::env::var("VMFERRY").expect("VMFERRY names the command");
    let networks = Namespaces::make().expect("network namespaces need root");
    let directory = tempfile::tempdir().expect("there is a directory for temporary files");
    let path = directory.path();
    println!("Two hosts, host-a and host-b, each with libvirt 11.3 and QEMU 10.0 ...");
    let host =
        |name, network: &Path| LibvirtHost::start(name, LibvirtVersion::V11_3, Some(network));
    let a = host("host-a", &networks.source_path());
    let b = host("host-b", &networks.destination_path());

    println!("Certificates, a policy, and a daemon on each host ...");
    let pki = path.join("pki");
    let pki = pki.to_str().expect("the path is text");
    run(Command::new(&vmferry).args(["pki", "init", "--dir", pki]).stdout(Stdio::null()));
    let policy = format!(
        "[[allow]]\nsource = \"spiffe://vmferry/host/host-*\"\nguests = [\"*\"]\n\
         [allow.definition]\ndirectories = [{path:?}]\n"
    );
    std::fs::write(path.join("policy.toml"), policy).expect("the policy can be written");
    let addresses = [(&a, SOURCE_ADDRESS), (&b, DESTINATION_ADDRESS)];
    for (host, address) in addresses {
        let mut issue = Command::new(&vmferry);
        issue.args(["pki", "issue", host.name(), "--dir", pki, "--address", &address.to_string()]);
        run(issue.arg("--out").arg(path.join(host.name())).stdout(Stdio::null()));
    }
    let _daemons = [
        daemon(&vmferry, path, (&a, SOURCE_ADDRESS), (&b, DESTINATION_ADDRESS)),
        daemon(&vmferry, path, (&b, DESTINATION_ADDRESS), (&a, SOURCE_ADDRESS)),
    ];

    println!("A Linux guest with a disk that both hosts see, and one that each has for itself ...");
    let shared = Disk::shared(path, "shared.raw", 16, ImageFormat::Raw);
    let own = a.create_disk("own.qcow2", 16, ImageFormat::Qcow2);
    b.create_disk("own.qcow2", 16, ImageFormat::Qcow2);
    let guest = Domain::linux("web", "static=24 dirty=8 rest=20000");
    a.create(&guest.with_disk(shared).with_disk(own));
    a.check_guest("web");

    for (from, to) in [(&a, &b), (&b, &a)] {
        println!("\n# on {}\n$ vmferry send --libvirt web --to {}", from.name(), to.name());
        let mut send = from.command(&vmferry);
        send.args(["send", "--libvirt", "web", "--to", to.name(), "--unsafe"]);
        // libvirt takes a directory of this machine for storage that hosts do not share.
        send.args(["--copy-storage-all", "--migrate-disks", "vdb"]);
        send.args(["--daemon-config"]).arg(path.join(format!("{}.toml", from.name())));
        run(&mut send);
        let said = to.check_guest("web");
        println!(
            "Guest self-check at {}: {} pages checked, {} corrupt.",
            to.name(),
            said.get("checked"),
            said.get("corruptions")
        );
    }
}

/// Starts the daemon of a host, which knows the other host.
fn daemon(
    vmferry: &str,
    path: &Path,
    (host, address): (&LibvirtHost, Ipv4Addr),
    (peer, at): (&LibvirtHost, Ipv4Addr),
) -> Daemon {
    let (name, peer) = (host.name(), peer.name());
    let config = path.join(format!("{name}.toml"));
    let text = format!(
        "listen = \"{address}:{PORT}\"\ntls = {:?}\npolicy = {:?}\nqemu_user = \"root\"\n\n\
         [[peer]]\nname = {peer:?}\naddress = \"{at}:{PORT}\"\n",
        path.join(name),
        path.join("policy.toml"),
    );
    std::fs::write(&config, text).expect("the configuration can be written");
    let mut command = host.command(vmferry);
    command.args(["--quiet", "daemon", "--config"]).arg(&config).stdout(Stdio::null());
    let daemon = Daemon(command.spawn().expect("the daemon can be started"));
    let socket = host.path(Path::new("/run/vmferry-peers").join(peer).join("libvirt"));
    let deadline = Instant::now() + Duration::from_secs(30);
    while !socket.exists() {
        assert!(Instant::now() < deadline, "the daemon of {name} does not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    daemon
}

/// Runs a command that must succeed.
fn run(command: &mut Command) {
    let status = command.status().expect("the command can be started");
    assert!(status.success(), "{command:?}: {status}");
}
