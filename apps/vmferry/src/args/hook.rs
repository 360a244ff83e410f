//! The options of whatever runs a hook.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::parse_duration;

/// A hook.
#[derive(Clone, Debug, Args)]
pub struct HookOptions {
    /// Run this program with `before` ahead of a QEMU guest's handover, which does not take place
    /// if it fails, and with `after` when it is decided where the guest is (docs/ha.md).
    #[arg(long, value_name = "PROGRAM")]
    pub hook: Option<PathBuf>,
    /// How long the program may take; then it is ended and counts as failed. `before` at the
    /// destination may take 20 s at most: the source waits for an answer.
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
