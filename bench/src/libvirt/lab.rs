//! Two libvirt hosts in two network namespaces, with everything that forwards streams between them.

use std::fs::File;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tempfile::TempDir;
use vmferry_libvirt_lab::{LibvirtHost, LibvirtVersion};
use vmferry_net_lab::{DESTINATION_ADDRESS, Namespaces, SOURCE_ADDRESS};

/// The port of `vmferry daemon`.
const DAEMON_PORT: u16 = 7002;

/// The ports of the `socat` that forwards to libvirt, and of the one that forwards to QEMU.
const SOCAT_PORTS: [u16; 2] = [7101, 7102];

/// The directory of the sockets of `socat` on each host; it has one directory per destination.
pub const FORWARDED: &str = "/run/forwarded";

/// The directory of the sockets of `vmferry daemon` on each host, as above.
pub const PEERS: &str = "/run/vmferry-peers";

/// Files of libvirt's TLS, by the names of vmferry's.
const TLS_FILES: [(&str, &str); 5] = [
    ("ca.pem", "ca-cert.pem"),
    ("host.pem", "server-cert.pem"),
    ("host.key", "server-key.pem"),
    ("host.pem", "client-cert.pem"),
    ("host.key", "client-key.pem"),
];

/// The hosts and the cable between them.
pub struct Lab {
    pub hosts: [Host; 2],
    pub networks: Namespaces,
    directory: TempDir,
}

/// A host with libvirt, the daemon and `socat`.
pub struct Host {
    pub libvirt: LibvirtHost,
    pub address: Ipv4Addr,
    /// `vmferry daemon`, then the four `socat`. They end with the host.
    services: Vec<Child>,
}

impl Lab {
    /// Starts the hosts.
    pub fn new() -> anyhow::Result<Self> {
        let program = std::env::current_exe()?;
        let vmferry =
            program.parent().context("this program's directory is unknown")?.join("vmferry");
        ensure!(
            vmferry.exists(),
            "the `vmferry` command is not next to this program; build it with `make bench`"
        );
        let networks = Namespaces::make().context("network namespaces are needed: run as root")?;
        let directory = tempfile::tempdir()?;
        let path = directory.path();
        let pki = path.join("pki").display().to_string();
        run(Command::new(&vmferry).args(["pki", "init", "--dir", &pki]))?;
        // The guest's beats come out at a socket of its second serial device.
        let policy = "[[allow]]\nsource = \"spiffe://vmferry/host/host-*\"\nguests = [\"*\"]\n\
                      [allow.definition]\ndirectories = [\"/run\"]\n";
        std::fs::write(path.join("policy.toml"), policy)?;
        let host = |name: &str, address: Ipv4Addr, network: PathBuf| -> anyhow::Result<Host> {
            let tls = path.join(name).display().to_string();
            let issue = ["pki", "issue", name, "--dir", &pki, "--out", &tls, "--address"];
            run(Command::new(&vmferry).args(issue).arg(address.to_string()))?;
            let libvirt = LibvirtHost::start(name, LibvirtVersion::V11_3, Some(&network));
            let qemus = libvirt.path("/etc/pki/qemu");
            std::fs::create_dir_all(&qemus)?;
            for (ours, theirs) in TLS_FILES {
                std::fs::copy(path.join(name).join(ours), qemus.join(theirs))?;
            }
            // libvirt looks for the certificates when it starts.
            libvirt.kill_libvirtd();
            libvirt.start_libvirtd();
            Ok(Host { libvirt, address, services: Vec::new() })
        };
        let mut hosts = [
            host("host-a", SOURCE_ADDRESS, networks.source_path())?,
            host("host-b", DESTINATION_ADDRESS, networks.destination_path())?,
        ];
        let places = [0, 1].map(|host: usize| hosts[host].place());
        for (host, other) in [(0, 1), (1, 0)] {
            let text = configuration(path, &places[host], &places[other]);
            let host = &mut hosts[host];
            let config = path.join(format!("{}.toml", host.libvirt.name()));
            std::fs::write(&config, text)?;
            host.start_daemon(&vmferry, &config)?;
            host.start_socats(&places[other])?;
        }
        Ok(Self { hosts, networks, directory })
    }

    /// Certificates of the destination, with the names of vmferry's files.
    pub fn destination_tls(&self) -> PathBuf {
        self.directory.path().join("host-b")
    }

    /// The last lines that the daemons have printed.
    pub fn daemons_said(&self) -> String {
        let said = self.hosts.iter().map(|host| {
            let path = self.directory.path().join(host.libvirt.name()).with_extension("log");
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(5)..].join("\n")
        });
        said.collect::<Vec<_>>().join("\n")
    }
}

/// A host's name and address.
struct Place {
    name: String,
    address: Ipv4Addr,
}

/// The daemon's configuration.
fn configuration(directory: &Path, host: &Place, peer: &Place) -> String {
    format!(
        "listen = \"{}:{DAEMON_PORT}\"\ntls = {:?}\npolicy = {:?}\nqemu_user = \"root\"\n\
         [[peer]]\nname = {:?}\naddress = \"{}:{DAEMON_PORT}\"\n\
         id = \"spiffe://vmferry/host/{}\"\n",
        host.address,
        directory.join(&host.name),
        directory.join("policy.toml"),
        peer.name,
        peer.address,
        peer.name
    )
}

impl Host {
    fn place(&self) -> Place {
        Place { name: self.libvirt.name().to_owned(), address: self.address }
    }

    /// The processes that live as long as the host: libvirtd, the daemon with the processes beside
    /// it, and `socat`.
    pub fn services(&self) -> Vec<u32> {
        let mut services = vec![self.libvirt.libvirtd_pid()];
        for service in self.services.iter().map(Child::id) {
            services.push(service);
            // A process that has ended has no children.
            let path = format!("/proc/{service}/task/{service}/children");
            let children = std::fs::read_to_string(path).unwrap_or_default();
            services.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        services
    }

    fn start_daemon(&mut self, vmferry: &Path, config: &Path) -> anyhow::Result<()> {
        let log = config.with_extension("log");
        let mut command = self.libvirt.command(vmferry);
        command.args(["--json", "daemon", "--config"]).arg(config);
        self.start(command, &log)?;
        let deadline = Instant::now() + Duration::from_secs(30);
        while !std::fs::read_to_string(&log)?.contains("listening") {
            ensure!(Instant::now() < deadline, "vmferry daemon does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Starts the forwarders to and from the other host. Each connection has one of TCP.
    fn start_socats(&mut self, other: &Place) -> anyhow::Result<()> {
        let packages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/libvirt/socat/usr");
        let packages = packages.canonicalize().context("run scripts/setup-libvirt for socat")?;
        let (here, there) = (self.place(), Path::new(FORWARDED).join(&other.name));
        let into = Path::new(FORWARDED).join(&here.name);
        for directory in [&there, &into] {
            std::fs::create_dir_all(self.libvirt.path(directory))?;
        }
        let libvirt = PathBuf::from("/run/libvirt/libvirt-sock");
        let sockets = [("libvirt", libvirt), ("memory", into.join("memory"))];
        for ((name, socket), port) in sockets.into_iter().zip(SOCAT_PORTS) {
            let out = [
                format!("UNIX-LISTEN:{},fork,unlink-early", there.join(name).display()),
                format!("TCP:{}:{port},nodelay", other.address),
            ];
            let back = [
                format!("TCP-LISTEN:{port},bind={},fork,reuseaddr,nodelay", here.address),
                format!("UNIX-CONNECT:{}", socket.display()),
            ];
            for ends in [out, back] {
                let mut command = self.libvirt.command("env");
                let libraries = packages.join("lib/x86_64-linux-gnu");
                command.arg(format!("LD_LIBRARY_PATH={}", libraries.display()));
                // Buffers of 128 KiB are twice as fast as the default of 8 KiB.
                command.arg(packages.join("bin/socat")).args(["-b", "131072"]).args(ends);
                self.start(command, Path::new("/dev/null"))?;
            }
        }
        Ok(())
    }

    fn start(&mut self, mut command: Command, log: &Path) -> anyhow::Result<()> {
        let log = File::create(log)?;
        let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()?;
        self.services.push(child);
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for service in &mut self.services {
            // It may have ended already.
            let _ = service.kill();
            let _ = service.wait();
        }
    }
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let done = command.output()?;
    let problem = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{command:?} failed: {problem}");
    Ok(())
}
