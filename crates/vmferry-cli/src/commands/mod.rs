//! One file per subcommand.

pub mod demo;
pub mod pki;
pub mod receive;
pub mod resolve;
pub mod run;
pub mod send;
pub mod simple;
pub mod status;

use std::path::PathBuf;

use vmferry_microvm::control::{RuntimeDirectory, runtime_directory};

use crate::exit::{Code, Failure};

/// The directory of this user's guests.
pub fn directory() -> Result<RuntimeDirectory, Failure> {
    runtime_directory().map_err(|error| {
        Failure::of(
            Code::Internal,
            anyhow::Error::new(error)
                .context("the runtime directory can't be used: set VMFERRY_RUNTIME_DIR to another"),
        )
    })
}

/// The control socket of a guest.
pub fn socket(guest: &str) -> Result<PathBuf, Failure> {
    Ok(directory()?.socket(guest))
}
