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
pub mod mover;
mod parent;
pub mod process;
mod qemus;
mod reports;

use std::io::{self, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;

use self::mover::{ADMITS, Admitted};
use super::lines;
use crate::exit::Failure;
use crate::output::Output;

/// The daemon's end.
#[derive(Debug)]
pub struct Agent {
    /// The process, until [`listen`](Self::listen). The end of its standard input tells it that the
    /// daemon has ended.
    unheard: Mutex<Option<Child>>,
}

impl Agent {
    /// Starts the process, and no thread.
    pub fn spawn(config: &Path) -> Result<Self, Failure> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["--json", "join-fleet", "--config"]).arg(std::path::absolute(config)?);
        // A signal for the daemon's process group must not reach it.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        Ok(Self { unheard: Mutex::new(Some(command.spawn()?)) })
    }

    /// Passes its events on from now on. Calls `ended` when the process has ended, from a thread.
    pub fn listen(
        &self,
        output: &Output,
        admitted: Arc<Admitted>,
        ended: impl FnOnce(io::Result<ExitStatus>) + Send + 'static,
    ) -> Result<(), Failure> {
        let Some(mut child) = self.unheard.lock().take() else { return Ok(()) };
        let output = output.clone();
        let mut to_agent = child.stdin.take();
        let listens = move || {
            if let Some(said) = child.stdout.take() {
                let mut reader = BufReader::new(said);
                while let Ok(Some(line)) = lines::read_line(&mut reader) {
                    let Ok(mut said) = serde_json::from_slice::<Value>(&line) else { continue };
                    if said["event"] == ADMITS {
                        // What can't be read admits nobody.
                        let guests = serde_json::from_value(said["guests"].take());
                        admitted.set(guests.unwrap_or_default());
                        if let Some(to_agent) = &mut to_agent {
                            // An agent that does not read has ended.
                            let _ = writeln!(to_agent, "{}", said["number"]);
                        }
                        continue;
                    }
                    output.event(&said, || in_words(&said));
                }
            }
            drop(to_agent);
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
