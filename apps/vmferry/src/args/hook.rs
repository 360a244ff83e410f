//! The options of commands that run a hook.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::parse_duration;

/// A hook.
#[derive(Clone, Debug, Args)]
pub struct HookOptions {
    /// Run this program with `before` ahead of a QEMU guest's handover, and with `after` when it is
    /// decided which host has the guest (docs/ha.md). If `before` fails, the migration is
    /// cancelled.
    #[arg(long, value_name = "PROGRAM")]
    pub hook: Option<PathBuf>,
    /// How long the program may run before it is killed and counts as failed. At the destination
    /// `before` may take 20 s at most, because the source waits for an answer.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub hook_timeout: Duration,
}

/// `vmferry run-hook`.
#[derive(Debug, Args)]
pub struct HookRunnerOptions {
    /// How long the program may take, in milliseconds.
    #[arg(long)]
    pub timeout_ms: u64,
    /// The program.
    pub program: PathBuf,
}
