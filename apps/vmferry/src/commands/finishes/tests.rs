//! Journals as daemons leave them, alive and dead.

use vmferry_handover::FinishWord;
use vmferry_handover::journal::RecordFile;

use super::*;

fn open(name: &str, peer: &str, peer_names: &[&str]) -> FinishRecord {
    FinishRecord::Open {
        guest: GuestIdentity { uuid: Uuid::max(), name: name.into() },
        peer: peer.into(),
        peer_names: peer_names.iter().map(|name| (*name).to_owned()).collect(),
    }
}

/// Writes a session's records, one each second, and returns the journal, which is led until it is
/// dropped.
fn write(
    directory: &Path,
    number: u8,
    side: Side,
    records: &[FinishRecord],
) -> RecordFile<FinishEntry> {
    let session = SessionId([number; 16]);
    let mut journal = RecordFile::create(directory, session, side).unwrap();
    for (second, record) in records.iter().enumerate() {
        let at = 1_700_000_000 + u64::from(number) * 100 + second as u64;
        journal.write(&FinishEntry { record: record.clone(), at }).unwrap();
    }
    journal
}

fn answered(word: FinishWord, by_operator: bool) -> FinishRecord {
    FinishRecord::Answered { word, by_operator }
}

fn look(said: &str, seen: DomainSeen) -> DomainLook {
    DomainLook { said: said.into(), seen }
}

#[test]
fn journals_of_both_sides_name_the_owner_and_the_evidence() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path();
    let ours = open("web", "host-b", &[]);
    let theirs = open("db", "192.0.2.1:7002", &["spiffe://vmferry/host/host-c"]);
    drop(write(path, 2, Side::Source, &[ours.clone(), FinishRecord::Sent]));
    let runs = answered(FinishWord::Runs, false);
    drop(write(path, 1, Side::Destination, &[theirs.clone(), FinishRecord::Passed, runs]));
    let led = write(path, 3, Side::Destination, &[theirs, FinishRecord::Passed]);
    let found = Finishes::read(path).unwrap();
    let numbers: Vec<u8> = found.all.iter().map(|one| one.session.0[0]).collect();
    assert_eq!(numbers, [1, 2, 3], "the oldest is first");
    let [arrived, sent, passed] = &found.all[..] else { panic!("{found:?}") };
    assert_eq!(arrived.owner(DomainSeen::NoAnswer), FinishOwner::Destination);
    let json = arrived.to_json(None);
    assert_eq!(json["evidence"]["record"], "answered");
    assert_eq!(json["peer"], "spiffe://vmferry/host/host-c");
    let said = "has the guest: libvirt said that it runs here at 2023-11-14T22:15:02Z";
    assert_eq!(json["says"], said);
    assert!(sent.is_undecided() && !sent.led && passed.led);
    let waits = look("paused (migrating)", DomainSeen::Waits);
    let text = says(sent, Some(&waits));
    assert!(text.starts_with("IN DOUBT: sent Finish at 2023-11-14T22:16:41Z"), "{text}");
    assert!(
        text.ends_with("no daemon asks for the word; libvirt here: paused (migrating)"),
        "{text}"
    );
    assert!(advice(sent, Some(&waits)).unwrap().contains("vmferry resolve web"));
    assert_eq!(passed.owner(DomainSeen::Runs), FinishOwner::Destination);
    assert_eq!(passed.owner(DomainSeen::Gone), FinishOwner::Undecided);
    assert_eq!(advice(passed, Some(&waits)), None, "the answer will come");
    assert!(found.is_last(passed) && !found.is_last(arrived));
    assert_eq!(found.named("db").count(), 2);
    assert_eq!(found.named(&sent.session.to_string()).count(), 1);
    drop(led);
}

#[test]
fn paused_copies_have_advice_that_agrees_with_the_journal() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path();
    let open = open("web", "host-b", &[]);
    let does_not_run = answered(FinishWord::DoesNotRun, true);
    let records = [open.clone(), FinishRecord::Sent, does_not_run];
    drop(write(path, 1, Side::Source, &records));
    drop(write(path, 2, Side::Destination, &[open, FinishRecord::Barred]));
    let found = Finishes::read(path).unwrap();
    let waits = look("paused (migrating)", DomainSeen::Waits);
    let source = advice(&found.all[0], Some(&waits)).unwrap();
    assert!(source.contains("--source-resumes` resumes it"), "{source}");
    assert!(says(&found.all[0], None).contains("an operator decided so at 2023-"));
    let destination = advice(&found.all[1], Some(&waits)).unwrap();
    assert!(destination.contains("--source-resumes` removes it"), "{destination}");
    let runs = look("running (booted)", DomainSeen::Runs);
    assert_eq!(advice(&found.all[0], Some(&runs)), None);
    let split = look("paused (post-copy failed)", DomainSeen::Waits);
    assert!(advice(&found.all[0], Some(&split)).unwrap().contains("keep both"));
}

#[test]
fn journal_that_can_not_be_read_is_listed_with_the_reason() {
    let place = tempfile::tempdir().unwrap();
    let open = open("web", "host-b", &[]);
    drop(write(place.path(), 1, Side::Source, &[open.clone(), open]));
    let found = Finishes::read(place.path()).unwrap();
    assert!(found.all.is_empty());
    assert!(found.unreadable[0].reason.contains("contradict"), "{found:?}");
}
