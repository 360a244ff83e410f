//! Two hosts with libvirt and `vmferry daemon`, and a cable between them for each direction.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use vmferry_kit::Cable;
use vmferry_libvirt_lab::{Domain, LibvirtHost, LibvirtVersion, QemuUser};

/// No wait of a test is longer.
pub const LIMIT: Duration = Duration::from_secs(180);

/// A host with its daemon.
pub struct Host {
    pub libvirt: LibvirtHost,
    pub daemon: Option<Daemon>,
    config: PathBuf,
    /// What other hosts' links come through.
    pub cable: Cable,
}

/// A running daemon. Dropping it kills it.
pub struct Daemon {
    child: Child,
    heard: Arc<Heard>,
}

#[derive(Default)]
struct Heard {
    events: Mutex<Vec<Value>>,
    more: Condvar,
}

/// What hosts are like.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'a> {
    /// The version of libvirt.
    pub version: LibvirtVersion,
    /// Further lines in the configuration of both daemons, before the peers.
    pub config: &'a str,
    /// The user that libvirt runs QEMU as.
    pub qemu_user: QemuUser,
}

/// Two hosts, `host-a` and `host-b`.
pub struct Hosts {
    pub a: Host,
    pub b: Host,
    pub directory: TempDir,
}

impl Hosts {
    pub fn start(version: LibvirtVersion) -> Self {
        Self::with(version, "")
    }

    /// Both daemons' configuration has these further lines before the peers.
    pub fn with(version: LibvirtVersion, config: &str) -> Self {
        Self::set_up(Setup { version, config, qemu_user: QemuUser::Root })
    }

    pub fn set_up(Setup { version, config: more, qemu_user }: Setup<'_>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let pki = path.join("pki");
        vmferry(&["pki", "init", "--dir", pki.to_str().unwrap()]);
        let mut policy = format!(
            "[[allow]]\nsource = \"spiffe://vmferry/host/host-*\"\nguests = [\"*\"]\n\
             [allow.definition]\ndirectories = [{path:?}]\n"
        );
        if version == LibvirtVersion::V9_0 {
            // Linux has an odd amount of memory there, which only QEMU's options can give it.
            policy.push_str("permit = [\"/domain/qemu:commandline\"]\n");
        }
        std::fs::write(path.join("policy.toml"), policy).unwrap();
        let host = |name: &str| {
            let (tls, pki) = (path.join(name), pki.to_str().unwrap());
            let out = tls.to_str().unwrap();
            vmferry(&["pki", "issue", name, "--dir", pki, "--out", out, "--address", "127.0.0.1"]);
            Host {
                libvirt: LibvirtHost::start_with(name, version, None, qemu_user),
                daemon: None,
                config: path.join(format!("{name}.toml")),
                cable: Cable::new(),
            }
        };
        let (mut a, mut b) = (host("host-a"), host("host-b"));
        let write = |host: &Host, other: &Host| {
            let (name, peer) = (host.libvirt.name(), other.libvirt.name());
            let (port, user) = (other.cable.address.port(), qemu_user.name());
            let text = format!(
                "listen = \"127.0.0.1:0\"\ntls = {:?}\npolicy = {:?}\nqemu_user = {user:?}\n{more}\n\
                 [[peer]]\nname = {peer:?}\naddress = \"127.0.0.1:{port}\"\n\
                 id = \"spiffe://vmferry/host/{peer}\"\n",
                path.join(name),
                path.join("policy.toml"),
            );
            std::fs::write(&host.config, text).unwrap();
        };
        write(&a, &b);
        write(&b, &a);
        a.start_daemon();
        b.start_daemon();
        Self { a, b, directory }
    }
}

impl Host {
    pub fn start_daemon(&mut self) {
        let mut command = self.libvirt.command(env!("CARGO_BIN_EXE_vmferry"));
        command.args(["--json", "daemon", "--config"]).arg(&self.config);
        let daemon = Daemon::start(command);
        let listening = daemon.wait_for("listens", |event| event["event"] == "listening");
        assert_eq!(listening["sandbox"]["seccomp"], true, "{listening}");
        let address = listening["address"].as_str().unwrap().strip_prefix("tls:").unwrap();
        self.cable.lead_to(address.parse::<SocketAddr>().unwrap());
        self.daemon = Some(daemon);
    }

    /// Kills the helper of the daemon, which ends with an error then.
    pub fn end_daemon_by_its_helper(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        let pid = Pid::from_raw(daemon.child.id().cast_signed()).unwrap();
        let helper = child_of(pid, "help-daemon").unwrap();
        kill_process(helper, Signal::KILL).unwrap();
        daemon.wait_for("says why it ends", |event| {
            event["error"]["message"].as_str().is_some_and(|said| said.contains("helper"))
        });
        assert_eq!(daemon.child.wait().unwrap().code(), Some(1));
    }

    /// Runs `vmferry` on this host.
    pub fn vmferry(&self, arguments: &[&str]) -> Output {
        let mut command = self.libvirt.command(env!("CARGO_BIN_EXE_vmferry"));
        command.args(arguments).output().unwrap()
    }

    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().unwrap()
    }

    /// `virsh migrate` of a guest to a peer, through the daemon, with further arguments.
    pub fn migrate_command(&self, guest: &str, peer: &str, more: &[&str]) -> Command {
        self.migrate_over(&format!("{guest}.mig"), guest, peer, more)
    }

    /// The same with the name of the memory's socket.
    pub fn migrate_over(&self, socket: &str, guest: &str, peer: &str, more: &[&str]) -> Command {
        let sockets = Path::new("/run/vmferry-peers").join(peer);
        let uri = format!("qemu+unix:///system?socket={}", sockets.join("libvirt").display());
        let memory = format!("unix://{}", sockets.join(socket).display());
        let usual = ["migrate", "--p2p", "--domain", guest, "--desturi", &uri];
        // Of a guest that is off, only the definition moves.
        let live = ["--live", "--migrateuri", &memory];
        let of_guest = if more.contains(&"--offline") { &[][..] } else { &live };
        let all = [&usual[..], of_guest, more].concat();
        let mut command = self.libvirt.virsh_command(&all);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// The same, run to its end.
    pub fn migrate(&self, guest: &str, peer: &str, more: &[&str]) -> Output {
        self.migrate_command(guest, peer, more).output().unwrap()
    }
}

impl Daemon {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
        let heard = Arc::new(Heard::default());
        let (of_thread, out) = (Arc::clone(&heard), child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines() {
                let Ok(line) = line else { return };
                let event = serde_json::from_str(&line).unwrap_or_else(|_| Value::from(line));
                of_thread.events.lock().push(event);
                of_thread.more.notify_all();
            }
        });
        Self { child, heard }
    }

    /// Waits for an event.
    pub fn wait_for(&self, what: &str, is_it: impl Fn(&Value) -> bool) -> Value {
        self.wait_for_more(0, what, is_it)
    }

    /// Waits for an event after this number of events like it.
    pub fn wait_for_more(
        &self,
        before: usize,
        what: &str,
        is_it: impl Fn(&Value) -> bool,
    ) -> Value {
        let deadline = Instant::now() + LIMIT;
        let mut events = self.heard.events.lock();
        loop {
            if let Some(event) = events.iter().filter(|event| is_it(event)).nth(before) {
                return event.clone();
            }
            let waited = self.heard.more.wait_until(&mut events, deadline);
            assert!(!waited.timed_out(), "the daemon never {what}: {events:#?}");
        }
    }

    /// The events so far.
    pub fn events(&self) -> Vec<Value> {
        self.heard.events.lock().clone()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running child of a process, by a word in its command line.
pub fn child_of(parent: Pid, word: &str) -> Option<Pid> {
    let parent = parent.as_raw_nonzero().get().to_string();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.into_iter().find_map(|process| {
        let pid = process.file_name().to_str()?.parse().ok()?;
        let command = std::fs::read(process.path().join("cmdline")).ok()?;
        let stat = std::fs::read_to_string(process.path().join("stat")).ok()?;
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let (state, its_parent) = (fields.next()?, fields.next()?);
        let is_it = String::from_utf8_lossy(&command).contains(word);
        (is_it && state != "Z" && its_parent == parent).then(|| Pid::from_raw(pid)).flatten()
    })
}

/// Runs `vmferry` on this machine.
fn vmferry(arguments: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
}

/// Fails with what `virsh` and both daemons said if it failed.
pub fn must_succeed(hosts: &Hosts, output: &Output) {
    if output.status.success() {
        return;
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let (a, b) = (hosts.a.daemon().events(), hosts.b.daemon().events());
    panic!("virsh: {said}\nhost-a: {a:#?}\nhost-b: {b:#?}");
}

/// A Linux guest that leaves the processor to other tests most of the time.
pub fn linux(name: &str) -> Domain {
    Domain::linux(name, "static=24 dirty=8 rest=20000")
}
