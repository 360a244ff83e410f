//! The options of commands that record their channels.

use std::path::PathBuf;

use clap::Args;

use super::parse_bytes;

/// Recording.
#[derive(Clone, Debug, Args)]
pub struct RecordOptions {
    /// Record the unencrypted content of each channel in files in this directory (mode 0700), for
    /// `vmferry inspect`. The files contain guest memory: protect them like the guest's secrets,
    /// and delete them.
    #[arg(long, value_name = "DIR")]
    pub record: Option<PathBuf>,
    /// Stop recording when all files together reach this size; the migration goes on.
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = parse_bytes)]
    pub record_limit: u64,
}
