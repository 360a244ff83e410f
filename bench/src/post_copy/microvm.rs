//! vmferry's post-copy of its own VMM's guest on KVM, by the command.

use std::fs::File;
use std::io::{BufRead, BufReader, Lines};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use serde_json::Value;
use vmferry_net_lab::{DESTINATION_ADDRESS, Namespaces, enter};

use super::observed::Sample;
use super::pair::TIMEOUT;
use super::{DOWNTIME_LIMIT, Plan};
use crate::qemus::Lab;

/// The guest's name.
const NAME: &str = "post-copy";

/// How often the guest's report is read.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// Moves a guest over TLS, and switches it over after the first round.
pub fn measure(lab: &Lab, namespaces: &Namespaces, plan: Plan) -> anyhow::Result<Sample> {
    let (here, there) = (namespaces.source_path(), namespaces.destination_path());
    let command = |host: &str, arguments: &[&str]| {
        let mut command = Command::new(&lab.vmferry);
        command.env("VMFERRY_RUNTIME_DIR", lab.world.path_on_tmpfs(host)).arg("--json");
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
        command
    };
    let tls = lab.tls.display().to_string();
    let memory = format!("{}M", plan.mib);
    let workload = format!("hot={},random", plan.hot_mib);
    let guest = ["run", NAME, "--guest", "kvm", "--memory", &memory, "--workload", &workload];
    let _guest = Running::start(command("here", &guest), &here)?;
    let listen = format!("tls:{DESTINATION_ADDRESS}:0");
    let receive = ["receive", "--once", "--listen", &listen, "--tls", &tls];
    let mut destination = Running::start(command("there", &receive), &there)?;
    let listening = destination.event("listening")?;
    let address = listening["address"].as_str().context("vmferry receive printed no address")?;
    wait_until_written(|| command("here", &["status", NAME]))?;
    let limit = format!("{}ms", DOWNTIME_LIMIT.as_millis());
    let send = ["send", NAME, "--to", address, "--tls", &tls, "--post-copy", "now"];
    let options = ["--compress", "none", "--delta-memory", "0", "--downtime-limit", &limit];
    let mut source = Running::start(command("here", &[&send[..], &options].concat()), &here)?;
    let sent = source.last()?;
    let received = destination.event("received")?;
    Sample::of(&sent, &received["stats"])
}

/// Waits until the guest has rewritten all its pages once.
fn wait_until_written(status: impl Fn() -> Command) -> anyhow::Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let shown = status().stderr(Stdio::null()).output()?;
        let shown: Value = serde_json::from_slice(&shown.stdout).unwrap_or_default();
        if shown["report"]["rounds"].as_u64() > Some(1) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the guest has not started: {shown}");
        // A guest's report causes no event.
        std::thread::sleep(LOOK_PERIOD);
    }
}

/// A `vmferry` process that is killed on drop.
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    /// Starts it in a network namespace, from a thread that enters the namespace.
    fn start(mut command: Command, namespace: &Path) -> anyhow::Result<Self> {
        let spawn = || {
            enter(File::open(namespace)?.as_fd())?;
            Ok::<_, anyhow::Error>(command.spawn()?)
        };
        let spawned = std::thread::scope(|scope| scope.spawn(spawn).join());
        let mut child = spawned.map_err(|_| anyhow!("a thread panicked"))??;
        let lines = BufReader::new(child.stdout.take().context("vmferry has no output")?).lines();
        Ok(Self { child, lines })
    }

    /// Waits for an event.
    fn event(&mut self, name: &str) -> anyhow::Result<Value> {
        loop {
            let line = self.lines.next();
            let line = line.with_context(|| format!("vmferry ended before `{name}`"))??;
            let event: Value = serde_json::from_str(&line)?;
            if event["event"] == name {
                return Ok(event);
            }
        }
    }

    /// Waits until it has ended, and returns its last line.
    fn last(&mut self) -> anyhow::Result<Value> {
        let mut last = String::new();
        for line in &mut self.lines {
            last = line?;
        }
        let status = self.child.wait()?;
        ensure!(status.success(), "vmferry failed: {last}");
        Ok(serde_json::from_str(&last)?)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
