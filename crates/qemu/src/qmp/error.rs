//! QMP errors, and QEMU's version.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmferry::PoweredOff;

/// The most that is shown of a text that comes from QEMU or quotes it. No message of a sound QEMU
/// is as long, and a broken one must not flood the terminal.
const MOST_SHOWN: usize = 800;

/// The first bytes of a text of QEMU's, for a message.
pub(crate) fn shown(text: &str) -> Cow<'_, str> {
    match text.floor_char_boundary(MOST_SHOWN) {
        end if end < text.len() => format!("{}…", &text[..end]).into(),
        _ => text.into(),
    }
}

/// A QMP connection that failed.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// A socket error.
    #[error(
        "QMP at {path}: can't {action}: is QEMU running with `-qmp \
         unix:{path},server=on,wait=off`, and does no other client use the socket?"
    )]
    Io {
        /// The socket.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system error.
        #[source]
        source: io::Error,
    },
    /// QEMU has ended because its guest has.
    #[error("QEMU at {path} has ended")]
    Ended {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        cause: PoweredOff,
    },
    /// QEMU refused the command.
    #[error("QEMU refused `{command}`: {}", shown(message))]
    Refused {
        /// The command.
        command: String,
        /// QEMU's message.
        message: String,
    },
    /// An answer that is not QMP.
    #[error("QMP at {path}: unexpected answer: {text}")]
    Answer {
        /// The socket.
        path: PathBuf,
        /// What was received.
        text: String,
    },
    /// Another client is connected, and QMP serves one client at a time.
    #[error(
        "QMP at {path} is in use by {}, and takes one client at a time{}",
        holders(clients),
        advice(clients)
    )]
    Busy {
        /// The socket.
        path: PathBuf,
        /// The connected clients, as far as they are visible from here.
        clients: Vec<Client>,
    },
    /// Something did not happen in time.
    #[error(
        "{} at {path} did not {what} in {} s{}",
        process(*pid),
        after.as_secs(),
        hint(*stopped, *pid)
    )]
    TimedOut {
        /// The socket.
        path: PathBuf,
        /// The process, if it is known.
        pid: Option<u32>,
        /// What was awaited.
        what: String,
        /// How long the wait was.
        after: Duration,
        /// Whether the process is stopped, as by `SIGSTOP`.
        stopped: bool,
    },
}

impl QmpError {
    /// Whether QEMU may simply be slow.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::TimedOut { .. } | Self::Busy { .. })
    }

    /// Checks again whether the unresponsive process is stopped, for a caller that can see what the
    /// connection could not. `process` is QEMU's, if the connection did not know it.
    pub fn look_again(&mut self, is_stopped: &dyn Fn(u32) -> bool, process: Option<u32>) {
        if let Self::TimedOut { pid, stopped, .. } = self {
            *pid = pid.or(process);
            *stopped |= pid.is_some_and(is_stopped);
        }
    }
}

/// A process that is connected to a QMP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// The process.
    pub pid: u32,
    /// Its name in the kernel.
    pub name: String,
}

impl Client {
    fn is_libvirt(&self) -> bool {
        matches!(self.name.as_str(), "libvirtd" | "virtqemud")
    }
}

fn holders(clients: &[Client]) -> String {
    if clients.is_empty() {
        return "a process that can't be seen from here".to_owned();
    }
    let one = |client: &Client| format!("process {} (`{}`)", client.pid, client.name);
    clients.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// What an operator can do about a socket that is in use.
fn advice(clients: &[Client]) -> &'static str {
    if clients.iter().any(Client::is_libvirt) {
        ": libvirt manages this QEMU and keeps its monitor. Have libvirt migrate the guest, or \
         give the guest a second QMP socket (`<qemu:commandline>` with `-qmp \
         unix:PATH,server=on,wait=off`) and name that one"
    } else {
        ": end that process or wait until it has gone, or start QEMU with a second `-qmp` socket \
         and name that one"
    }
}

/// The unresponsive process, in words.
fn process(pid: Option<u32>) -> String {
    pid.map_or_else(|| "QEMU".to_owned(), |pid| format!("QEMU's process {pid}"))
}

/// What an operator can do about an unresponsive QEMU.
fn hint(stopped: bool, pid: Option<u32>) -> String {
    match pid {
        Some(pid) if stopped => format!(": it is stopped: continue it with `kill -CONT {pid}`"),
        Some(_) => ": does another client use this socket, or does its storage not answer?".into(),
        None => {
            ": is it stopped (then `kill -CONT` continues it), or does another client use this \
                 socket?"
                .into()
        }
    }
}

/// QEMU's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// Major.
    pub major: u64,
    /// Minor.
    pub minor: u64,
    /// Micro.
    pub micro: u64,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}
