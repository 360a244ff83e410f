//! Restricts a process to what it still needs.
//!
//! A process that will read from the network first prepares itself: it listens, opens files and
//! starts other processes. It then describes its remaining work in a [`Sandbox`] and calls
//! [`apply`]. From then on the kernel refuses everything else, whatever code runs in the process:
//!
//! | layer | what it removes |
//! | --- | --- |
//! | no new privileges, capabilities | all capabilities and every way to regain one |
//! | Landlock | files not listed, new TCP ports, signals and abstract sockets of other processes |
//! | seccomp | system calls that are not listed, or not with these arguments |
//! | `RLIMIT_CORE` | core dumps to files and to programs |
//!
//! Only root may empty the bounding set of capabilities, which limits what `execve` may grant. The
//! layers overlap on purpose: a kernel that lacks one still has the others. [`Restrictions`] lists
//! those in force.
//!
//! # Refused calls
//!
//! Calls that only an attacker would make (`execve`, `ptrace`, `mount`, `bpf` and others, see
//! [`calls`]) kill the process, because nothing in it can be trusted any more. All other calls that
//! are not on the list fail with `ENOSYS`, as on a kernel without them: a guest may run in this
//! process, and the C library falls back to an older call.
//!
//! # Threads
//!
//! Capabilities and Landlock belong to a thread and are inherited by the threads that it starts. So
//! [`apply`] requires a process with one thread.

#![forbid(unsafe_code)]

pub mod calls;
mod capabilities;
mod error;
mod files;
mod ioctls;

use std::path::PathBuf;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::CapabilitySet;
use serde::Serialize;

pub use error::SandboxError;
pub use files::Files;

/// The work of a process after it is restricted. It determines the allowed system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// It runs a guest, on KVM or as threads, and may migrate it away: it creates KVM machines,
    /// dirty logs, memory, and TCP connections.
    Machine,
    /// It fills the memory of a guest that another process runs. It creates no machines and
    /// connects only to Unix sockets.
    MemoryOnly,
    /// It carries connections between Unix sockets and TCP, and connects over TCP anywhere. It
    /// waits for the ends of processes that it started before.
    Connections,
}

/// What a process may still do.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// The kind of work.
    pub work: Work,
    /// The files that it needs.
    pub files: Files,
    /// Whether it connects to sockets of another user, which requires `CAP_DAC_OVERRIDE`. This
    /// capability is kept then.
    pub others_sockets: bool,
}

/// How strict the sandbox is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxMode {
    /// Apply what the kernel supports.
    #[default]
    Auto,
    /// Apply everything, or fail.
    Require,
    /// Do not restrict the process.
    Off,
}

/// The restrictions in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Restrictions {
    /// The requested strictness.
    pub wanted: SandboxMode,
    /// No program that the process could start has more privileges than it.
    pub no_new_privileges: bool,
    /// It has no capabilities. A user who may not empty the bounding set keeps that one; it only
    /// limits what `execve` may grant.
    pub no_capabilities: bool,
    /// The version of Landlock in force; 0 for none. Version 4 restricts TCP ports, 5 device calls,
    /// 6 signals.
    pub landlock_abi: u32,
    /// System calls are filtered.
    pub seccomp: bool,
    /// A crash leaves no core dump.
    pub no_core_dumps: bool,
    /// What is missing in this kernel or in the limits of the process, for people.
    pub missing: Vec<String>,
}

impl Restrictions {
    /// A one-line summary for people.
    #[must_use]
    pub fn summary(&self) -> String {
        if self.wanted == SandboxMode::Off {
            return "not restricted".to_owned();
        }
        let landlock = format!("Landlock {}", self.landlock_abi);
        let parts = [
            (self.no_capabilities, "no capabilities"),
            (!self.no_capabilities, "one capability"),
            (self.landlock_abi > 0, landlock.as_str()),
            (self.seccomp, "seccomp"),
            (self.no_core_dumps, "no core dumps"),
        ];
        let parts: Vec<_> = parts.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        let mut text = format!("restricted: {}", parts.join(", "));
        if !self.missing.is_empty() {
            text += &format!("; missing: {}", self.missing.join("; "));
        }
        text
    }
}

/// Disables core dumps. Returns whether this includes dumps to programs.
fn forbid_core_dumps() -> Result<bool, SandboxError> {
    // The limit is 1 and not 0: if core_pattern is a program, the kernel ignores every limit except
    // 1. A dump to a file needs at least a page (core(5); Linux fs/coredump.c).
    let limit = Rlimit { current: Some(1), maximum: Some(1) };
    match setrlimit(Resource::Core, limit) {
        Ok(()) => Ok(true),
        // The hard limit is already 0, which is sufficient if dumps are files.
        Err(Errno::PERM) => {
            let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern");
            Ok(pattern.is_ok_and(|pattern| dumps_are_files(&pattern)))
        }
        Err(errno) => {
            Err(SandboxError::Refused { what: "a limit for core dumps", source: errno.into() })
        }
    }
}

/// Whether a `core_pattern` names a file, and not a program or a socket (core(5)).
fn dumps_are_files(pattern: &str) -> bool {
    !pattern.starts_with(['|', '@'])
}

/// Restricts this process permanently. The files in [`Sandbox::files`] must already exist; later
/// files are not accessible.
///
/// # Errors
/// The process has several threads, a path cannot be opened, or the kernel refused a restriction
/// that it should support. With [`SandboxMode::Require`], also if anything is missing.
pub fn apply(sandbox: &Sandbox, wanted: SandboxMode) -> Result<Restrictions, SandboxError> {
    let mut restrictions = Restrictions { wanted, ..Restrictions::default() };
    if wanted == SandboxMode::Off {
        return Ok(restrictions);
    }
    let threads = std::fs::read_dir("/proc/self/task")
        .map_err(|source| SandboxError::Path { path: PathBuf::from("/proc/self/task"), source })?
        .count();
    if threads != 1 {
        return Err(SandboxError::Threads { threads });
    }
    restrictions.no_core_dumps = forbid_core_dumps()?;
    restrictions.missing = files::missing();
    if wanted == SandboxMode::Require && !restrictions.missing.is_empty() {
        return Err(SandboxError::Missing { missing: restrictions.missing.join("; ") });
    }
    if !restrictions.no_core_dumps {
        if wanted == SandboxMode::Require {
            return Err(SandboxError::CoreLimit);
        }
        let text = "a hard limit for core dumps of 1 or more (0 does not stop a dump to a \
                    program in core_pattern)";
        restrictions.missing.push(text.to_owned());
    }
    if sandbox.others_sockets {
        if wanted == SandboxMode::Require {
            return Err(SandboxError::OthersSockets);
        }
        let text = "dropping CAP_DAC_OVERRIDE (it is needed for sockets of another user's process)";
        restrictions.missing.push(text.to_owned());
    }
    let kept =
        if sandbox.others_sockets { CapabilitySet::DAC_OVERRIDE } else { CapabilitySet::empty() };
    capabilities::drop_all_but(kept)?;
    restrictions.no_capabilities = !sandbox.others_sockets;
    rustix::thread::set_no_new_privs(true).map_err(|errno| SandboxError::Refused {
        what: "to forbid new privileges",
        source: errno.into(),
    })?;
    restrictions.no_new_privileges = true;
    restrictions.landlock_abi = files::restrict(sandbox)?;
    calls::restrict(sandbox.work)?;
    restrictions.seccomp = true;
    Ok(restrictions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dumps_to_programs_and_sockets_are_not_files() {
        for file in ["core\n", "", "/var/crash/%e.%p\n", "%e|x\n"] {
            assert!(dumps_are_files(file), "{file}");
        }
        for other in ["|/usr/lib/systemd/systemd-coredump %P\n", "@/run/coredump\n", "@@/run/c\n"] {
            assert!(!dumps_are_files(other), "{other}");
        }
    }

    #[test]
    fn core_limit_error_says_how_to_raise_the_limit() {
        let message = SandboxError::CoreLimit.to_string();
        assert!(message.contains("ulimit -Hc") && !message.contains("kernel has no"), "{message}");
    }
}
