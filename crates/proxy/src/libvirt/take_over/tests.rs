use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};

use vmferry::config::compression::CompressionConfig;
use vmferry_handover::journal::RecordFile;
use vmferry_handover::{FinishRecord, GuestIdentity, OperatorWord};

use super::*;
use crate::keeper::{Keeper, KeeperProgram, connect, serve};
use crate::{Owner, Proxy, ProxyConfig, Timings};

/// No wait of a test is longer.
const LIMIT: Duration = Duration::from_secs(60);

const SESSION: SessionId = SessionId([9; 16]);

/// A keeper that serves in a thread.
#[derive(Debug)]
pub struct Running(PathBuf);

impl Running {
    pub fn start(directory: &Path) -> Self {
        let path = directory.join("keeper");
        let (tell, ready) = channel();
        let of_thread = path.clone();
        std::thread::spawn(move || serve(&of_thread, || tell.send(()).unwrap()));
        ready.recv().unwrap();
        Self(path)
    }
}

impl KeeperProgram for Running {
    fn connect(&self) -> io::Result<OwnedFd> {
        connect(&self.0)
    }
}

/// Starts a daemon with its sockets in a directory.
pub fn start(
    directory: PathBuf,
    journals: &Path,
    keeper: impl KeeperProgram + 'static,
) -> Result<(Proxy, Receiver<ProxyEvent>), ProxyError> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let config = ProxyConfig {
        listen: "tcp:127.0.0.1:0".parse().unwrap(),
        tls: None,
        policy: None,
        peers: Vec::new(),
        forwards: Vec::new(),
        directory,
        libvirt: "/nowhere".into(),
        qemu: Owner { uid, gid },
        journals: journals.to_owned(),
        domains: None,
        definition_facts: None,
        keeper: Some(Arc::new(keeper)),
        access: None,
        receivers: None,
        timings: Timings { silence: LIMIT, reconnect: LIMIT, connect: LIMIT },
        compression: CompressionConfig::default(),
        bandwidth: None,
    };
    let (tell, events) = channel();
    let proxy = Proxy::start(config, Box::new(move |event| drop(tell.send(event))))?;
    Ok((proxy, events))
}

/// The journal of a source that has sent its Finish.
fn write_journal(directory: &Path) {
    let mut journal = RecordFile::create(directory, SESSION, Side::Source).unwrap();
    let guest = GuestIdentity { uuid: uuid::Uuid::max(), name: "web".into() };
    let (peer, peer_names) = ("host-b".into(), Vec::new());
    for record in [FinishRecord::Open { guest, peer, peer_names }, FinishRecord::Sent] {
        journal.write(&FinishEntry::now(record)).unwrap();
    }
}

/// A packet of libvirt's protocol without a payload.
fn packet(program: u32, procedure: u32, kind: u32, serial: u32) -> Vec<u8> {
    let words = [28, program, 1, procedure, kind, serial, 0];
    words.into_iter().flat_map(u32::to_be_bytes).collect()
}

fn ping(libvirt: &mut UnixStream) {
    const KEEPALIVE: u32 = 0x6b65_6570;
    libvirt.write_all(&packet(KEEPALIVE, 1, 2, 0)).unwrap();
    let mut pong = [0; 28];
    libvirt.read_exact(&mut pong).unwrap();
    assert_eq!(pong[..], packet(KEEPALIVE, 2, 2, 0));
}

/// Holds libvirt's connection as a daemon does that dies then. Returns libvirt's end.
fn leave_connection(keeper: &Running) -> UnixStream {
    let (libvirt, ours) = UnixStream::pair().unwrap();
    libvirt.set_read_timeout(Some(LIMIT)).unwrap();
    let daemon = Keeper::start(Arc::new(Running(keeper.0.clone()))).unwrap();
    daemon.hold(SESSION, 5, &ours).unwrap();
    libvirt
}

#[test]
fn connection_is_held_until_its_journal_can_be_opened() {
    let place = tempfile::tempdir().unwrap();
    let (journals, away) = (place.path().join("journals"), place.path().join("away"));
    write_journal(&journals);
    let keeper = Running::start(place.path());
    let mut libvirt = leave_connection(&keeper);
    std::fs::rename(&journals, &away).unwrap();
    std::fs::write(&journals, "").unwrap();

    let (proxy, events) = start(place.path().join("sockets"), &journals, keeper).unwrap();
    for _ in 0..2 {
        let event = events.recv_timeout(LIMIT).unwrap();
        let ProxyEvent::NotTakenOver { session, reason, .. } = event else { panic!("{event}") };
        assert_eq!(session, SESSION.to_string());
        let file = journals.join(format!("{SESSION}.finish-source.journal"));
        assert!(reason.contains(file.to_str().unwrap()), "{reason}");
        assert!(reason.contains("Not a directory"), "{reason}");
        ping(&mut libvirt);
    }
    assert_eq!(proxy.doubts().len(), 0);

    std::fs::remove_file(&journals).unwrap();
    std::fs::rename(&away, &journals).unwrap();
    let is_doubt = |event: &ProxyEvent| !matches!(event, ProxyEvent::NotTakenOver { .. });
    let event = std::iter::repeat_with(|| events.recv_timeout(LIMIT).unwrap()).find(is_doubt);
    let Some(ProxyEvent::InDoubt { guest, peer, .. }) = event else { panic!("{event:?}") };
    assert_eq!((guest.as_str(), peer.as_str()), ("web", "host-b"));
    ping(&mut libvirt);
    assert!(proxy.decide(SESSION, OperatorWord::DestinationOwns));
    let mut head = [0; 28];
    libvirt.read_exact(&mut head).unwrap();
    // A reply to the call 5, without an error.
    assert_eq!(head[16..28], [1u32, 5, 0].map(u32::to_be_bytes).concat());
}

/// The keeper answers libvirt as long as no daemon is connected to it.
#[test]
fn daemon_does_not_start_without_the_keepers_connections() {
    let place = tempfile::tempdir().unwrap();
    let started = start(place.path().join("sockets"), place.path(), Broken);
    let error = vmferry::chain(&started.err().unwrap());
    assert!(error.contains("take over the connections of the keeper"), "{error}");
}

/// A keeper that closes every connection.
#[derive(Debug)]
struct Broken;

impl KeeperProgram for Broken {
    fn connect(&self) -> io::Result<OwnedFd> {
        let (ours, theirs) = UnixStream::pair()?;
        drop(theirs);
        Ok(ours.into())
    }
}
