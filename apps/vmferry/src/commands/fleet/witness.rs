//! The witness of sessions: the agent of this host's daemon provides it at a socket.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmferry::witness::Witness;
use vmferry_control::{Directories, SocketWitness, WitnessSocketError};
use vmferry_handover::journal::{self, Side, witness_of};
use vmferry_wire::SessionId;

use crate::exit::{Code, Failure};

/// Where the agent of this user's daemon provides the witness.
pub fn witness_socket(directories: &Directories) -> PathBuf {
    // Without the ending of guests' control sockets.
    directories.runtime().join("witness")
}

/// The witness of a new session, if there is one.
pub fn of_new_session(socket: Option<&Path>) -> Result<Option<Arc<dyn Witness>>, Failure> {
    let Some(socket) = socket else { return Ok(None) };
    Ok(Some(Arc::new(SocketWitness::connect(socket)?)))
}

/// The witness of a session that this host's source has journaled. Its agent may be absent.
pub fn of_session(
    socket: Option<&Path>,
    journals: &Path,
    session: SessionId,
) -> Option<Arc<dyn Witness>> {
    let records = journal::read(journals, session, Side::Source).ok()?;
    let id = witness_of(&records)?.clone();
    Some(Arc::new(SocketWitness::named(socket?, id)))
}

impl From<WitnessSocketError> for Failure {
    fn from(error: WitnessSocketError) -> Self {
        let text = "the guest needs a witness (`--witness`), and a `vmferry daemon` of this host \
                    that has joined its fleet provides it";
        Self::of(Code::Connect, anyhow::Error::new(error).context(text))
    }
}
