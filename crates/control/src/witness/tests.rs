use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use parking_lot::Mutex;
use vmferry::VmError;
use vmferry::witness::{Register, Witness, WitnessId, WitnessRequest};
use vmferry_handover::{GuestIdentity, SessionId, SessionWord};

use super::*;

/// A store in memory.
#[derive(Debug)]
struct Store {
    name: &'static str,
    sessions: Mutex<BTreeMap<SessionId, Register>>,
}

impl Store {
    fn new(name: &'static str) -> Arc<Self> {
        Arc::new(Self { name, sessions: Mutex::default() })
    }
}

impl Witness for Store {
    fn id(&self) -> WitnessId {
        WitnessId::new(self.name).unwrap()
    }

    fn open(&self, session: SessionId, _: &GuestIdentity) -> Result<Register, VmError> {
        self.ask(session, Some(WitnessRequest::Open))
    }

    fn ask(
        &self,
        session: SessionId,
        request: Option<WitnessRequest>,
    ) -> Result<Register, VmError> {
        if session == SessionId([0xFF; 16]) {
            return Err("the store is silent".into());
        }
        let mut sessions = self.sessions.lock();
        let register = sessions.entry(session).or_insert(Register::Unopened);
        if let Some(request) = request {
            *register = register.after(request);
        }
        Ok(*register)
    }
}

const SESSION: SessionId = SessionId([7; 16]);

fn guest() -> GuestIdentity {
    GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() }
}

#[test]
fn questions_and_answers_round_trip() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("witness");
    let server = WitnessServer::bind(&path, Store::new("w")).unwrap();
    let client = SocketWitness::connect(&path).unwrap();
    assert_eq!(client.id().as_str(), "w");
    assert_eq!(client.ask(SESSION, None).unwrap(), Register::Unopened);
    assert_eq!(client.open(SESSION, &guest()).unwrap(), Register::Open);
    let claimed = client.ask(SESSION, Some(WitnessRequest::Claim)).unwrap();
    assert_eq!(claimed, Register::Claimed);
    let register = client.ask(SESSION, Some(WitnessRequest::TakeBack)).unwrap();
    assert_eq!(register, Register::Claimed);
    let error = client.ask(SessionId([0xFF; 16]), None).unwrap_err().to_string();
    assert!(error.ends_with(": the store is silent"), "{error}");
    let report = WitnessRequest::Report(SessionWord::Owns);
    for request in [WitnessRequest::Open, WitnessRequest::Free, report] {
        let error = client.ask(SESSION, Some(request)).unwrap_err().to_string();
        assert!(error.contains("can't be asked for at a socket"), "{error}");
    }
    drop(server);
    assert!(!path.exists());
    let error = client.ask(SESSION, None).unwrap_err().to_string();
    assert!(error.contains("no process provides a witness at"), "{error}");
}

#[test]
fn witness_with_another_name_does_not_answer() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("witness");
    let server = WitnessServer::bind(&path, Store::new("before")).unwrap();
    let client = SocketWitness::connect(&path).unwrap();
    drop(server);
    let store = Store::new("restored");
    let _server = WitnessServer::bind(&path, Arc::clone(&store) as Arc<dyn Witness>).unwrap();
    let asked = client.ask(SESSION, Some(WitnessRequest::TakeBack));
    for error in [asked.unwrap_err(), client.open(SESSION, &guest()).unwrap_err()] {
        let error = error.to_string();
        assert!(error.contains("the session's witness is before, and this one is rest"), "{error}");
    }
    assert!(store.sessions.lock().is_empty());
    let named = SocketWitness::named(&path, WitnessId::new("restored").unwrap());
    assert_eq!(named.ask(SESSION, None).unwrap(), Register::Unopened);
}

#[test]
fn server_survives_clients_that_say_nonsense_or_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("witness");
    let _server = WitnessServer::bind(&path, Store::new("w")).unwrap();
    let _silent = UnixStream::connect(&path).unwrap();
    for text in ["\n", "{}\n", "\"name\"", "{\"register\":7}\n", "\u{0}\n", &"x".repeat(9000)] {
        let mut client = UnixStream::connect(&path).unwrap();
        // The server may answer, and close the connection, before it has read all.
        let _ = client.write_all(text.as_bytes());
    }
    let client = SocketWitness::connect(&path).unwrap();
    assert_eq!(client.open(SESSION, &guest()).unwrap(), Register::Open);
    assert_eq!(client.ask(SESSION, Some(WitnessRequest::Claim)).unwrap(), Register::Claimed);
}

#[test]
fn process_that_is_no_witness_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("other");
    let listener = UnixListener::bind(&path).unwrap();
    for text in ["hello\n", "{\"register\":\"lent\"}\n", "{\"register\":\"open\"}\n"] {
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                // Read first: closing with unread bytes would reset the connection.
                let mut question = String::new();
                std::io::BufRead::read_line(&mut std::io::BufReader::new(&stream), &mut question)
                    .unwrap();
                stream.write_all(text.as_bytes()).unwrap();
            });
            SocketWitness::connect(&path).unwrap_err().to_string()
        });
        assert!(error.contains("gave no answer that this release understands"), "{error}");
    }
}
