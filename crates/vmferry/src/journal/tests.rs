//! Journals as they are found: whole, torn, damaged, led by others.

use super::*;

fn session() -> SessionId {
    SessionId([7; 16])
}

fn open() -> Record {
    Record::Open {
        guest: GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() },
        peer: "host-b".into(),
        peer_names: vec![],
        at: 1,
    }
}

#[test]
fn records_come_back_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let mut journal = FileJournal::create(directory.path(), session(), Side::Source).unwrap();
    journal.append(&open()).unwrap();
    journal.append(&Record::Commit).unwrap();
    let found = sessions(directory.path()).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].records, [open(), Record::Commit]);
    assert_eq!(found[0].verdict, Verdict::InDoubt);
}

#[test]
fn a_torn_tail_at_any_byte_is_a_record_never_written() {
    let directory = tempfile::tempdir().unwrap();
    let mut journal = FileJournal::create(directory.path(), session(), Side::Destination).unwrap();
    journal.append(&open()).unwrap();
    let keep = std::fs::metadata(journal.path()).unwrap().len();
    journal.append(&Record::RunIntent).unwrap();
    let whole = std::fs::read(journal.path()).unwrap();
    let path = journal.path().to_owned();
    drop(journal);
    for cut in keep as usize..whole.len() {
        std::fs::write(&path, &whole[..cut]).unwrap();
        assert_eq!(
            recovered_word(directory.path(), session()).unwrap(),
            SessionWord::Aborted,
            "cut at {cut}"
        );
    }
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(recovered_word(directory.path(), session()).unwrap(), SessionWord::Owns);
}

#[test]
fn damage_before_the_end_gives_no_word() {
    let directory = tempfile::tempdir().unwrap();
    let mut journal = FileJournal::create(directory.path(), session(), Side::Destination).unwrap();
    journal.append(&open()).unwrap();
    journal.append(&Record::RunIntent).unwrap();
    let mut bytes = std::fs::read(journal.path()).unwrap();
    bytes[12] ^= 1;
    std::fs::write(journal.path(), &bytes).unwrap();
    assert!(matches!(
        recovered_word(directory.path(), session()),
        Err(JournalError::Damaged { line: 1, .. })
    ));
}

#[test]
fn an_unknown_session_is_unknown_and_not_aborted() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(recovered_word(directory.path(), session()).unwrap(), SessionWord::Unknown);
    assert!(sessions(&directory.path().join("missing")).unwrap().is_empty());
}

#[test]
fn a_damaged_last_line_gives_no_word_either() {
    let directory = tempfile::tempdir().unwrap();
    let mut journal = FileJournal::create(directory.path(), session(), Side::Destination).unwrap();
    journal.append(&open()).unwrap();
    journal.append(&Record::RunIntent).unwrap();
    let mut bytes = std::fs::read(journal.path()).unwrap();
    let end = bytes.len();
    bytes[end - 3] ^= 1;
    std::fs::write(journal.path(), &bytes).unwrap();
    // The guest may run by this promise: ABORTED would make it two.
    assert!(matches!(
        recovered_word(directory.path(), session()),
        Err(JournalError::Damaged { line: 2, .. })
    ));
}

#[test]
fn what_was_left_open_matters_until_the_guest_comes_back() {
    let directory = tempfile::tempdir().unwrap();
    let Record::Open { guest, .. } = open() else { unreachable!() };
    let write = |number: u8, side: Side, at: u64, records: &[Record]| {
        let session = SessionId([number; 16]);
        let mut journal = FileJournal::create(directory.path(), session, side).unwrap();
        let (peer, peer_names) = ("host-b".into(), vec![]);
        journal.append(&Record::Open { guest: guest.clone(), peer, peer_names, at }).unwrap();
        records.iter().for_each(|record| journal.append(record).unwrap());
    };
    let found = || {
        let sessions = sessions(directory.path()).unwrap();
        unfinished(&sessions, &guest).iter().map(|one| one.opened_at()).collect::<Vec<_>>()
    };
    write(1, Side::Source, 10, &[Record::Commit, Record::Kept { by_operator: false }]);
    assert!(found().is_empty(), "it has an end");
    write(2, Side::Source, 20, &[Record::Commit]);
    assert_eq!(found(), [20], "in doubt");
    write(3, Side::Destination, 30, &[Record::Aborted { reason: "no".into() }]);
    assert_eq!(found(), [20], "nobody came");
    write(4, Side::Destination, 40, &[Record::RunIntent]);
    assert!(found().is_empty(), "the guest is here by a later promise");
    write(5, Side::Source, 50, &[]);
    assert_eq!(found(), [50], "its process has died before COMMIT");
}

#[test]
fn a_session_that_a_process_leads_is_not_aborted_by_another() {
    let directory = tempfile::tempdir().unwrap();
    let mut journal = FileJournal::create(directory.path(), session(), Side::Destination).unwrap();
    journal.append(&open()).unwrap();
    let word = || recovered_word(directory.path(), session()).unwrap();
    assert_eq!(word(), SessionWord::Pending);
    journal.append(&Record::RunIntent).unwrap();
    assert_eq!(word(), SessionWord::Owns);
    assert!(matches!(
        FileJournal::reopen(directory.path(), session(), Side::Destination),
        Err(JournalError::InUse { .. })
    ));
    drop(journal);
    assert_eq!(word(), SessionWord::Owns);
}

#[test]
fn a_session_is_overtaken_by_a_later_one_that_did_not_fail() {
    let directory = tempfile::tempdir().unwrap();
    let Record::Open { guest, .. } = open() else { unreachable!() };
    let other = GuestIdentity { uuid: uuid::Uuid::max(), name: "db".into() };
    let write = |number: u8, guest: &GuestIdentity, side: Side, at: u64, records: &[Record]| {
        let session = SessionId([number; 16]);
        let mut journal = FileJournal::create(directory.path(), session, side).unwrap();
        let (peer, peer_names, guest) = ("host-b".into(), vec![], guest.clone());
        journal.append(&Record::Open { guest, peer, peer_names, at }).unwrap();
        records.iter().for_each(|record| journal.append(record).unwrap());
    };
    let overtaken = || {
        let sessions = sessions(directory.path()).unwrap();
        is_overtaken(&sessions, SessionId([2; 16]))
    };
    let kept = Record::Kept { by_operator: false };
    write(1, &guest, Side::Source, 10, &[Record::Commit, Record::Given { by_operator: false }]);
    write(2, &guest, Side::Source, 20, std::slice::from_ref(&kept));
    write(3, &other, Side::Source, 30, &[Record::Commit]);
    write(4, &guest, Side::Destination, 30, &[Record::Aborted { reason: "no".into() }]);
    write(5, &guest, Side::Source, 20, &[Record::Commit, kept]);
    assert!(!overtaken(), "what was before, another guest, and an attempt that failed");
    write(6, &guest, Side::Source, 20, &[]);
    assert!(overtaken(), "one that is under way");
    assert!(!is_overtaken(&[], SessionId([2; 16])), "nothing is known");
}
