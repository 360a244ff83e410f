//! Takes from a process what it no longer needs.
//!
//! A process that reads from the network gets ready first (it listens, opens, starts what it must), says in a
//! [`Sandbox`] what it will still do, and calls [`apply`]. From then on, whatever code runs in it, the kernel refuses the
//! rest:
//!
//! | layer | what it takes |
//! | --- | --- |
//! | no new privileges, capabilities | all capabilities (but those that bound what `execve` may give, where only root may empty that set), and every way to get one back |
//! | Landlock | all files but those named, new TCP ports, signals to and abstract sockets of other processes |
//! | seccomp | all system calls but a list, some of them with certain arguments only |
//! | `RLIMIT_CORE` | core dumps, to files and to programs |
//!
//! The layers overlap on purpose: a kernel that lacks one still has the others, and [`Restrictions`] says which are in
//! force.
//!
//! # What a refused call does
//!
//! Calls that only an intruder makes (`execve`, `ptrace`, `mount`, `bpf` and their like, see [`calls`]) end the process:
//! nothing in it is trustworthy any more. Every other call that is not on the list fails with `ENOSYS`, as on a kernel that does
//! not have it: a guest may live in this process, and the C library takes that answer for a reason to use an older call.
//!
//! # Threads
//!
//! Capabilities and Landlock belong to a thread and are inherited by those that it starts. So [`apply`] is for a
//! process with one thread, and refuses any other.

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

/// What a process does after it was restricted, which decides about its system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// It runs a guest, on KVM or as threads, and may migrate it away: it makes KVM machines, dirty logs, memory, and
    /// TCP connections.
    Machine,
    /// It fills the memory of a guest that another process runs: it neither makes machines nor connects to
    /// anybody but by Unix sockets.
    Beside,
}

/// What a process may still do.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// What kind of work it does.
    pub work: Work,
    /// The files that it needs.
    pub files: Files,
    /// Whether it connects to sockets of another user, to which only `CAP_DAC_OVERRIDE` lets it: that one is kept then.
    pub others_sockets: bool,
}

/// How much is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Wanted {
    /// All that the kernel has.
    #[default]
    Auto,
    /// All there is, or an error.
    Require,
    /// Nothing.
    Off,
}

/// What is in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Restrictions {
    /// How much was wanted.
    pub wanted: Wanted,
    /// No program that the process could start has more rights than it.
    pub no_new_privileges: bool,
    /// It has no capability, in no set but the bounding one, for users who may not empty it: that is a bound of what
    /// `execve` gives, which can't be called, and without new privileges would give nothing.
    pub no_capabilities: bool,
    /// The version of Landlock that restricts it; 0 for none. 4 refuses TCP ports, 5 device calls, 6 signals.
    pub landlock_abi: u32,
    /// System calls are filtered.
    pub seccomp: bool,
    /// A crash leaves no core dump.
    pub no_core_dumps: bool,
    /// What this kernel can't do, or the limits that the process was started with, for people.
    pub missing: Vec<String>,
}

impl Restrictions {
    /// What is in force, in a line for people.
    #[must_use]
    pub fn summary(&self) -> String {
        if self.wanted == Wanted::Off {
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
            text += &format!("; missing here: {}", self.missing.join("; "));
        }
        text
    }
}

/// Lets a crash leave no dump; whether that is so for dumps to programs too.
fn forbid_core_dumps() -> Result<bool, SandboxError> {
    // Not 0: with a program as core_pattern the kernel ignores the limit, but for 1, and to a file a dump
    // needs a page at least (core(5); Linux fs/coredump.c).
    let limit = Rlimit { current: Some(1), maximum: Some(1) };
    match setrlimit(Resource::Core, limit) {
        Ok(()) => Ok(true),
        // Somebody has set the hard limit to 0, which will do where dumps are files.
        Err(Errno::PERM) => {
            let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern");
            Ok(pattern.is_ok_and(|pattern| dumps_are_files(&pattern)))
        }
        Err(errno) => {
            Err(SandboxError::Refused { what: "a limit for core dumps", source: errno.into() })
        }
    }
}

/// Whether a `core_pattern` names a file, and neither a program nor a socket (core(5)).
fn dumps_are_files(pattern: &str) -> bool {
    !pattern.starts_with(['|', '@'])
}

/// Restricts this process, for good. The files of [`Sandbox::files`] must exist by now, or are not reachable later.
///
/// # Errors
/// If the process has several threads, a path can't be looked at, or the kernel refuses what it should
/// have. With [`Wanted::Require`] also if this kernel lacks anything.
pub fn apply(sandbox: &Sandbox, wanted: Wanted) -> Result<Restrictions, SandboxError> {
    let mut restrictions = Restrictions { wanted, ..Restrictions::default() };
    if wanted == Wanted::Off {
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
    if wanted == Wanted::Require && !restrictions.missing.is_empty() {
        return Err(SandboxError::Missing { missing: restrictions.missing.join("; ") });
    }
    if !restrictions.no_core_dumps {
        if wanted == Wanted::Require {
            return Err(SandboxError::CoreLimit);
        }
        let text = "a hard limit for core dumps of 1 or more (0 is none to the program that core_pattern names)";
        restrictions.missing.push(text.to_owned());
    }
    if sandbox.others_sockets {
        if wanted == Wanted::Require {
            return Err(SandboxError::OthersSockets);
        }
        let text = "to go without CAP_DAC_OVERRIDE, by which the sockets of another user's process are reached";
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
    fn dumps_to_programs_and_sockets_are_no_files() {
        for file in ["core\n", "", "/var/crash/%e.%p\n", "%e|x\n"] {
            assert!(dumps_are_files(file), "{file}");
        }
        for other in ["|/usr/lib/systemd/systemd-coredump %P\n", "@/run/coredump\n", "@@/run/c\n"] {
            assert!(!dumps_are_files(other), "{other}");
        }
    }

    #[test]
    fn what_is_missing_is_said_with_its_way_out() {
        let said = SandboxError::CoreLimit.to_string();
        assert!(said.contains("ulimit -Hc") && !said.contains("kernel has no"), "{said}");
    }
}
