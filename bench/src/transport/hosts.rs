//! The benchmark's other processes, which run this program again.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::Role;
use super::orders::{Order, Reply};

/// Timeout for any order.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Interval between checks for a signal.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Whether a signal asked the benchmark to end. The next wait then returns an error, and the
/// benchmark cleans up on the way out. A second signal ends it at once.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Installs the signal handlers.
    ///
    /// # Errors
    /// The system call failed.
    pub fn listen() -> anyhow::Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&flag))?;
            signal_hook::flag::register(signal, Arc::clone(&flag))?;
        }
        Ok(Self(flag))
    }
}

/// A process of the benchmark. It is killed on drop.
pub struct Process {
    role: Role,
    child: Child,
    orders: ChildStdin,
    replies: Receiver<std::io::Result<String>>,
    interrupt: Interrupt,
}

impl Process {
    /// Starts the process.
    ///
    /// # Errors
    /// The system call failed.
    pub fn start(role: Role, directory: &Path, interrupt: &Interrupt) -> anyhow::Result<Self> {
        let name = role.to_possible_value().context("the role has no name")?;
        let program = std::env::current_exe().context("the path of this program is unknown")?;
        let mut child = Command::new(program)
            .args(["transport", "--role", name.get_name(), "--directory"])
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("could not start another process of this benchmark")?;
        let orders = child.stdin.take().context("the process has no standard input")?;
        let answers = child.stdout.take().context("the process has no standard output")?;
        let (sender, replies) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(answers).lines() {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { role, child, orders, replies, interrupt: interrupt.clone() })
    }

    /// Sends an order without waiting for the reply.
    ///
    /// # Errors
    /// The process has ended.
    pub fn order(&mut self, order: &Order) -> anyhow::Result<()> {
        let mut line = serde_json::to_string(order)?;
        line.push('\n');
        self.orders
            .write_all(line.as_bytes())
            .with_context(|| format!("the {} has ended", self.role))
    }

    /// Waits for the next reply.
    ///
    /// # Errors
    /// The order failed, the process ended or did not reply in time, or a signal arrived.
    pub fn reply(&mut self) -> anyhow::Result<Reply> {
        self.reply_within(TIMEOUT)
    }

    /// Returns the process's own error, if it failed too. Both sides' errors together explain a
    /// lost connection better than one.
    pub fn complaint(&mut self) -> Option<String> {
        match self.reply_within(Duration::from_secs(2)) {
            Err(error) if !self.interrupt.0.load(Ordering::Relaxed) => Some(format!("{error:#}")),
            _ => None,
        }
    }

    fn reply_within(&mut self, timeout: Duration) -> anyhow::Result<Reply> {
        let begun = Instant::now();
        loop {
            ensure!(!self.interrupt.0.load(Ordering::Relaxed), "interrupted");
            match self.replies.recv_timeout(CHECK_INTERVAL) {
                Ok(line) => {
                    return match serde_json::from_str(&line?)? {
                        Reply::Failed(error) => bail!("the {} failed: {error}", self.role),
                        reply => Ok(reply),
                    };
                }
                Err(RecvTimeoutError::Disconnected) => bail!("the {} has ended", self.role),
                Err(RecvTimeoutError::Timeout) => {
                    let seconds = timeout.as_secs();
                    ensure!(
                        begun.elapsed() < timeout,
                        "the {} did not reply within {seconds} s",
                        self.role
                    );
                }
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
