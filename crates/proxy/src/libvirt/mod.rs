//! libvirt's migrations: the RPC connection of the source's libvirt to the destination's, read on
//! its way.
//!
//! Both daemons read the calls ([`vmferry_libvirt_rpc::CallGate`]). The source's daemon learns
//! which sockets the migration will use and makes them. The destination's daemon lets only those
//! calls through that a migration needs, for guests that its policy admits, and connects later only
//! to sockets that an admitted call has named.

mod arrivals;
mod attend;
mod ends;
mod ledger;
mod migrations;
mod operator;
mod reserved;
mod session;
mod settle;
mod shelter;
mod take_over;

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use uuid::Uuid;
use vmferry_handover::journal::JournalError;
use vmferry_handover::{FinishAnswer, SessionId};
use vmferry_libvirt_rpc::{Asking, Guest, MigrateFlags, PrepareCall, SocketUri};
use vmferry_transport::PeerIdentity;
use vmferry_wire::GuestIdentity;

use crate::access::{self, Exit, SocketOrder};
use crate::config::is_plain_name;
use crate::definition::{self, Definition, Judgment};
use crate::entrances::{LocalSocket, listen_for_migration};
use crate::opened::OpenedStreams;
use crate::outgoing::LIBVIRT_SOCKET;
use crate::proxy::{Ends, Shared};
pub use arrivals::{DomainState, Domains};
pub(crate) use attend::start as attend;
use ledger::LedgerError;
pub(crate) use migrations::Migrations;
pub use migrations::{DoubtStatus, MigrationStatus, Phase};
pub use operator::answer_held;
use session::{Part, Session};
pub(crate) use take_over::take_over;

/// Why a call is refused that was read late.
const ENDED: &str = "the connection has ended";

/// A connection of this host's libvirt to a peer's.
///
/// # Errors
/// The system's.
pub(crate) fn depart(
    shared: &Arc<Shared>,
    peer: &str,
    session: SessionId,
    socket: UnixStream,
) -> std::io::Result<Ends> {
    let directory = shared.config().directory.join(peer);
    let opened = Arc::new(OpenedStreams::default());
    let part = Part::source(Arc::clone(&opened));
    let session = Session::new(shared, peer.to_owned(), session, part, socket);
    let of_gate = Arc::downgrade(&session);
    let (shared, peer) = (Arc::downgrade(shared), peer.to_owned());
    let mut sockets: Vec<LocalSocket> = Vec::new();
    let admit = move |asking: &Asking<'_>| {
        let Asking::Prepare(call) = asking else { return Ok(()) };
        let Some(shared) = shared.upgrade() else { return Err("the daemon ends".into()) };
        for file in files_of(call, &directory)? {
            let socket = listen_for_migration(&shared, &peer, file, Arc::clone(&opened));
            sockets.push(socket.map_err(|error| vmferry::chain(&error))?);
        }
        begin(&of_gate, call)
    };
    session.source_ends(Box::new(admit))
}

/// A connection of a peer's libvirt to this host's. `directory` is the peer's name for this host.
///
/// # Errors
/// Why it is refused, for people.
pub(crate) fn arrive(
    shared: &Arc<Shared>,
    peer: &PeerIdentity,
    name: String,
    directory: &str,
    session: SessionId,
) -> Result<Ends, String> {
    let config = shared.config();
    if !is_plain_name(directory) || config.peers.iter().any(|peer| peer.name == directory) {
        return Err(format!(
            "{directory:?} can't be this host's name: its sockets would be in the directory of a \
             peer"
        ));
    }
    let used = shared.arrival_directories.enter(&shared.access, directory, peer);
    let used = used.map_err(|error| vmferry::chain(&error))?;
    let path = config.directory.join(directory);
    let socket = access::connect(&*shared.access, Exit::Libvirt)
        .map_err(|error| format!("libvirt's socket {}", vmferry::chain(&error)))?;
    let local = |error: std::io::Error| error.to_string();
    let part = Part::destination(peer.clone(), used);
    let session = Session::new(shared, name, session, part, socket);
    let of_gate = Arc::downgrade(&session);
    let (shared, peer, directory) = (Arc::downgrade(shared), peer.clone(), directory.to_owned());
    let mut prepared: HashMap<Uuid, Judgment> = HashMap::new();
    let admit = move |asking: &Asking<'_>| {
        let Some(shared) = shared.upgrade() else { return Err("the daemon ends".into()) };
        judge(&shared, &peer, &mut prepared, asking)?;
        let Asking::Prepare(call) = asking else { return Ok(()) };
        let files = files_of(call, &path)?;
        let connection = of_gate.upgrade().ok_or(ENDED)?.number();
        let sockets = &shared.migrations.sockets;
        let reserved = sockets
            .reserve(connection, &call.guest, &peer, &directory, &files)
            .map_err(|error| error.to_string())?;
        for file in files {
            let directory = directory.clone();
            let checked = shared.access.sockets(&SocketOrder::CheckFree { directory, file });
            checked.map_err(|error| vmferry::chain(&error))?;
        }
        begin(&of_gate, call)?;
        reserved.admit();
        Ok(())
    };
    session.destination_ends(Box::new(admit)).map_err(local)
}

/// The most guests of a connection whose Finish is awaited. libvirt opens one for each guest.
const MAX_JUDGED: usize = 64;

/// Demands that this host's policy permits a guest and its definitions. The one that libvirt keeps
/// after the guest has ended comes with the Finish. That is judged by the rules and by what was
/// learned for the Prepare: a migration that is under way does not depend on a policy that was
/// changed since, nor on a busy host.
///
/// # Errors
/// What it does not permit, for people.
fn judge(
    shared: &Shared,
    peer: &PeerIdentity,
    prepared: &mut HashMap<Uuid, Judgment>,
    asking: &Asking<'_>,
) -> Result<(), String> {
    let Guest { name, uuid } = asking.guest().clone();
    let guest = GuestIdentity { name, uuid };
    let (judgment, xml, cookie) = match asking {
        Asking::Prepare(call) => {
            if let Some(policy) = &shared.config().policy {
                policy.check_guest(peer, &guest)?;
            }
            if prepared.len() >= MAX_JUDGED {
                return Err("too many guests were sent on this connection".into());
            }
            let judgment = Judgment::new(shared, peer, &guest)?;
            (judgment, Some(call.xml.as_str()), call.cookie.as_deref())
        }
        Asking::Finish { cookie, .. } => {
            let judgment = prepared.remove(&uuid);
            (judgment.ok_or("it was not prepared on this connection")?, None, Some(*cookie))
        }
    };
    let judged = Definition { guest: &guest.name, xml, cookie };
    let objections = judgment.objections(judged).map_err(|error| vmferry::chain(&error))?;
    if let Some(refusal) = definition::refusal(&guest.name, &objections) {
        return Err(refusal);
    }
    if xml.is_some() {
        prepared.insert(uuid, judgment);
    }
    Ok(())
}

fn begin(session: &Weak<Session>, call: &PrepareCall) -> Result<(), String> {
    session.upgrade().ok_or(ENDED)?.begin(&call.guest)
}

/// What this host knows about a session's Finish, for the source that asks.
///
/// # Errors
/// Why it is not said now.
pub(crate) fn word(
    shared: &Shared,
    peer: &PeerIdentity,
    session: SessionId,
) -> Result<FinishAnswer, String> {
    let config = shared.config();
    let arrivals = &shared.migrations.arrivals;
    match arrivals.asked(&config.journals, session, peer, config.domains.as_deref()) {
        Ok(answer) => Ok(answer),
        // An operator decides now.
        Err(LedgerError::TooEarly | LedgerError::Journal(JournalError::InUse { .. })) => {
            Ok(FinishAnswer::AskAgain)
        }
        Err(error) => Err(vmferry::chain(&error)),
    }
}

/// The names of the sockets that a migration uses, which must be in `directory`.
///
/// # Errors
/// Why it can't be carried, and what to do.
fn files_of(call: &PrepareCall, directory: &Path) -> Result<Vec<String>, String> {
    if call.flags.contains(MigrateFlags::OFFLINE) {
        return Ok(Vec::new());
    }
    let example = directory.join(&call.guest.name);
    let Some(migrate) = &call.migrate_uri else {
        return Err(format!(
            "the migration has no `migrate_uri`, so libvirt would use a TCP port: set it to unix://{}",
            example.display()
        ));
    };
    let mut files = vec![file_of(migrate, directory)?];
    if let Some(disks) = &call.disks_uri {
        let file = file_of(disks, directory)?;
        if files.contains(&file) {
            return Err(format!("memory and disks have the same socket {file}"));
        }
        files.push(file);
    } else if call.flags.contains(MigrateFlags::NON_SHARED_DISK)
        || call.flags.contains(MigrateFlags::NON_SHARED_INC)
    {
        return Err(format!(
            "the migration copies disks and has no `disks_uri`, so libvirt would use a TCP port: set \
             it to unix://{}.disks",
            example.display()
        ));
    }
    Ok(files)
}

/// The name of the socket in `directory` that a URI names.
fn file_of(uri: &str, directory: &Path) -> Result<String, String> {
    let socket = SocketUri::parse(uri).map_err(|error| vmferry::chain(&error))?;
    let path: PathBuf = socket.path().to_owned();
    let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
    if path.parent() != Some(directory) || !is_plain_name(file) || file == LIBVIRT_SOCKET {
        return Err(format!(
            "the socket {} is not a socket of a migration in {}",
            path.display(),
            directory.display()
        ));
    }
    Ok(file.to_owned())
}
