//! One file per subcommand.

pub mod balloon;
pub mod completions;
pub mod daemon;
pub mod demo;
pub mod doctor;
pub mod estimate;
mod finishes;
pub mod fleet;
mod host;
pub mod inspect;
pub mod libvirt;
pub mod link;
pub mod man;
pub mod metrics;
mod migration;
pub mod pki;
pub mod qemu;
pub mod receive;
mod reception;
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
use vmferry_control::{Directories, DirectoryError};
use vmferry_wire::GuestIdentity;

use crate::exit::{Code, Failure};

/// The directories of this user's guests, for commands that only read. Nothing is created.
pub fn directories() -> Result<Directories, Failure> {
    Directories::of_this_user().map_err(unusable)
}

/// The same for commands that host or move a guest: missing directories are created.
pub fn prepared_directories() -> Result<Directories, Failure> {
    directories()?.prepare().map_err(unusable)
}

fn unusable(error: DirectoryError) -> Failure {
    let said = "the directory of control sockets or journals can't be used: correct it, or set \
                VMFERRY_RUNTIME_DIR and VMFERRY_STATE_DIR to others";
    Failure::of(Code::Internal, anyhow::Error::new(error).context(said))
}

/// The control socket of a guest.
pub fn socket(guest: &str) -> Result<PathBuf, Failure> {
    Ok(directories()?.socket(guest))
}

/// The identity of a new guest.
pub fn guest_identity(name: &str, uuid: Option<Uuid>) -> GuestIdentity {
    GuestIdentity { uuid: uuid.unwrap_or_else(Uuid::new_v4), name: name.to_owned() }
}

/// Waits for a child to exit, for at most `patience`; `None` if it still runs.
pub fn await_child(child: &mut Child, patience: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + patience;
    loop {
        match child.try_wait()? {
            None if Instant::now() < deadline => {
                // Polled, because the blocking `wait` has no timeout.
                std::thread::sleep(Duration::from_millis(5));
            }
            ended => return Ok(ended),
        }
    }
}
