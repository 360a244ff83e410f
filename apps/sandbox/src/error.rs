//! Errors of restricting a process.

use std::io;
use std::path::PathBuf;

/// The error of [`apply`](crate::apply).
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The process has several threads, and the restrictions would not apply to all of them.
    #[error(
        "this process has {threads} threads and can be restricted only while it has one: \
         restrict it before it starts others"
    )]
    Threads {
        /// The number of threads.
        threads: usize,
    },
    /// The kernel lacks a required feature.
    #[error(
        "this process can't be restricted as `require` demands: this kernel has no {missing}; \
         use a newer kernel (Linux 6.12 with Landlock enabled), or `auto`"
    )]
    Missing {
        /// The missing features.
        missing: String,
    },
    /// Core dumps cannot be disabled as required.
    #[error(
        "this process can't be restricted as `require` demands: its hard limit for core dumps is \
         0, which does not stop a dump to a program in core_pattern (a limit of 1 does); raise the \
         hard limit (`ulimit -Hc unlimited`, or systemd's `LimitCORE=1`), or use `auto`"
    )]
    CoreLimit,
    /// The process needs a capability.
    #[error(
        "this process can't be restricted as `require` demands: it connects to sockets of another \
         user's process, for which it needs a capability; run it as that user, or use `auto`"
    )]
    OthersSockets,
    /// A path that must stay accessible cannot be opened.
    #[error("the restricted process needs {path}, which cannot be opened")]
    Path {
        /// The path.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a restriction that it should support.
    #[error(
        "this process can't be restricted: the kernel refused {what}; `off` disables the sandbox"
    )]
    Refused {
        /// The restriction.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The Landlock rules cannot be made.
    #[error("this process can't be restricted by Landlock; `off` disables the sandbox")]
    Landlock(#[from] landlock::RulesetError),
    /// The filter cannot be made or installed.
    #[error("this process's system calls can't be filtered; `off` disables the sandbox")]
    Seccomp(#[from] seccompiler::Error),
}

impl From<seccompiler::BackendError> for SandboxError {
    fn from(error: seccompiler::BackendError) -> Self {
        Self::Seccomp(error.into())
    }
}
