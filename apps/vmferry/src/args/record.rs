//! The options of whatever records its channels.

use std::path::PathBuf;

use clap::Args;

use super::parse_bytes;

/// What is recorded.
#[derive(Clone, Debug, Args)]
pub struct RecordOptions {
    /// Record what each channel carries, above encryption, into files of this directory (mode 0700), for `vmferry inspect`.
    /// Guest memory stands in them: keep them as you keep the guest's secrets, and delete them.
    #[arg(long, value_name = "DIR")]
    pub record: Option<PathBuf>,
    /// Stop recording after so many bytes in all files together; the migration goes on.
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = parse_bytes)]
    pub record_limit: u64,
}
