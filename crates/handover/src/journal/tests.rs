//! Journals that are complete, torn, damaged, or led by another process.

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
        order: 1,
        process: None,
        witness: None,
    }
}

#[test]
fn sessions_returns_records_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let mut journal = FileJournal::create(directory.path(), session(), Side::Source).unwrap();
    journal.append(&open()).unwrap();
    journal.append(&Record::Commit).unwrap();
    let found = sessions(directory.path()).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].records, [open(), Record::Commit]);
    assert_eq!(found[0].verdict, Verdict::InDoubt);
}

/// The records lead where the operator's word leads in a process that runs.
#[test]
fn record_of_operator_leads_to_the_state_of_the_word() {
    for commit in [Record::Commit, Record::CommitPostCopy] {
        let mut records = vec![open(), commit];
        let (doubt, kind) = (recover_source(&records).0, kind_of_source(&records));
        for word in [OperatorWord::DestinationOwns, OperatorWord::SourceResumes] {
            records.push(record_of_operator(&records, word));
            let expected = doubt.step(crate::SourceEvent::of_operator(word, kind)).0;
            assert_eq!(recover_source(&records).0, expected, "{records:?}");
            records.pop();
        }
    }
}

#[test]
fn torn_record_was_never_written() {
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
fn damaged_line_gives_no_word() {
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
fn record_of_a_newer_release_gives_no_word_and_stays_on_disk() {
    let directory = tempfile::tempdir().unwrap();
    let mut journal = FileJournal::create(directory.path(), session(), Side::Destination).unwrap();
    journal.append(&open()).unwrap();
    let path = journal.path().to_owned();
    drop(journal);
    let before = std::fs::read_to_string(&path).unwrap();
    // The checksums are the CRC-32C of the JSON.
    let optional = "8c2e7ad4 {\"record\":\"seen\",\"optional\":true}\n";
    std::fs::write(&path, format!("{before}{optional}")).unwrap();
    assert_eq!(recovered_word(directory.path(), session()).unwrap(), SessionWord::Aborted);
    let after = std::fs::read_to_string(&path).unwrap();
    assert!(after.starts_with(&format!("{before}{optional}")), "{after}");

    let mandatory = "34754bd1 {\"record\":\"lent\"}\n";
    std::fs::write(&path, format!("{before}{mandatory}")).unwrap();
    for error in [
        recovered_word(directory.path(), session()).unwrap_err(),
        sessions(directory.path()).unwrap_err(),
        FileJournal::reopen(directory.path(), session(), Side::Destination).unwrap_err(),
    ] {
        assert!(
            matches!(&error, JournalError::Newer { line: 2, record, .. } if record == "lent"),
            "{error}"
        );
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{before}{mandatory}"));
}

#[test]
fn journal_of_the_other_side_gives_no_word() {
    let directory = tempfile::tempdir().unwrap();
    let mut journal = FileJournal::create(directory.path(), session(), Side::Source).unwrap();
    journal.append(&open()).unwrap();
    journal.append(&Record::Commit).unwrap();
    drop(journal);
    let path = |side| path_of(directory.path(), session(), side);
    std::fs::rename(path(Side::Source), path(Side::Destination)).unwrap();
    let error = recovered_word(directory.path(), session()).unwrap_err();
    assert!(matches!(error, JournalError::Damaged { line: 2, .. }), "{error}");
    assert!(error.to_string().contains("a destination never writes `commit`"), "{error}");
}

#[test]
fn unknown_session_is_not_aborted() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(recovered_word(directory.path(), session()).unwrap(), SessionWord::Unknown);
    assert!(sessions(&directory.path().join("missing")).unwrap().is_empty());
}

#[test]
fn damaged_last_line_gives_no_word() {
    let directory = tempfile::tempdir().unwrap();
    let mut journal = FileJournal::create(directory.path(), session(), Side::Destination).unwrap();
    journal.append(&open()).unwrap();
    journal.append(&Record::RunIntent).unwrap();
    let mut bytes = std::fs::read(journal.path()).unwrap();
    let end = bytes.len();
    bytes[end - 3] ^= 1;
    std::fs::write(journal.path(), &bytes).unwrap();
    // The guest may run because of this promise. ABORTED would allow a second one.
    assert!(matches!(
        recovered_word(directory.path(), session()),
        Err(JournalError::Damaged { line: 2, .. })
    ));
}

#[test]
fn led_session_is_not_aborted_by_another_process() {
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
