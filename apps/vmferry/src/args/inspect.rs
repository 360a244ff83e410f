//! The options of `vmferry inspect`.

use std::path::PathBuf;

use clap::Args;

use super::parse_bytes;

/// `vmferry inspect`.
#[derive(Debug, Args)]
#[command(after_help = "\
The exit status is 5 if a file is damaged or files of one session contradict each other. A file that
is only cut off at its end is not damaged.

Examples:
  vmferry inspect recording/*
  vmferry inspect --summary recording/*
  vmferry inspect --pages recording/0001-to-destination.vmftrace
  vmferry inspect /run/vmferry/journal/*.journal --json")]
pub struct InspectOptions {
    /// Recorded channels (ideally all of a session together), journals, or saved states.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Also print each run of pages and each section of a state.
    #[arg(long)]
    pub pages: bool,
    /// Print one summary line for each file only.
    #[arg(long, conflicts_with = "pages")]
    pub summary: bool,
    /// Memory for the most recent pages, which deltas are checked against.
    #[arg(long, value_name = "BYTES", default_value = "512M", value_parser = parse_bytes)]
    pub memory: u64,
}
