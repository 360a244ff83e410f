//! Fetching the missing pages of a guest whose receiver has died.

use std::path::Path;

use vmferry_handover::journal::{self, FileJournal, Journal, JournalError, Record, Side};
use vmferry_transport::{Listener, PeerIdentity};
use vmferry_wire::SessionId;

use super::notice::Notice;
use super::receive::{Owned, Received, Responder, Stop};
use super::reception::Reception;
use super::session::fetch::LeftSession;
use super::session::{Ended, Session};
use crate::config::DestinationConfig;
use crate::data::destination::missing::MissingPages;
use crate::error::MigrateError;
use crate::machine::destination::io::Ending;
use crate::vmm::left::{LeftGuest, LeftVm};

/// Takes over a guest that lacks pages from a receiver that has died, and fetches the pages from
/// its source. Blocks until all of them have arrived; `stop` has no effect.
///
/// The guest waits at its missing pages until the source asks, and does not notice more than that.
/// The source of the session must reach the address of `listener`.
///
/// # Errors
/// In [`Received::Nothing`]: the guest lacks no pages according to the journal, the VMM can't be
/// adopted, or [`JournalError::InUse`](vmferry_handover::journal::JournalError::InUse) while the
/// earlier receiver lives. Nothing was changed then.
pub fn fetch_for_left<V: LeftVm>(
    listener: Listener,
    mut vm: V,
    session: SessionId,
    config: &DestinationConfig,
    watch: &mut dyn FnMut(&Notice),
) -> Received<V> {
    match fetch(listener, &mut vm, session, config, watch) {
        Err(error) => Received::Nothing { vm, error },
        Ok((Ended { ending, session, guest, paused, stats, .. }, responder)) => {
            let crash = match ending {
                Ending::Owns(crash) => crash,
                Ending::Stuck(error) | Ending::Aborted(error) | Ending::Refused(error) => {
                    Some(error)
                }
            };
            Received::Owns(Box::new(Owned { vm, session, guest, paused, crash, stats, responder }))
        }
    }
}

/// Writes to the journal of a receiver that has died that its guest has every page. Its VMM, which
/// fetched them itself, must have said so, or an operator has ended the guest.
///
/// # Errors
/// Journal errors; [`JournalError::InUse`] while the earlier receiver lives.
pub fn record_fetched(directory: &Path, session: SessionId) -> Result<(), JournalError> {
    record(directory, session, &Record::Fetched)
}

/// Writes to the journal of a receiver that has died that its guest has crashed while it lacked
/// pages. Its VMM must have ended.
///
/// # Errors
/// As [`record_fetched`].
pub fn record_crashed(directory: &Path, session: SessionId) -> Result<(), JournalError> {
    record(directory, session, &Record::Ended)
}

/// Writes how the fetch has ended, unless that is in the journal already.
fn record(directory: &Path, session: SessionId, record: &Record) -> Result<(), JournalError> {
    let (mut journal, records) = FileJournal::reopen(directory, session, Side::Destination)?;
    let lacks_pages =
        journal::recover_destination(&records).is_some_and(|(state, _)| state.is_fetching());
    if lacks_pages { journal.append(record) } else { Ok(()) }
}

fn fetch<V: LeftVm>(
    listener: Listener,
    vm: &mut V,
    session: SessionId,
    config: &DestinationConfig,
    watch: &mut dyn FnMut(&Notice),
) -> Result<(Ended, Responder), MigrateError> {
    let directory = &config.journal_directory;
    let (journal, records) = FileJournal::reopen(directory, session, Side::Destination)?;
    let source = journal::source_of(directory, session)?;
    let peer = PeerIdentity {
        tls: source.is_some(),
        names: source.into_iter().collect(),
        ..PeerIdentity::anonymous("the source".into())
    };
    let guest = records.iter().find_map(|record| match record {
        Record::Open { guest, .. } => Some(guest.clone()),
        _ => None,
    });
    let left = vm.adopt().map_err(|source| MigrateError::Vm {
        action: "take over its memory from an earlier process",
        source,
    })?;
    let (missing, paused) = match left {
        LeftGuest::Memory(memory) => {
            let paused = memory.stays_paused;
            (Some(MissingPages::adopt(memory)?), paused)
        }
        LeftGuest::Streams { stays_paused } => (None, stays_paused),
    };
    let reception = Reception::open(listener, config).map_err(MigrateError::no_thread)?;
    // Once all pages have arrived, there is nothing to stop.
    let stop = Stop::default();
    let left = LeftSession { session, guest, journal, records, peer, paused, missing };
    let session = Session::take_over(vm, config, (&reception, stop.stops()), left)?;
    let ended = session.run(watch);
    Ok((ended, Responder::start(reception, directory.clone())))
}
