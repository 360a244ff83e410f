//! Processes of the `vmferry` command in network namespaces.

use std::fs::File;
use std::io::{BufRead, BufReader, Lines};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, anyhow, ensure};
use serde_json::Value;
use vmferry_net_lab::enter;

use crate::qemus::Lab;

/// The command with these arguments, on a host with its own journals and control sockets.
pub fn command(lab: &Lab, host: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(&lab.vmferry);
    command.env("VMFERRY_RUNTIME_DIR", lab.world.path_on_tmpfs(host)).arg("--json");
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// A `vmferry` process that is killed on drop.
pub struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    /// Starts it in a network namespace, from a thread that enters the namespace.
    pub fn start(mut command: Command, namespace: &Path) -> anyhow::Result<Self> {
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
    pub fn event(&mut self, name: &str) -> anyhow::Result<Value> {
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
    pub fn last(&mut self) -> anyhow::Result<Value> {
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
