//! Identifies a QEMU process among all that have or will have the same PID.

use std::io;

use serde::{Deserialize, Serialize};

use crate::error::QemuError;
use crate::proc_stat::{host, innermost, start_time, state};

/// A process, distinguished from all others that have or will have the same PID.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// The PID.
    pub pid: u32,
    /// Start time, in clock ticks since boot.
    pub started: u64,
    /// The boot ID of the host.
    pub boot: String,
    /// The inode of the PID namespace that the PID is of; `None` if it was not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<u64>,
}

impl ProcessIdentity {
    /// Identifies a running process.
    ///
    /// # Errors
    /// If there is no process with this PID.
    pub fn of(pid: u32) -> Result<Self, QemuError> {
        let failed = |source| QemuError::Process { action: "read the start time", pid, source };
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).map_err(failed)?;
        let started = start_time(&stat).ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))?;
        Ok(Self { pid, started, boot: host(), namespace: own_namespace() })
    }

    /// Whether [`lives`](Self::lives) is meaningful for it: in another PID namespace its PID names
    /// another process. A process of an earlier boot has ended, whatever its namespace was.
    #[must_use]
    pub fn can_be_seen(&self) -> bool {
        let own = own_namespace();
        let is_elsewhere = self.namespace.is_some() && own.is_some() && self.namespace != own;
        !is_elsewhere || self.boot != host()
    }

    /// Whether it is still there. A zombie is not.
    #[must_use]
    pub fn lives(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        let is_dead = matches!(state(&stat), None | Some('Z' | 'X'));
        !is_dead && start_time(&stat) == Some(self.started) && self.boot == host()
    }
}

/// The PID namespace of this process. A sandboxed process may read this link, too.
fn own_namespace() -> Option<u64> {
    let link = std::fs::read_link("/proc/self/ns/pid").ok()?;
    link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

/// A name that no other process ever has: the boot ID, the PID in its innermost namespace, and the
/// start time.
pub fn process_name(pid: u32) -> Option<String> {
    let ProcessIdentity { started, boot, .. } = ProcessIdentity::of(pid).ok()?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(format!("{boot}/{}/{started}", innermost(&status)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_name_identifies_one_process() {
        let own = process_name(std::process::id()).unwrap();
        assert_eq!(process_name(std::process::id()), Some(own.clone()));
        let mut other = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        assert_ne!(process_name(other.id()).unwrap(), own);
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(process_name(other.id()), None);
    }
}
