//! Old journals of a destination are removed, so that a peer can't fill the disk with Prepares.
//!
//! A source asks about a session until it has the word, over the link by which it begins its other
//! sessions. So it asks about none that is followed by [`MAX_OF_ONE`] later ones. If it did, it
//! would hear that this host does not know the session, and wait for an operator: no host takes
//! that for a word. Each peer has its own limit, so none can remove what another one may ask for.

use std::collections::HashMap;
use std::path::Path;

use vmferry_handover::journal::{JournalError, Side, recorded_sessions, records_of};
use vmferry_handover::{
    DestinationFinish, DomainSeen, FinishEntry, FinishOwner, FinishRecord, SessionId,
};

use super::super::ledger::Ledger;
use super::opened;

/// The journals that are kept of the sessions of one peer. One has less than 1 KiB.
pub(super) const MAX_OF_ONE: usize = 1024;

/// The sessions that begin until old journals are looked for again.
pub(super) const INTERVAL: u64 = 64;

/// Removes the oldest journals of each peer that has more than `most`. What decides who has a guest
/// stays, and so does a session that is led, or whose journal can't be read. Returns the number of
/// journals that were removed.
///
/// # Errors
/// The directory can't be read.
pub(super) fn remove_old(directory: &Path, most: usize) -> Result<usize, JournalError> {
    // By the name that its certificate keeps, as in `is_host`.
    let mut of_peers: HashMap<Option<String>, Vec<(SessionId, bool)>> = HashMap::new();
    for session in recorded_sessions::<FinishEntry>(directory, Side::Destination)? {
        let read = records_of::<FinishEntry>(directory, session, Side::Destination);
        let Ok(Some(entries)) = read else { continue };
        let records: Vec<_> = entries.into_iter().map(|entry| entry.record).collect();
        let is_settled = is_settled(&records);
        let Some((_, names)) = opened(records) else { continue };
        of_peers.entry(names.into_iter().next()).or_default().push((session, is_settled));
    }
    let mut removed = 0;
    for sessions in of_peers.into_values() {
        let too_many = sessions.len().saturating_sub(most);
        let settled = sessions.into_iter().filter(|(_, is_settled)| *is_settled);
        let removable = settled.filter(|(session, _)| remove(directory, *session));
        removed += removable.take(too_many).count();
    }
    Ok(removed)
}

/// Whether the records say for good who has the guest. A session whose Finish was not passed is
/// settled while nobody leads it.
fn is_settled(records: &[FinishRecord]) -> bool {
    let state = DestinationFinish::recover(records).ok().flatten();
    state.is_some_and(|state| state.owner(DomainSeen::NoAnswer) != FinishOwner::Undecided)
}

/// Removes a journal, unless its session is led or is not settled any more.
fn remove(directory: &Path, session: SessionId) -> bool {
    let Ok(Some((ledger, records))) = Ledger::<DestinationFinish>::reopen(directory, session)
    else {
        return false;
    };
    is_settled(&records) && ledger.remove().is_ok()
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;
    use vmferry_handover::FinishWord;
    use vmferry_libvirt_rpc::Guest;

    use super::*;

    fn begin(directory: &Path, number: u8, peer: &str) -> Ledger<DestinationFinish> {
        let guest = Guest { name: "web".into(), uuid: Uuid::nil() };
        let names = [peer.to_owned()];
        let (session, state) = (SessionId([number; 16]), DestinationFinish::NotPassed);
        Ledger::open(directory, session, state, &guest, ("192.0.2.1:1", &names)).unwrap()
    }

    fn pass(ledger: &mut Ledger<DestinationFinish>) {
        let passed = ledger.state().pass().unwrap();
        ledger.take(passed).unwrap();
    }

    fn left(directory: &Path) -> Vec<u8> {
        let all = recorded_sessions::<FinishEntry>(directory, Side::Destination).unwrap();
        let mut all: Vec<_> = all.into_iter().map(|session| session.0[0]).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn only_settled_journals_of_the_same_peer_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path();
        // Undecided: it was passed, and libvirt's answer is lost.
        pass(&mut begin(path, 1, "host-a"));
        let led = begin(path, 2, "host-a");
        let mut answered = begin(path, 3, "host-a");
        pass(&mut answered);
        let word = answered.state().reply(FinishWord::Runs).unwrap();
        answered.take(word).unwrap();
        drop(answered);
        let mut barred = begin(path, 4, "host-a");
        let asked = barred.state().asked();
        barred.take(asked).unwrap();
        drop(barred);
        drop(begin(path, 5, "host-a"));
        let damaged = path.join(format!("{}.finish-destination.journal", SessionId([6; 16])));
        std::fs::write(&damaged, "00000000 {}\n00000000 {}\n").unwrap();
        for number in 7..10 {
            drop(begin(path, number, "host-c"));
        }
        assert_eq!(remove_old(path, 5).unwrap(), 0);
        assert_eq!(remove_old(path, 3).unwrap(), 2);
        assert_eq!(left(path), [1, 2, 5, 6, 7, 8, 9], "the oldest that are settled");
        assert_eq!(remove_old(path, 0).unwrap(), 4);
        assert_eq!(left(path), [1, 2, 6], "undecided, led, damaged");
        drop(led);
        assert_eq!(remove_old(path, 1).unwrap(), 1);
        assert_eq!(left(path), [1, 6]);
    }
}
