//! The order of the sessions in a journal directory.
//!
//! A host's clock may jump back by hours, and then a guest seems to have left before it arrived. So
//! each session gets a number, one more than the largest in the directory. The clock is for people
//! only.
//!
//! The number needs no lock. Two sessions get the same number only if neither had its first record
//! on disk when the other looked. Two sessions of the same guest never do: the guest leaves a host
//! only after the record of its arrival was synced, and returns only after the record of its
//! departure was. When a host migrates a guest to itself, the source writes its record before it
//! announces the guest.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use crate::{GuestIdentity, SessionId};

use super::{JournalError, Record, SessionSummary, Side, Verdict, parse_name, record};

/// Maximum length of a first record, in bytes. A peer may have many names.
const MAX_RECORD_BYTES: u64 = 1 << 20;

/// A session's place among the sessions of its host. Sessions of old releases, which had no
/// numbers, are listed first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Order {
    /// 0 if the session has no number.
    number: u64,
    /// Seconds since 1970, by this host's clock.
    at: u64,
}

impl Order {
    /// The place of a session with these records; the lowest if the first record is missing.
    pub(super) fn of(records: &[Record]) -> Self {
        records
            .iter()
            .find_map(|record| match record {
                Record::Open { at, order, .. } => Some(Self { number: *order, at: *at }),
                _ => None,
            })
            .unwrap_or_default()
    }

    /// Whether this session is `other` or a later one. If either has no number, because an older
    /// release wrote it, the clock decides.
    #[must_use]
    pub fn is_not_before(self, other: Self) -> bool {
        if self.number == 0 || other.number == 0 {
            self.at >= other.at
        } else {
            self.number >= other.number
        }
    }
}

/// The number of the next session in a directory. Unreadable journals are ignored, so that they do
/// not keep other guests from moving.
///
/// # Errors
/// The directory cannot be listed.
pub(super) fn next(directory: &Path) -> Result<u64, JournalError> {
    let failed = |source| JournalError::Io { action: "list", path: directory.to_owned(), source };
    let mut largest = 0;
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_journal = entry.file_name().to_str().is_some_and(|name| parse_name(name).is_some());
        if is_journal && let Some(Record::Open { order, .. }) = first_record(&entry.path()) {
            largest = largest.max(order);
        }
    }
    Ok(largest.saturating_add(1))
}

pub(super) fn first_record(path: &Path) -> Option<Record> {
    let mut line = Vec::new();
    let file = File::open(path).ok()?;
    BufReader::new(file).take(MAX_RECORD_BYTES).read_until(b'\n', &mut line).ok()?;
    record::decode_line(line.strip_suffix(b"\n")?).ok()?
}

/// Seconds since 1970, for people.
pub(super) fn now_seconds() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs())
}

/// The sessions of a guest that this host, as the source, left unfinished and that still matter. If
/// the guest has returned since, a later promise counts instead. A migration to the same host does
/// not count as a return.
#[must_use]
pub fn unfinished<'a>(
    sessions: &'a [SessionSummary],
    guest: &GuestIdentity,
) -> Vec<&'a SessionSummary> {
    let ours = || sessions.iter().filter(|session| session.guest() == Some(guest));
    let arrived = |candidate: &&SessionSummary| {
        candidate.side == Side::Destination && candidate.verdict == Verdict::Here
    };
    let arrivals: Vec<&SessionSummary> = ours().filter(arrived).collect();
    ours()
        .filter(|candidate| candidate.is_unfinished_source())
        .filter(|candidate| {
            let mut others = arrivals.iter().filter(|arrival| arrival.session != candidate.session);
            others.all(|arrival| candidate.order().is_not_before(arrival.order()))
        })
        .collect()
}

/// What happened to a guest after one of its sessions, according to this host's journals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaterSession {
    /// Nothing: the session's word is the last one. Later attempts failed and left the guest here.
    None,
    /// This session sent the guest again, so the older session's word no longer counts.
    SentAgain(SessionId),
    /// This session sent the guest away, possibly before the one in question: one of the two has no
    /// number, and by the clock, which may have jumped, it was later.
    Unclear(SessionId),
}

/// What happened to the guest after a source's session.
#[must_use]
pub fn later_session(sessions: &[SessionSummary], session: SessionId) -> LaterSession {
    later_session_on_side(sessions, session, Side::Source)
}

/// What happened to the guest after it arrived by a destination's session.
#[must_use]
pub fn later_session_after_arrival(
    sessions: &[SessionSummary],
    session: SessionId,
) -> LaterSession {
    later_session_on_side(sessions, session, Side::Destination)
}

fn later_session_on_side(
    sessions: &[SessionSummary],
    session: SessionId,
    side: Side,
) -> LaterSession {
    let ours = |candidate: &&SessionSummary| candidate.session == session && candidate.side == side;
    let Some(ours) = sessions.iter().find(ours) else { return LaterSession::None };
    let Some(guest) = ours.guest() else { return LaterSession::None };
    let has = |candidate: &SessionSummary, wanted: fn(&Record) -> bool| {
        candidate.records.iter().any(wanted)
    };
    let later = sessions
        .iter()
        .filter(|candidate| candidate.side == Side::Source && candidate.session != session)
        .filter(|candidate| {
            candidate.guest() == Some(guest) && candidate.order().is_not_before(ours.order())
        })
        .filter(|candidate| !has(candidate, |record| matches!(record, Record::Kept { .. })));
    let mut unclear = LaterSession::None;
    for candidate in later {
        let by_clock = candidate.order().number == 0 || ours.order().number == 0;
        if by_clock && has(candidate, |record| matches!(record, Record::Given { .. })) {
            unclear = LaterSession::Unclear(candidate.session);
        } else {
            return LaterSession::SentAgain(candidate.session);
        }
    }
    unclear
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tempfile::TempDir;

    use super::*;
    use crate::journal::{FileJournal, Journal, Opening, sessions, sessions_of};

    fn guest() -> GuestIdentity {
        GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() }
    }

    fn session(number: u8) -> SessionId {
        SessionId([number; 16])
    }

    /// Writes a session as another release or another clock would.
    fn write(directory: &Path, number: u8, side: Side, (at, order): (u64, u64), then: &[Record]) {
        let mut journal = FileJournal::create(directory, session(number), side).unwrap();
        let (peer, peer_names) = ("host-b".into(), vec![]);
        let (process, witness) = (None, None);
        let open = Record::Open { guest: guest(), peer, peer_names, at, order, process, witness };
        std::iter::once(&open).chain(then).for_each(|record| journal.append(record).unwrap());
    }

    fn begin(directory: &Path, number: u8, side: Side, then: &[Record]) {
        let peer = ("host-b", [].as_slice());
        let mut journal =
            FileJournal::begin(directory, session(number), side, guest(), peer).unwrap();
        then.iter().for_each(|record| journal.append(record).unwrap());
    }

    fn unfinished_sessions(directory: &TempDir) -> Vec<SessionId> {
        let sessions = sessions(directory.path()).unwrap();
        unfinished(&sessions, &guest()).iter().map(|candidate| candidate.session).collect()
    }

    #[test]
    fn unfinished_sessions_matter_until_the_guest_returns() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        begin(path, 1, Side::Source, &[Record::Commit, Record::Kept { by_operator: false }]);
        assert!(unfinished_sessions(&directory).is_empty(), "the session has ended");
        begin(path, 2, Side::Source, &[Record::Commit]);
        assert_eq!(unfinished_sessions(&directory), [session(2)], "in doubt");
        begin(path, 3, Side::Destination, &[Record::Aborted { reason: "no".into() }]);
        assert_eq!(unfinished_sessions(&directory), [session(2)], "the destination aborted");
        begin(path, 4, Side::Destination, &[Record::RunIntent]);
        assert!(unfinished_sessions(&directory).is_empty(), "a later promise keeps the guest here");
        begin(path, 5, Side::Source, &[]);
        assert_eq!(unfinished_sessions(&directory), [session(5)], "its process died before COMMIT");
    }

    /// Guests without a UUID, or restarted guests: several processes use the same name.
    #[test]
    fn sessions_in_ignores_other_processes_of_the_same_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let peer = ("host-b", [].as_slice());
        let begin_in = |number: u8, process: &str| {
            let process = Some(process.to_owned());
            let of = Opening { guest: guest(), process, witness: None };
            FileJournal::begin_for(path, session(number), Side::Source, of, peer).unwrap()
        };
        begin_in(1, "boot/7/100").append(&Record::Commit).unwrap();
        let open_in = |process: Option<&str>| {
            let sessions = super::super::sessions_in(path, &guest(), process).unwrap();
            let open = unfinished(&sessions, &guest());
            open.iter().map(|candidate| candidate.session).collect::<Vec<_>>()
        };
        assert_eq!(open_in(Some("boot/7/100")), [session(1)]);
        assert_eq!(open_in(Some("boot/7/900")), [], "the process ID was reused");
        assert_eq!(open_in(None), [session(1)], "the process is unknown");

        // A session of another process does not send this guest again.
        begin_in(2, "boot/8/200").append(&Record::Commit).unwrap();
        let sessions = super::super::sessions_in(path, &guest(), Some("boot/7/100")).unwrap();
        assert_eq!(later_session(&sessions, session(1)), LaterSession::None);
        // A session that names no process may be of any process.
        begin(path, 3, Side::Source, &[Record::Commit]);
        assert_eq!(open_in(Some("boot/7/900")), [session(3)]);
    }

    #[test]
    fn order_survives_a_clock_that_jumps_back() {
        // The guest was committed at noon, and returned when this host's clock said nine o'clock.
        let (noon, nine) = (43_200, 32_400);
        let come = [Record::RunIntent];
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), 1, Side::Source, (noon, 1), &[Record::Commit]);
        write(directory.path(), 2, Side::Destination, (nine, 2), &come);
        assert!(
            unfinished_sessions(&directory).is_empty(),
            "the guest is here, regardless of the clock"
        );
        let order: Vec<_> =
            sessions(directory.path()).unwrap().iter().map(|candidate| candidate.session).collect();
        assert_eq!(order, [session(1), session(2)]);

        // Negative control: without numbers the clock decides, and the running guest would count as
        // left open.
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), 1, Side::Source, (noon, 0), &[Record::Commit]);
        write(directory.path(), 2, Side::Destination, (nine, 0), &come);
        assert_eq!(unfinished_sessions(&directory), [session(1)]);
    }

    #[test]
    fn order_survives_a_clock_that_jumps_forward() {
        // The guest arrived at nine by a clock that was a day ahead, and was committed at noon.
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), 1, Side::Destination, (118_800, 1), &[Record::RunIntent]);
        write(directory.path(), 2, Side::Source, (43_200, 2), &[Record::Commit]);
        assert_eq!(unfinished_sessions(&directory), [session(2)], "the session is still in doubt");
    }

    #[test]
    fn order_uses_the_clock_for_journals_without_numbers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        write(path, 1, Side::Source, (1_600_000_000, 0), &[Record::Commit]);
        write(path, 2, Side::Source, (1_500_000_000, 0), &[Record::Commit]);
        assert_eq!(unfinished_sessions(&directory), [session(2), session(1)]);
        begin(path, 3, Side::Destination, &[Record::RunIntent]);
        assert!(unfinished_sessions(&directory).is_empty(), "written by an older release");
        begin(path, 4, Side::Source, &[Record::Commit]);
        assert_eq!(unfinished_sessions(&directory), [session(4)]);
        write(path, 5, Side::Destination, (4_000_000_000, 0), &[Record::RunIntent]);
        assert!(
            unfinished_sessions(&directory).is_empty(),
            "written by an older release after a rollback"
        );
    }

    #[test]
    fn later_session_ignores_earlier_failed_and_other_sessions() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let later = || later_session(&sessions(path).unwrap(), session(2));
        let kept = Record::Kept { by_operator: false };
        begin(path, 1, Side::Source, &[Record::Commit, Record::Given { by_operator: false }]);
        begin(path, 2, Side::Source, std::slice::from_ref(&kept));
        let other = GuestIdentity { uuid: uuid::Uuid::max(), name: "db".into() };
        let peer = ("host-b", [].as_slice());
        let mut journal = FileJournal::begin(path, session(3), Side::Source, other, peer).unwrap();
        journal.append(&Record::Commit).unwrap();
        begin(path, 4, Side::Destination, &[Record::Aborted { reason: "no".into() }]);
        begin(path, 5, Side::Source, &[Record::Commit, kept]);
        assert_eq!(later(), LaterSession::None, "earlier, of another guest, or failed");
        begin(path, 6, Side::Source, &[]);
        assert_eq!(later(), LaterSession::SentAgain(session(6)), "a running session");
        assert_eq!(later_session(&[], session(2)), LaterSession::None, "no journals");
    }

    #[test]
    fn later_session_after_arrival_finds_the_session_that_sent_the_guest_on() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let later = || later_session_after_arrival(&sessions(path).unwrap(), session(2));
        begin(path, 1, Side::Source, &[Record::Commit]);
        begin(path, 2, Side::Destination, &[Record::RunIntent]);
        assert_eq!(later(), LaterSession::None, "that session ended before the guest arrived");
        begin(path, 3, Side::Source, &[Record::Kept { by_operator: false }]);
        assert_eq!(later(), LaterSession::None, "a failed attempt");
        begin(path, 4, Side::Source, &[Record::Commit]);
        assert_eq!(later(), LaterSession::SentAgain(session(4)));
    }

    #[test]
    fn later_session_is_unclear_without_a_number() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let given = [Record::Commit, Record::Given { by_operator: false }];
        begin(path, 1, Side::Source, &[]);
        let later = || later_session(&sessions(path).unwrap(), session(1));
        write(path, 2, Side::Source, (1_600_000_000, 0), &given);
        assert_eq!(later(), LaterSession::None, "long before by the clock");
        write(path, 3, Side::Source, (4_000_000_000, 0), &given);
        assert_eq!(later(), LaterSession::Unclear(session(3)));
        write(path, 4, Side::Source, (4_000_000_000, 0), &[Record::Commit]);
        assert_eq!(later(), LaterSession::SentAgain(session(4)), "the other host may run it");
    }

    #[test]
    fn sessions_of_ignores_damaged_journals_of_other_guests() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        begin(path, 1, Side::Source, &[Record::Commit]);
        let other = GuestIdentity { uuid: uuid::Uuid::max(), name: "db".into() };
        let damage = |number: u8, guest: &GuestIdentity| {
            let peer = ("host-b", [].as_slice());
            let begun =
                FileJournal::begin(path, session(number), Side::Source, guest.clone(), peer);
            let file = begun.unwrap().path().to_owned();
            let mut bytes = std::fs::read(&file).unwrap();
            bytes.extend_from_slice(b"00000000 {}\n00000000 {}\n");
            std::fs::write(file, bytes).unwrap();
        };
        damage(2, &other);
        assert!(sessions(path).is_err());
        let found = sessions_of(path, &guest()).unwrap();
        assert_eq!(
            found.iter().map(|candidate| candidate.session).collect::<Vec<_>>(),
            [session(1)]
        );
        damage(3, &guest());
        assert!(sessions_of(path, &guest()).is_err(), "this session may have given the guest away");
    }

    #[test]
    fn unfinished_includes_a_migration_to_the_same_host() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        begin(path, 1, Side::Source, &[Record::Commit]);
        begin(path, 1, Side::Destination, &[Record::RunIntent]);
        assert_eq!(unfinished_sessions(&directory), [session(1)], "the guest must not be resumed");
    }

    #[test]
    fn next_exceeds_the_largest_number_and_ignores_unreadable_journals() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        assert_eq!(next(path).unwrap(), 1);
        write(path, 1, Side::Source, (0, 41), &[]);
        std::fs::write(path.join("notes"), "0").unwrap();
        let torn = format!("{}.source.journal", session(9));
        std::fs::write(path.join(torn), "01234567 {\"record\":\"op").unwrap();
        assert_eq!(next(path).unwrap(), 42);
        begin(path, 2, Side::Destination, &[]);
        assert_eq!(next(path).unwrap(), 43);
    }
}
