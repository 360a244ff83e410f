//! The options of `vmferry inspect`.

use std::path::PathBuf;

use clap::Args;

use super::parse_bytes;

/// `vmferry inspect`.
#[derive(Debug, Args)]
#[command(after_help = "\
Ends with 5 if a file is broken or files of one session contradict each other; one that is merely cut off at its end is not.

Examples:
  vmferry inspect recording/*
  vmferry inspect --summary recording/*
  vmferry inspect --pages recording/0001-to-destination.vmftrace
  vmferry inspect /run/vmferry/journal/*.journal --json")]
pub struct InspectOptions {
    /// Recorded channels (best all of one session at once), journals, or saved states.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Print each run of pages and each section of a state, too.
    #[arg(long)]
    pub pages: bool,
    /// Print what came of each file only.
    #[arg(long, conflicts_with = "pages")]
    pub summary: bool,
    /// Take at most so much memory for pages, to check deltas with: those that came last are held.
    #[arg(long, value_name = "BYTES", default_value = "512M", value_parser = parse_bytes)]
    pub memory: u64,
}
