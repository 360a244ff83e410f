//! Whether a session still says whose a guest is.

use vmferry_wire::SessionId;

use super::{Record, SessionSummary, Side};

/// Whether the guest of a source's session was sent again since, so that the older session's word about it counts no
/// more. A later attempt that has failed has left it here.
#[must_use]
pub fn is_overtaken(sessions: &[SessionSummary], session: SessionId) -> bool {
    let is_ours = |one: &&SessionSummary| one.session == session && one.side == Side::Source;
    let Some(ours) = sessions.iter().find(is_ours) else { return false };
    let Some(guest) = ours.guest() else { return false };
    sessions
        .iter()
        .filter(|one| one.side == Side::Source && one.session != session)
        .filter(|one| one.guest() == Some(guest) && one.opened_at() >= ours.opened_at())
        .any(|one| !one.records.iter().any(|record| matches!(record, Record::Kept { .. })))
}

#[cfg(test)]
mod tests {
    use vmferry_wire::GuestIdentity;

    use super::super::{FileJournal, Journal, sessions};
    use super::*;

    #[test]
    fn a_session_is_overtaken_by_a_later_one_that_did_not_fail() {
        let directory = tempfile::tempdir().unwrap();
        let guest = |number: u128, name: &str| GuestIdentity {
            uuid: uuid::Uuid::from_u128(number),
            name: name.into(),
        };
        let (web, db) = (guest(1, "web"), guest(2, "db"));
        let write = |number: u8, guest: &GuestIdentity, side: Side, at: u64, records: &[Record]| {
            let session = SessionId([number; 16]);
            let mut journal = FileJournal::create(directory.path(), session, side).unwrap();
            let (peer, peer_names, guest) = ("host-b".into(), vec![], guest.clone());
            journal.append(&Record::Open { guest, peer, peer_names, at }).unwrap();
            records.iter().for_each(|record| journal.append(record).unwrap());
        };
        let overtaken = || is_overtaken(&sessions(directory.path()).unwrap(), SessionId([2; 16]));
        let (kept, given) =
            (Record::Kept { by_operator: false }, Record::Given { by_operator: false });
        write(1, &web, Side::Source, 10, &[Record::Commit, given]);
        write(2, &web, Side::Source, 20, std::slice::from_ref(&kept));
        write(3, &db, Side::Source, 30, &[Record::Commit]);
        write(4, &web, Side::Destination, 30, &[Record::Aborted { reason: "no".into() }]);
        write(5, &web, Side::Source, 20, &[Record::Commit, kept]);
        assert!(!overtaken(), "what was before, another guest, and an attempt that failed");
        write(6, &web, Side::Source, 20, &[]);
        assert!(overtaken(), "one that is under way");
        assert!(!is_overtaken(&[], SessionId([2; 16])), "nothing is known");
    }
}
