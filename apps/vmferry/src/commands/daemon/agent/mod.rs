//! The daemon's agent in its fleet, a process beside the daemon.
//!
//! ```text
//!  daemon, restricted <-- events -- vmferry join-fleet -- TLS --> etcd
//!                                     |  ^
//!  vmferry run, receive, send <-status-  + the witness -- vmferry send, receive
//! ```
//! Only the agent has the host's credentials for etcd. It ends with the daemon.

mod guests;
mod host;
pub mod process;
mod qemus;
mod reports;

use std::io::{self, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};

use parking_lot::Mutex;
use serde_json::Value;

use super::lines;
use crate::exit::Failure;
use crate::output::Output;

/// The daemon's end.
#[derive(Debug)]
pub struct Agent {
    /// Its end tells the agent that the daemon has ended.
    _daemon_lives: Option<ChildStdin>,
    /// The process, until [`listen`](Self::listen).
    unheard: Mutex<Option<Child>>,
}

impl Agent {
    /// Starts the process, and no thread.
    pub fn spawn(config: &Path) -> Result<Self, Failure> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["--json", "join-fleet", "--config"]).arg(std::path::absolute(config)?);
        // A signal for the daemon's process group must not reach it.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn()?;
        Ok(Self { _daemon_lives: child.stdin.take(), unheard: Mutex::new(Some(child)) })
    }

    /// Passes its events on from now on. Calls `ended` when the process has ended, from a thread.
    pub fn listen(
        &self,
        output: &Output,
        ended: impl FnOnce(io::Result<ExitStatus>) + Send + 'static,
    ) -> Result<(), Failure> {
        let Some(mut child) = self.unheard.lock().take() else { return Ok(()) };
        let output = output.clone();
        let listens = move || {
            if let Some(said) = child.stdout.take() {
                let mut reader = BufReader::new(said);
                while let Ok(Some(line)) = lines::read_line(&mut reader) {
                    let Ok(said) = serde_json::from_slice::<Value>(&line) else { continue };
                    output.event(&said, || in_words(&said));
                }
            }
            ended(child.wait());
        };
        std::thread::Builder::new().name("agent".into()).spawn(listens)?;
        Ok(())
    }
}

/// An event of the agent for people.
fn in_words(said: &Value) -> String {
    let message = said["message"].as_str().or(said["error"]["message"].as_str());
    format!("fleet: {}", message.unwrap_or("notice"))
}
