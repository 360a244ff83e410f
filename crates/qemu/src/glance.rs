//! What can be said of a QEMU in a few milliseconds, without changing anything.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use vmferry_wire::GuestIdentity;

use crate::error::QemuError;
use crate::guest;
use crate::qmp::Qmp;

/// How long QEMU may take for each answer. Other clients of its socket wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(2);

/// A QEMU and its guest at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Glance {
    /// The guest's name and UUID; the UUID is nil if QEMU was given none.
    pub identity: GuestIdentity,
    /// QEMU's run state, such as `running`.
    pub state: String,
    /// The guest's memory in bytes, with what was plugged in.
    pub memory_bytes: u64,
    /// Number of its vCPUs.
    pub vcpus: u64,
    /// The process, if it is visible from here.
    pub pid: Option<u32>,
}

impl Glance {
    /// Looks at the QEMU with this QMP socket, and disconnects.
    ///
    /// # Errors
    /// Nothing listens there, another client uses the socket, or QEMU does not answer.
    pub fn at(qmp: &Path) -> Result<Self, QemuError> {
        let mut qmp = Qmp::connect_within(qmp, PATIENCE)?;
        let identity = guest::identity(&mut qmp)?;
        let status = qmp.execute("query-status", json!({}))?;
        let memory = qmp.execute("query-memory-size-summary", json!({}))?;
        let vcpus = qmp.execute("query-cpus-fast", json!({}))?;
        let bytes = |name: &str| memory[name].as_u64().unwrap_or_default();
        Ok(Self {
            identity,
            state: status["status"].as_str().unwrap_or_default().to_owned(),
            memory_bytes: bytes("base-memory") + bytes("plugged-memory"),
            vcpus: vcpus.as_array().map_or(0, |all| all.len() as u64),
            pid: qmp.pid(),
        })
    }
}
