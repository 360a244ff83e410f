//! Why a process could not be restricted.

use std::io;
use std::path::PathBuf;

/// See [`apply`](crate::apply).
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The restrictions would not hold for all of its threads.
    #[error(
        "this process has {threads} threads and can only be restricted with one: restrict it before others are started"
    )]
    Threads {
        /// How many it has.
        threads: usize,
    },
    /// The kernel lacks something that is required.
    #[error(
        "this process can't be restricted as `require` asks, for this kernel has no {missing}: use a newer one (Linux 6.12 \
         with Landlock enabled), or `auto`"
    )]
    Missing {
        /// What is missing.
        missing: String,
    },
    /// Core dumps can't be forbidden as it is required.
    #[error(
        "this process can't be restricted as `require` asks: its hard limit for core dumps is 0, which is none to the \
         program that core_pattern names, and 1 is: raise the hard limit (`ulimit -Hc unlimited`, or systemd's `LimitCORE=1`), \
         or use `auto`"
    )]
    CoreLimit,
    /// A capability must be kept.
    #[error(
        "this process can't be restricted as `require` asks: it connects to sockets of another user's process, and root does \
         that by a capability: run it as that user, or use `auto`"
    )]
    OthersSockets,
    /// A path that the process shall keep can't be looked at.
    #[error("{path} is to stay reachable for the restricted process and can't be looked at")]
    Path {
        /// The path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The kernel refuses a restriction that it should have.
    #[error("this process can't be restricted: the kernel refuses {what}; `off` goes without")]
    Refused {
        /// The restriction.
        what: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Landlock's rules can't be made.
    #[error("this process can't be restricted by Landlock; `off` goes without")]
    Landlock(#[from] landlock::RulesetError),
    /// The filter can't be made or installed.
    #[error("this process's system calls can't be filtered; `off` goes without")]
    Seccomp(#[from] seccompiler::Error),
}

impl From<seccompiler::BackendError> for SandboxError {
    fn from(error: seccompiler::BackendError) -> Self {
        Self::Seccomp(error.into())
    }
}
