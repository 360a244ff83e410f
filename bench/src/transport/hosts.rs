//! The benchmark's other processes, which are this program once more.

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

/// For any order.
const PATIENCE: Duration = Duration::from_secs(300);

/// So often it is looked whether the user has had enough.
const LOOK: Duration = Duration::from_millis(100);

/// Whether the user wants the benchmark to end: then the next wait is an error, and everything is cleaned up
/// on the way out. A second signal ends it at once.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens for the signals.
    ///
    /// # Errors
    /// The system's.
    pub fn listen() -> anyhow::Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&flag))?;
            signal_hook::flag::register(signal, Arc::clone(&flag))?;
        }
        Ok(Self(flag))
    }
}

/// A process of the benchmark; ended when dropped.
pub struct Process {
    role: Role,
    child: Child,
    orders: ChildStdin,
    replies: Receiver<std::io::Result<String>>,
    interrupt: Interrupt,
}

impl Process {
    /// Starts it.
    ///
    /// # Errors
    /// The system's.
    pub fn start(role: Role, directory: &Path, interrupt: &Interrupt) -> anyhow::Result<Self> {
        let name = role.to_possible_value().context("every role has a name")?;
        let program = std::env::current_exe().context("this program is not known")?;
        let mut child = Command::new(program)
            .args(["transport", "--role", name.get_name(), "--directory"])
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("the benchmark can't start itself again")?;
        let orders = child.stdin.take().context("it has a standard input")?;
        let answers = child.stdout.take().context("it has a standard output")?;
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

    /// Orders something, without waiting for it.
    ///
    /// # Errors
    /// A process that has ended.
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
    /// That it could not do it, has ended, takes too long, or the user has had enough.
    pub fn reply(&mut self) -> anyhow::Result<Reply> {
        self.reply_within(PATIENCE)
    }

    /// Whether it has failed too: what one side says of a lost link explains little, both together more.
    pub fn complaint(&mut self) -> Option<String> {
        match self.reply_within(Duration::from_secs(2)) {
            Err(error) if !self.interrupt.0.load(Ordering::Relaxed) => Some(format!("{error:#}")),
            _ => None,
        }
    }

    fn reply_within(&mut self, patience: Duration) -> anyhow::Result<Reply> {
        let begun = Instant::now();
        loop {
            ensure!(!self.interrupt.0.load(Ordering::Relaxed), "interrupted");
            match self.replies.recv_timeout(LOOK) {
                Ok(line) => {
                    return match serde_json::from_str(&line?)? {
                        Reply::Failed(error) => bail!("the {} says: {error}", self.role),
                        reply => Ok(reply),
                    };
                }
                Err(RecvTimeoutError::Disconnected) => bail!("the {} has ended", self.role),
                Err(RecvTimeoutError::Timeout) => {
                    let seconds = patience.as_secs();
                    ensure!(
                        begun.elapsed() < patience,
                        "the {}: {seconds} s of silence",
                        self.role
                    );
                }
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended already is all right.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
