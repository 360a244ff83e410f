//! The option of commands whose migrations may have a witness.

use std::path::PathBuf;

use clap::Args;

/// The witness.
#[derive(Clone, Debug, Args)]
pub struct WitnessOptions {
    /// Ask the witness at this socket of this host's `vmferry daemon` before the guest runs at the
    /// destination, and when the handover is in doubt. Both sides need the same fleet
    /// (docs/fleet.md).
    #[arg(long, value_name = "SOCKET")]
    pub witness: Option<PathBuf>,
}
