//! A host of the fleet: directories of its own, a `vmferry daemon` with its agent, and QEMUs.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use crossbeam_channel::{Receiver, unbounded};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vmferry_etcd_lab::EtcdCluster;
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Machine, World};

use crate::qemus::{Lab, process_tree_cpu_s};

/// Timeout for any single operation.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// The name that certificates give a host.
fn identity(host: &str) -> String {
    format!("spiffe://vmferry/host/{host}")
}

/// A host. Its daemon and all guests that have arrived are ended on drop.
pub struct Host {
    /// Its name in the fleet.
    pub name: &'static str,
    /// The address of its daemon.
    pub address: SocketAddr,
    /// Its certificate.
    pub tls: PathBuf,
    /// The QEMUs that were started here.
    pub qemus: World,
    /// Control sockets, on a tmpfs as `/run` is.
    runtime: PathBuf,
    /// Journals, on a disk as `/var/lib` is.
    state: PathBuf,
    vmferry: PathBuf,
    daemon: Child,
    events: Receiver<Value>,
}

impl Host {
    /// Starts a daemon that receives guests like `machine`, and waits until it has joined.
    pub fn start(
        lab: &Lab,
        etcd: &EtcdCluster,
        name: &'static str,
        machine: &Machine,
    ) -> anyhow::Result<Self> {
        let (qemus, tls) = (World::new(), lab.world.path(&format!("tls-{name}")));
        lab.issue(name, &tls, &[Ipv4Addr::LOCALHOST])?;
        // The daemon's configuration names the port that other hosts use, so it must be known.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let config = lab.world.path(&format!("{name}.toml"));
        std::fs::write(&config, configuration(lab, etcd, name, address, &tls, &qemus, machine)?)?;
        let runtime = lab.world.path_on_tmpfs(&format!("host-{name}"));
        let state = lab.world.path(&format!("state-{name}"));
        let mut command = command(&lab.vmferry, &runtime, &state);
        command.args(["daemon", "--config"]).arg(&config);
        let mut daemon = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let said = BufReader::new(daemon.stdout.take().context("the daemon has no output")?);
        let (sender, events) = unbounded();
        std::thread::Builder::new().name(format!("daemon {name}")).spawn(move || {
            for line in said.lines().map_while(Result::ok) {
                let event = serde_json::from_str(&line).unwrap_or_default();
                if sender.send(event).is_err() {
                    return;
                }
            }
        })?;
        let vmferry = lab.vmferry.clone();
        let host = Self { name, address, tls, qemus, runtime, state, vmferry, daemon, events };
        // It listens before its agent joins, or after that.
        let mut missing = vec!["listening", "fleet-joined"];
        while !missing.is_empty() {
            let event = host.event(|event| missing.iter().any(|name| event["event"] == *name))?;
            missing.retain(|name| event["event"] != *name);
        }
        Ok(host)
    }

    /// A `vmferry --json` command on this host.
    pub fn command(&self) -> Command {
        command(&self.vmferry, &self.runtime, &self.state)
    }

    /// The socket of its witness.
    pub fn witness(&self) -> PathBuf {
        self.runtime.join("witness")
    }

    /// The directory with the output of the processes by which its agent sends guests.
    pub fn moves(&self) -> PathBuf {
        self.state.join("moves")
    }

    /// Waits for an event of the daemon or its agent. Earlier ones are dropped.
    pub fn event(&self, wanted: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let event = self.events.recv_deadline(deadline);
            let event = event.with_context(|| format!("the daemon of {} says nothing", self.name));
            match event? {
                event if wanted(&event) => return Ok(event),
                event if event["event"] == "fleet-absent" => bail!("{event}"),
                _ => {}
            }
        }
    }

    /// The agent's process.
    pub fn agent(&self) -> anyhow::Result<u32> {
        let pid = self.daemon.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        let is_agent = |pid: &&str| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).any(|word| word == b"join-fleet")
        };
        let agent = children.split_whitespace().find(is_agent).context("no agent runs")?;
        Ok(agent.parse()?)
    }

    /// CPU time of the daemon, its agent, and their processes that have ended, in seconds.
    pub fn cpu_s(&self) -> anyhow::Result<f64> {
        Ok(process_tree_cpu_s(self.daemon.id())? + process_tree_cpu_s(self.agent()?)?)
    }

    /// Ends the QEMUs of guests that have arrived here by the template.
    fn end_arrived(&self) {
        for entry in std::fs::read_dir(&self.runtime).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|ending| ending != "qmp") {
                continue;
            }
            // A socket without a QEMU is left by one that has ended.
            let pid = Qmp::connect(&path).ok().and_then(|qmp| qmp.pid());
            let Some(pid) = pid.and_then(|pid| Pid::from_raw(pid.cast_signed())) else { continue };
            let program = std::fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero()));
            if program.is_ok_and(|path| path.ends_with("qemu-system-x86_64")) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.end_arrived();
        // The daemon may have ended already. Its agent ends with it.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

fn command(vmferry: &Path, runtime: &Path, state: &Path) -> Command {
    let mut command = Command::new(vmferry);
    command.env("VMFERRY_RUNTIME_DIR", runtime).env("VMFERRY_STATE_DIR", state).arg("--json");
    command
}

/// The table `[fleet]` that all hosts and commands have.
pub fn table(etcd: &EtcdCluster) -> String {
    format!(
        "[fleet]\netcd = {:?}\ntls = {:?}\nprefix = \"/vmferry\"\n",
        etcd.endpoints(),
        etcd.client("host")
    )
}

/// The daemon's configuration. The policy allows what the fleet does not order.
fn configuration(
    lab: &Lab,
    etcd: &EtcdCluster,
    name: &str,
    address: SocketAddr,
    tls: &Path,
    qemus: &World,
    machine: &Machine,
) -> anyhow::Result<String> {
    let policy = lab.world.path(&format!("policy-{name}.toml"));
    let allow = ["a", "b"]
        .map(identity)
        .map(|source| format!("[[allow]]\nsource = {source:?}\nguests = [\"*\"]\n"));
    std::fs::write(&policy, allow.concat())?;
    Ok(format!(
        "listen = \"{address}\"\ntls = {tls:?}\npolicy = {policy:?}\ndirectory = {:?}\n\
         qemu_user = \"root\"\n{}host = \"{name}\"\naddress = \"{address}\"\nqemu = [{:?}]\n\
         [[receive]]\nname = \"default\"\nexec = '''{}'''\n",
        lab.world.path(&format!("peers-{name}")),
        table(etcd),
        qemus.directory.path(),
        machine.template(qemus, "arrived-$VMFERRY_GUEST-$$"),
    ))
}
