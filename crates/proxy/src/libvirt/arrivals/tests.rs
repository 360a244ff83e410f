//! Sessions of a destination: who leads them, and words that can't be written at first.

use uuid::Uuid;
use vmferry_handover::journal::{RecordFile, Side};
use vmferry_handover::{FinishEntry, OperatorWord};

use super::*;

const SESSION: SessionId = SessionId([8; 16]);

#[derive(Debug)]
struct Seen(DomainSeen);

impl Domains for Seen {
    fn look(&self, _: &GuestIdentity) -> DomainState {
        DomainState::Seen(self.0)
    }
}

fn source(name: &str) -> PeerIdentity {
    PeerIdentity { names: vec![name.into()], ..PeerIdentity::default() }
}

fn begun(directory: &Path) -> Arrivals {
    let arrivals = Arrivals::default();
    let guest = Guest { name: "web".into(), uuid: Uuid::nil() };
    arrivals.begin(directory, SESSION, &guest, &source("host-a")).unwrap();
    arrivals
}

fn ask(arrivals: &Arrivals, directory: &Path, seen: DomainSeen) -> FinishAnswer {
    let domains = Seen(seen);
    arrivals.asked(directory, SESSION, &source("host-a"), Some(&domains)).unwrap()
}

fn reopened(directory: &Path) -> Result<(), JournalError> {
    RecordFile::<FinishEntry>::reopen(directory, SESSION, Side::Destination).map(drop)
}

#[test]
fn session_is_led_until_its_connection_ends() {
    let place = tempfile::tempdir().unwrap();
    let arrivals = begun(place.path());
    assert!(arrivals.pass(SESSION).unwrap());
    // libvirt's answer will come, whatever the domain's state is now.
    assert_eq!(ask(&arrivals, place.path(), DomainSeen::Runs), FinishAnswer::AskAgain);
    assert!(matches!(reopened(place.path()), Err(JournalError::InUse { .. })));
    arrivals.disconnected(SESSION);
    reopened(place.path()).unwrap();
    assert_eq!(ask(&arrivals, place.path(), DomainSeen::Gone), FinishAnswer::AskAgain);
    reopened(place.path()).unwrap();
    let runs = FinishAnswer::Word(FinishWord::Runs);
    assert_eq!(ask(&arrivals, place.path(), DomainSeen::Runs), runs);
    assert_eq!(ask(&arrivals, place.path(), DomainSeen::Gone), runs);
    let stranger = arrivals.asked(place.path(), SESSION, &source("host-c"), None).unwrap();
    assert_eq!(stranger, FinishAnswer::Unknown);
    assert!(arrivals.led.lock().is_empty());
}

#[derive(Debug)]
struct PostCopyFailed;

impl Domains for PostCopyFailed {
    fn look(&self, _: &GuestIdentity) -> DomainState {
        DomainState::PostCopyFailed
    }
}

/// The source's libvirt kills its QEMU, which has the rest of the memory, after any other word.
#[test]
fn failed_post_copy_is_not_told_as_success() {
    let place = tempfile::tempdir().unwrap();
    let arrivals = begun(place.path());
    assert!(arrivals.pass(SESSION).unwrap());
    arrivals.disconnected(SESSION);
    let word = FinishAnswer::Word(FinishWord::DoesNotRun);
    let asked =
        arrivals.asked(place.path(), SESSION, &source("host-a"), Some(&PostCopyFailed)).unwrap();
    assert_eq!(asked, word);
    assert_eq!(ask(&arrivals, place.path(), DomainSeen::Runs), word);
}

#[test]
fn word_of_an_operator_is_heard_by_a_running_daemon() {
    let place = tempfile::tempdir().unwrap();
    let arrivals = begun(place.path());
    assert!(arrivals.pass(SESSION).unwrap());
    arrivals.disconnected(SESSION);
    let reopened = Ledger::<DestinationFinish>::reopen(place.path(), SESSION).unwrap();
    let (mut ledger, _) = reopened.unwrap();
    // The operator's command leads the session now.
    let domains = Seen(DomainSeen::Runs);
    let busy = arrivals.asked(place.path(), SESSION, &source("host-a"), Some(&domains));
    assert!(matches!(busy, Err(LedgerError::Journal(JournalError::InUse { .. }))), "{busy:?}");
    let step = ledger.state().operator(OperatorWord::SourceResumes).unwrap();
    ledger.take(step).unwrap();
    drop(ledger);
    let word = FinishAnswer::Word(FinishWord::DoesNotRun);
    assert_eq!(ask(&arrivals, place.path(), DomainSeen::NoAnswer), word);
}

#[test]
fn word_that_could_not_be_written_is_not_said_and_not_forgotten() {
    let place = tempfile::tempdir().unwrap();
    let (directory, away) = (place.path().join("journals"), place.path().join("away"));
    let arrivals = begun(&directory);
    assert!(arrivals.pass(SESSION).unwrap());
    std::fs::rename(&directory, &away).unwrap();
    let replied = arrivals.reply(SESSION, FinishWord::Runs);
    assert!(matches!(replied, Err(LedgerError::Journal(_))), "{replied:?}");
    arrivals.disconnected(SESSION);
    let asked = arrivals.asked(&directory, SESSION, &source("host-a"), None);
    assert!(matches!(asked, Err(LedgerError::TooEarly)), "{asked:?}");
    assert!(arrivals.retry().is_empty(), "it is too early");
    std::fs::rename(&away, &directory).unwrap();
    let written = || {
        assert!(arrivals.retry().is_empty());
        arrivals.led.lock().is_empty()
    };
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !written() {
        assert!(std::time::Instant::now() < deadline, "it is never written");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let word = FinishAnswer::Word(FinishWord::Runs);
    assert_eq!(ask(&arrivals, &directory, DomainSeen::Gone), word);
}

#[test]
fn finish_whose_record_failed_never_ran() {
    let place = tempfile::tempdir().unwrap();
    let (directory, away) = (place.path().join("journals"), place.path().join("away"));
    let arrivals = begun(&directory);
    std::fs::rename(&directory, &away).unwrap();
    let passed = arrivals.pass(SESSION);
    assert!(matches!(passed, Err(LedgerError::Journal(_))), "{passed:?}");
    std::fs::rename(&away, &directory).unwrap();
    arrivals.disconnected(SESSION);
    let word = FinishAnswer::Word(FinishWord::DoesNotRun);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let asked = || arrivals.asked(&directory, SESSION, &source("host-a"), None);
    loop {
        match asked() {
            Ok(answer) => return assert_eq!(answer, word),
            Err(LedgerError::TooEarly) if std::time::Instant::now() < deadline => {}
            Err(error) => panic!("{error}"),
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn host_with_a_renewed_certificate_is_the_same() {
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let peer = |of: &[&str]| PeerIdentity {
        names: names(of),
        ..PeerIdentity::anonymous("192.0.2.1:1".into())
    };
    let before = names(&["spiffe://vmferry/host/a", "192.0.2.1"]);
    assert!(is_host(&before, &peer(&["spiffe://vmferry/host/a", "192.0.2.1", "2001:db8::1"])));
    assert!(!is_host(&before, &peer(&["spiffe://vmferry/host/b", "192.0.2.1"])));
    assert!(!is_host(&before, &peer(&[])));
}
