//! A source that sends what the test wants, and what it needs to be accepted.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use vmferry::config::policy::Policy;
use vmferry_transport::pki::{self, IssueRequest, Validity};
use vmferry_transport::{
    Address, ChannelReader, ChannelWriter, Dialer, IdentityFiles, TlsIdentity,
};
use vmferry_wire::{
    CONTROL_HEADER_BYTES, ControlHeader, ControlMessage, GuestIdentity, HELLO_REPLY_BYTES, Hello,
    HelloReply, HelloStatus, PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN, Role, SessionId, Token,
};

use crate::support;

/// Bounds every wait. Reaching it is a failure.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A writer that is blocked for this long gives up: the peer does not read, and will close the
/// channel at some point.
const STUCK: Duration = Duration::from_secs(3);

/// The session of a guest that is announced manually.
pub const SESSION: SessionId = SessionId([3; 16]);

/// A certificate authority and certificates of hosts.
pub struct Pki {
    path: PathBuf,
    _directory: Option<tempfile::TempDir>,
}

impl Pki {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        pki::init(&directory.path().join("ca"), "siege", Validity::days(9)).unwrap();
        Self { path: directory.path().into(), _directory: Some(directory) }
    }

    /// The files of another process.
    pub fn at(path: PathBuf) -> Self {
        Self { path, _directory: None }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub fn files(&self, name: &str, validity: Validity) -> IdentityFiles {
        let out = self.path(name);
        if !out.exists() {
            let mut request = IssueRequest::new(name, validity);
            request.addresses = vec!["127.0.0.1".into()];
            pki::issue(&self.path("ca"), &out, &request).unwrap();
        }
        IdentityFiles::in_directory(&out)
    }

    pub fn identity(&self, name: &str) -> Arc<TlsIdentity> {
        load(self.files(name, Validity::days(1)))
    }

    pub fn revoke(&self, name: &str) -> PathBuf {
        let validity = Validity { from_days: -1, until_days: 9 };
        pki::revoke(&self.path("ca"), &[name.into()], validity).unwrap().path
    }
}

pub fn load(files: IdentityFiles) -> Arc<TlsIdentity> {
    Arc::new(TlsIdentity::new(files).unwrap())
}

/// A policy under which the source may send anything, and no other peer may.
pub fn policy(path: &Path) -> Arc<Policy> {
    let text = "[[allow]]\nsource = \"spiffe://vmferry/host/source\"\nguests = [\"*\"]\n";
    std::fs::write(path, text).unwrap();
    Arc::new(Policy::load(path).unwrap())
}

pub fn hello(role: Role, lane: u8, token: Token) -> Hello {
    let (version_min, version_max) = (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX);
    Hello { version_min, version_max, role, lane, token, attempt: 0 }
}

/// Sends a greeting. Returns the status of the answer.
pub fn greet(reader: &mut impl Read, writer: &mut impl Write, hello: Hello) -> HelloStatus {
    writer.write_all(&hello.encode()).unwrap();
    let mut reply = [0; HELLO_REPLY_BYTES];
    reader.read_exact(&mut reply).unwrap();
    HelloReply::parse(&reply).unwrap().status
}

/// One channel.
pub struct Line {
    pub reader: ChannelReader,
    pub writer: ChannelWriter,
}

impl Line {
    /// Dials with this identity if the address requires one.
    pub fn dial(address: &Address, identity: Option<&Arc<TlsIdentity>>) -> Self {
        let tls = matches!(address, Address::Tls { .. } | Address::Grpc { .. });
        let identity = identity.filter(|_| tls).cloned();
        let channel = Dialer::new(address.clone(), identity).connect().unwrap();
        let (mut reader, mut writer) = channel.split();
        reader.set_timeout(Some(PATIENCE)).unwrap();
        writer.set_timeout(Some(PATIENCE)).unwrap();
        Self { reader, writer }
    }

    pub fn greet(&mut self, hello: Hello) -> HelloStatus {
        greet(&mut self.reader, &mut self.writer, hello)
    }

    /// Writes bytes. The destination may already have closed the channel.
    pub fn write(&mut self, bytes: &[u8]) {
        let _ = self.try_write(bytes);
    }

    #[must_use]
    pub fn try_write(&mut self, bytes: &[u8]) -> bool {
        self.writer.write_all(bytes).and_then(|()| self.writer.flush()).is_ok()
    }

    pub fn give_up_writing_when_stuck(&mut self) {
        self.writer.set_timeout(Some(STUCK)).unwrap();
    }

    pub fn say(&mut self, message: &ControlMessage) {
        let mut bytes = Vec::new();
        message.encode(PROTOCOL_VERSION_MAX, &mut bytes);
        self.write(&bytes);
    }

    pub fn try_hear(&mut self) -> io::Result<ControlMessage> {
        try_message(&mut self.reader)
    }

    /// Receives the next message.
    pub fn hear(&mut self) -> ControlMessage {
        self.try_hear().unwrap()
    }

    /// Reads until the destination closes, with or without a reset.
    pub fn read_to_end(&mut self) {
        let _ = io::copy(&mut self.reader, &mut io::sink());
    }
}

fn try_message(reader: &mut impl Read) -> io::Result<ControlMessage> {
    let mut header = [0; CONTROL_HEADER_BYTES];
    reader.read_exact(&mut header)?;
    let header = ControlHeader::parse(&header).unwrap();
    let mut body = vec![0; header.body_bytes()];
    reader.read_exact(&mut body)?;
    Ok(header.decode(PROTOCOL_VERSION_MAX, &body).unwrap().message)
}

pub fn message(reader: &mut impl Read) -> ControlMessage {
    try_message(reader).unwrap()
}

/// The announcement of a guest of two slots and one lane.
pub fn begin(session: SessionId) -> ControlMessage {
    ControlMessage::Begin {
        session,
        guest: GuestIdentity { uuid: uuid::Uuid::from_u128(3), name: "stolen".into() },
        vmm: "threads".into(),
        config: Vec::new(),
        layout: support::Guest::layout(),
        lanes: 1,
        verify: false,
        reconnect_ms: 0,
        release: None,
        streams: false,
        used_bytes: Vec::new(),
        fetch_lanes: None,
        witness: None,
    }
}

pub fn announcement(session: SessionId) -> Vec<u8> {
    let mut bytes = Vec::new();
    begin(session).encode(PROTOCOL_VERSION_MAX, &mut bytes);
    bytes
}

/// The control channel of a source whose guest was accepted, and the session's token.
pub fn accepted(address: &Address, pki: &Pki, name: &str) -> (Line, Token) {
    let mut line = Line::dial(address, Some(&pki.identity(name)));
    assert_eq!(line.greet(hello(Role::Control, 0, Token([0; 16]))), HelloStatus::Ok);
    line.say(&begin(SESSION));
    match line.hear() {
        ControlMessage::Accept { token, .. } => (line, token),
        other => panic!("{other:?}"),
    }
}

/// Waits for a message of a thread.
pub fn hear<T>(from: &Receiver<T>) -> T {
    from.recv_timeout(PATIENCE).unwrap_or_else(|error: RecvTimeoutError| panic!("{error}"))
}
