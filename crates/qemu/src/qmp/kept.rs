//! A connection that outlives the process which has opened it.
//!
//! QEMU greets a client from its main loop, and that may be waiting for a missing page of its
//! guest, which only the next client can bring. So the client's end of a connection is given to
//! QEMU, which has the other end, and the next process takes it from there. While QEMU keeps it, no
//! other client can connect.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::fstat;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::events::Events;
use super::lines::Lines;
use super::{Qmp, QmpError, Version};
use crate::life::Life;
use crate::{inject, process};

/// The name of the descriptor within QEMU.
const DESCRIPTOR: &str = "vmferry-monitor";

/// How long to wait for an answer on such a connection: QEMU may be waiting for pages, and the
/// caller has to go on.
const PATIENCE: Duration = Duration::from_secs(5);

/// Identifies a connection to a QEMU that may keep the client's end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptConnection {
    /// The inode of the client's end.
    socket: u64,
    version: Version,
}

impl Qmp {
    /// What identifies this connection. `None` if it is of no use to a later process, because QEMU
    /// has no commands out of band here.
    #[must_use]
    pub fn connection(&self) -> Option<KeptConnection> {
        let socket = fstat(&self.stream).ok().filter(|_| self.has_out_of_band)?.st_ino;
        Some(KeptConnection { socket, version: self.version })
    }

    /// Has QEMU keep this connection.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn keep(&mut self) -> Result<(), QmpError> {
        let end = self.descriptor()?;
        self.give_descriptor(DESCRIPTOR, &end)
    }

    /// The connection ends with this process again.
    ///
    /// # Errors
    /// As [`execute`](Self::execute); that QEMU does not keep it.
    pub fn end_keeping(&mut self) -> Result<(), QmpError> {
        self.execute("closefd", json!({ "fdname": DESCRIPTOR })).map(|_| ())
    }
}

impl KeptConnection {
    /// The client's end, if this process keeps it, and may be asked for it.
    #[must_use]
    pub fn fetch(&self, pid: u32) -> Option<OwnedFd> {
        let numbers = process::descriptors(pid, &format!("socket:[{}]", self.socket)).ok()?;
        numbers.into_iter().find_map(|number| inject::fetch(pid, number).ok())
    }

    /// Goes on with the connection. `path` is its name in errors.
    #[must_use]
    pub fn resume(&self, end: OwnedFd, path: &Path, pid: u32) -> Qmp {
        // Commands of earlier processes had smaller numbers.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Qmp {
            path: path.to_owned(),
            stream: UnixStream::from(end),
            lines: Lines::default(),
            version: self.version,
            pid: Some(pid),
            events: Events::default(),
            life: Life::default(),
            patience: PATIENCE,
            number: now.as_micros() as u64,
            silent: false,
            has_out_of_band: true,
            may_begin_within: true,
        }
    }
}
