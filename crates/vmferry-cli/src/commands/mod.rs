//! One file per subcommand.

pub mod balloon;
pub mod completions;
pub mod demo;
pub mod estimate;
mod host;
pub mod inspect;
pub mod man;
pub mod metrics;
pub mod pki;
pub mod qemu;
pub mod receive;
pub mod report;
pub mod resolve;
pub mod run;
pub mod send;
pub mod simple;
pub mod status;

use std::io;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use uuid::Uuid;
use vmferry_control::{RuntimeDirectory, runtime_directory};
use vmferry_wire::GuestIdentity;

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

/// Who a new guest is.
pub fn guest_identity(name: &str, uuid: Option<Uuid>) -> GuestIdentity {
    GuestIdentity { uuid: uuid.unwrap_or_else(Uuid::new_v4), name: name.to_owned() }
}

/// Waits for a child's end, but no longer than so; `None` if it still lives.
pub fn await_child(child: &mut Child, patience: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + patience;
    loop {
        match child.try_wait()? {
            None if Instant::now() < deadline => {
                // The one call that is woken by a child's end has no bound.
                std::thread::sleep(Duration::from_millis(5));
            }
            ended => return Ok(ended),
        }
    }
}
