//! What came first in a directory of journals.
//!
//! A host's clock may jump back by hours, and then says that a guest left before it came. So each session has a
//! number, one more than the largest in the directory when it begins, and the clock is for people only.
//!
//! No lock guards the number, and none is needed. Two sessions get the same one only if neither had its first
//! record on disk when the other looked. Those of one guest never do: it leaves a host after the record by which it
//! came there was synced, and comes back after the record by which it left was. Where a host migrates a guest to
//! itself, the source has written its record before it announces the guest.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use crate::{GuestIdentity, SessionId};

use super::{JournalError, Record, SessionSummary, Side, Verdict, parse_name, record};

/// The longest first record that is looked at, in bytes: a peer may have many names.
const MOST_RECORD_BYTES: u64 = 1 << 20;

/// A session's place among those of its host. Those of releases that had no numbers come first where they are listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Order {
    /// 0 for none.
    number: u64,
    /// Seconds since 1970, by this host's clock.
    at: u64,
}

impl Order {
    /// By a journal's records; the lowest without the first.
    pub(super) fn of(records: &[Record]) -> Self {
        records
            .iter()
            .find_map(|record| match record {
                Record::Open { at, order, .. } => Some(Self { number: *order, at: *at }),
                _ => None,
            })
            .unwrap_or_default()
    }

    /// Whether a session is the same or a later one. Beside one without a number, of the release before or of one that
    /// was gone back to, the clock decides.
    #[must_use]
    pub fn is_not_before(self, other: Self) -> bool {
        if self.number == 0 || other.number == 0 {
            self.at >= other.at
        } else {
            self.number >= other.number
        }
    }
}

/// The number of the next session in a directory. A journal that can't be read counts for nothing: it must not keep
/// other guests from moving.
///
/// # Errors
/// If the directory can't be listed.
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
    BufReader::new(file).take(MOST_RECORD_BYTES).read_until(b'\n', &mut line).ok()?;
    record::decode_line(line.strip_suffix(b"\n")?).ok()?
}

/// Seconds since 1970, for people.
pub(super) fn now_seconds() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs())
}

/// The sessions of a guest that this host has left open as a source, and that still matter: a guest that has come
/// back since is here by a later promise. What a host promises to itself counts as no return.
#[must_use]
pub fn unfinished<'a>(
    sessions: &'a [SessionSummary],
    guest: &GuestIdentity,
) -> Vec<&'a SessionSummary> {
    let ours = || sessions.iter().filter(|session| session.guest() == Some(guest));
    let arrived =
        |one: &&SessionSummary| one.side == Side::Destination && one.verdict == Verdict::Here;
    let arrivals: Vec<&SessionSummary> = ours().filter(arrived).collect();
    ours()
        .filter(|one| one.is_unfinished_source())
        .filter(|one| {
            let mut others = arrivals.iter().filter(|arrival| arrival.session != one.session);
            others.all(|arrival| one.order().is_not_before(arrival.order()))
        })
        .collect()
}

/// What became of a guest after one of its sessions, as far as the journals of this host know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// Nothing: the session's word about it is the last one. A later attempt that has failed has left it here.
    Nothing,
    /// It was sent again by this session, so that the older one's word counts no more.
    SentAgain(SessionId),
    /// It was sent away by this session, and nobody knows whether that was before: one of the two has no number, and
    /// by the clock, which may have jumped, it was after.
    Unclear(SessionId),
}

/// What became of the guest of a source's session since.
#[must_use]
pub fn since(sessions: &[SessionSummary], session: SessionId) -> Since {
    since_side(sessions, session, Side::Source)
}

/// What became of the guest of a destination's session since it came.
#[must_use]
pub fn since_arrival(sessions: &[SessionSummary], session: SessionId) -> Since {
    since_side(sessions, session, Side::Destination)
}

fn since_side(sessions: &[SessionSummary], session: SessionId, side: Side) -> Since {
    let ours = |one: &&SessionSummary| one.session == session && one.side == side;
    let Some(ours) = sessions.iter().find(ours) else { return Since::Nothing };
    let Some(guest) = ours.guest() else { return Since::Nothing };
    let has = |one: &SessionSummary, wanted: fn(&Record) -> bool| one.records.iter().any(wanted);
    let later = sessions
        .iter()
        .filter(|one| one.side == Side::Source && one.session != session)
        .filter(|one| one.guest() == Some(guest) && one.order().is_not_before(ours.order()))
        .filter(|one| !has(one, |record| matches!(record, Record::Kept { .. })));
    let mut unclear = Since::Nothing;
    for one in later {
        let by_clock = one.order().number == 0 || ours.order().number == 0;
        if by_clock && has(one, |record| matches!(record, Record::Given { .. })) {
            unclear = Since::Unclear(one.session);
        } else {
            return Since::SentAgain(one.session);
        }
    }
    unclear
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tempfile::TempDir;

    use super::*;
    use crate::journal::{FileJournal, Journal, sessions, sessions_of};

    fn guest() -> GuestIdentity {
        GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() }
    }

    fn session(number: u8) -> SessionId {
        SessionId([number; 16])
    }

    /// A session as another version or another clock has written it.
    fn write(directory: &Path, number: u8, side: Side, (at, order): (u64, u64), then: &[Record]) {
        let mut journal = FileJournal::create(directory, session(number), side).unwrap();
        let (peer, peer_names) = ("host-b".into(), vec![]);
        let open = Record::Open { guest: guest(), peer, peer_names, at, order, process: None };
        std::iter::once(&open).chain(then).for_each(|record| journal.append(record).unwrap());
    }

    fn begin(directory: &Path, number: u8, side: Side, then: &[Record]) {
        let peer = ("host-b", [].as_slice());
        let mut journal =
            FileJournal::begin(directory, session(number), side, guest(), peer).unwrap();
        then.iter().for_each(|record| journal.append(record).unwrap());
    }

    fn left_open(directory: &TempDir) -> Vec<SessionId> {
        let sessions = sessions(directory.path()).unwrap();
        unfinished(&sessions, &guest()).iter().map(|one| one.session).collect()
    }

    #[test]
    fn what_was_left_open_matters_until_the_guest_comes_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        begin(path, 1, Side::Source, &[Record::Commit, Record::Kept { by_operator: false }]);
        assert!(left_open(&directory).is_empty(), "it has an end");
        begin(path, 2, Side::Source, &[Record::Commit]);
        assert_eq!(left_open(&directory), [session(2)], "in doubt");
        begin(path, 3, Side::Destination, &[Record::Aborted { reason: "no".into() }]);
        assert_eq!(left_open(&directory), [session(2)], "nobody came");
        begin(path, 4, Side::Destination, &[Record::RunIntent]);
        assert!(left_open(&directory).is_empty(), "the guest is here by a later promise");
        begin(path, 5, Side::Source, &[]);
        assert_eq!(left_open(&directory), [session(5)], "its process has died before COMMIT");
    }

    /// Guests without a UUID, or a guest that was started again: one process after another has the
    /// same name.
    #[test]
    fn what_another_process_has_promised_concerns_no_guest_of_that_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let peer = ("host-b", [].as_slice());
        let begin_in = |number: u8, process: &str| {
            let guest = (guest(), Some(process.to_owned()));
            let side = Side::Source;
            FileJournal::begin_for(path, session(number), side, guest, peer).unwrap()
        };
        begin_in(1, "boot/7/100").append(&Record::Commit).unwrap();
        let open_in = |process: Option<&str>| {
            let sessions = super::super::sessions_in(path, &guest(), process).unwrap();
            let open = unfinished(&sessions, &guest());
            open.iter().map(|one| one.session).collect::<Vec<_>>()
        };
        assert_eq!(open_in(Some("boot/7/100")), [session(1)]);
        assert_eq!(open_in(Some("boot/7/900")), [], "its number has come again");
        assert_eq!(open_in(None), [session(1)], "nobody knows which process it is");

        // Nor is a guest that was paused and promised by nobody taken for one that was sent again.
        begin_in(2, "boot/8/200").append(&Record::Commit).unwrap();
        let sessions = super::super::sessions_in(path, &guest(), Some("boot/7/100")).unwrap();
        assert_eq!(since(&sessions, session(1)), Since::Nothing);
        // One of a release that wrote no process may be any.
        begin(path, 3, Side::Source, &[Record::Commit]);
        assert_eq!(open_in(Some("boot/7/900")), [session(3)]);
    }

    #[test]
    fn a_clock_that_jumps_back_turns_nothing_round() {
        // The guest was promised away at noon, and has come back at what this host's clock took for nine o'clock.
        let (noon, nine) = (43_200, 32_400);
        let come = [Record::RunIntent];
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), 1, Side::Source, (noon, 1), &[Record::Commit]);
        write(directory.path(), 2, Side::Destination, (nine, 2), &come);
        assert!(left_open(&directory).is_empty(), "it is here, whatever the clock says");
        let order: Vec<_> =
            sessions(directory.path()).unwrap().iter().map(|one| one.session).collect();
        assert_eq!(order, [session(1), session(2)]);

        // Negative control: without numbers the clock decides, and the guest that runs here would be asked away.
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), 1, Side::Source, (noon, 0), &[Record::Commit]);
        write(directory.path(), 2, Side::Destination, (nine, 0), &come);
        assert_eq!(left_open(&directory), [session(1)]);
    }

    #[test]
    fn a_clock_that_jumps_forward_and_is_set_right_turns_nothing_round() {
        // It came at nine, by a clock that was a day ahead, and was promised away at noon.
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), 1, Side::Destination, (118_800, 1), &[Record::RunIntent]);
        write(directory.path(), 2, Side::Source, (43_200, 2), &[Record::Commit]);
        assert_eq!(left_open(&directory), [session(2)], "it is still in doubt");
    }

    #[test]
    fn beside_journals_without_numbers_the_clock_decides() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        write(path, 1, Side::Source, (1_600_000_000, 0), &[Record::Commit]);
        write(path, 2, Side::Source, (1_500_000_000, 0), &[Record::Commit]);
        assert_eq!(left_open(&directory), [session(2), session(1)]);
        begin(path, 3, Side::Destination, &[Record::RunIntent]);
        assert!(left_open(&directory).is_empty(), "written by the release before");
        begin(path, 4, Side::Source, &[Record::Commit]);
        assert_eq!(left_open(&directory), [session(4)]);
        write(path, 5, Side::Destination, (4_000_000_000, 0), &[Record::RunIntent]);
        assert!(left_open(&directory).is_empty(), "by a release that was gone back to");
    }

    #[test]
    fn a_session_is_overtaken_by_a_later_one_that_did_not_fail() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let what = || since(&sessions(path).unwrap(), session(2));
        let kept = Record::Kept { by_operator: false };
        begin(path, 1, Side::Source, &[Record::Commit, Record::Given { by_operator: false }]);
        begin(path, 2, Side::Source, std::slice::from_ref(&kept));
        let other = GuestIdentity { uuid: uuid::Uuid::max(), name: "db".into() };
        let peer = ("host-b", [].as_slice());
        let mut journal = FileJournal::begin(path, session(3), Side::Source, other, peer).unwrap();
        journal.append(&Record::Commit).unwrap();
        begin(path, 4, Side::Destination, &[Record::Aborted { reason: "no".into() }]);
        begin(path, 5, Side::Source, &[Record::Commit, kept]);
        assert_eq!(what(), Since::Nothing, "before, another guest, and an attempt that failed");
        begin(path, 6, Side::Source, &[]);
        assert_eq!(what(), Since::SentAgain(session(6)), "one that is under way");
        assert_eq!(since(&[], session(2)), Since::Nothing, "nothing is known");
    }

    #[test]
    fn since_arrival_finds_the_session_that_sent_the_guest_on() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let what = || since_arrival(&sessions(path).unwrap(), session(2));
        begin(path, 1, Side::Source, &[Record::Commit]);
        begin(path, 2, Side::Destination, &[Record::RunIntent]);
        assert_eq!(what(), Since::Nothing, "it was sent away before it came back");
        begin(path, 3, Side::Source, &[Record::Kept { by_operator: false }]);
        assert_eq!(what(), Since::Nothing, "an attempt that failed");
        begin(path, 4, Side::Source, &[Record::Commit]);
        assert_eq!(what(), Since::SentAgain(session(4)));
    }

    #[test]
    fn a_session_without_a_number_that_gave_the_guest_away_may_have_been_before() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let given = [Record::Commit, Record::Given { by_operator: false }];
        begin(path, 1, Side::Source, &[]);
        let what = || since(&sessions(path).unwrap(), session(1));
        write(path, 2, Side::Source, (1_600_000_000, 0), &given);
        assert_eq!(what(), Since::Nothing, "long before, by the clock");
        write(path, 3, Side::Source, (4_000_000_000, 0), &given);
        assert_eq!(what(), Since::Unclear(session(3)));
        write(path, 4, Side::Source, (4_000_000_000, 0), &[Record::Commit]);
        assert_eq!(what(), Since::SentAgain(session(4)), "somebody may still run it there");
    }

    #[test]
    fn a_damaged_journal_of_another_guest_is_no_hindrance() {
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
        let its = sessions_of(path, &guest()).unwrap();
        assert_eq!(its.iter().map(|one| one.session).collect::<Vec<_>>(), [session(1)]);
        damage(3, &guest());
        assert!(sessions_of(path, &guest()).is_err(), "this one may have given it away");
    }

    #[test]
    fn what_a_host_promises_to_itself_is_no_return() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        begin(path, 1, Side::Source, &[Record::Commit]);
        begin(path, 1, Side::Destination, &[Record::RunIntent]);
        assert_eq!(left_open(&directory), [session(1)], "its QEMU must not be continued");
    }

    #[test]
    fn the_next_number_is_past_the_largest_and_past_what_can_not_be_read() {
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
