//! A keeper in a thread.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use super::*;

/// libvirt's ping and pong.
fn keep_alive(procedure: u8) -> Vec<u8> {
    let words = [28, 0x6b65_6570, 1, u32::from(procedure), 2, 0, 0];
    words.into_iter().flat_map(u32::to_be_bytes).collect()
}

fn start() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keeper");
    let (tell, ready) = channel();
    let of_thread = path.clone();
    std::thread::spawn(move || serve(&of_thread, || tell.send(()).unwrap()));
    ready.recv().unwrap();
    (directory, path)
}

/// A keeper that others start.
#[derive(Debug)]
struct Running(PathBuf);

impl KeeperProgram for Running {
    fn connect(&self) -> io::Result<OwnedFd> {
        connect(&self.0)
    }
}

fn daemon(path: &std::path::Path) -> Keeper {
    Keeper::start(Arc::new(Running(path.to_owned()))).unwrap()
}

#[test]
fn connection_outlives_the_daemon_and_is_taken_over() {
    let (_directory, path) = start();
    let (mut libvirt, ours) = UnixStream::pair().unwrap();
    libvirt.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let session = SessionId([3; 16]);
    let keeper = daemon(&path);
    keeper.hold(session, 9, &ours).unwrap();
    // The daemon dies.
    drop((keeper, ours));
    let mut answer = [0; 28];
    for _ in 0..3 {
        libvirt.write_all(&keep_alive(1)).unwrap();
        libvirt.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..], keep_alive(2)[..]);
    }
    let keeper = daemon(&path);
    let mut held = keeper.take().unwrap();
    let HeldConnection { session: found, serial, mut socket } = held.pop().unwrap();
    assert_eq!((found, serial, held.len()), (session, 9, 0));
    socket.write_all(b"the reply").unwrap();
    let mut reply = [0; 9];
    libvirt.read_exact(&mut reply).unwrap();
    keeper.drop_session(session).unwrap();
    drop(socket);
    assert_eq!(libvirt.read(&mut reply).unwrap(), 0, "nobody holds it");
    assert_eq!(keeper.take().unwrap().len(), 0);
}

#[test]
fn connection_that_libvirt_closes_is_dropped() {
    let (_directory, path) = start();
    let (libvirt, ours) = UnixStream::pair().unwrap();
    let keeper = daemon(&path);
    keeper.hold(SessionId([1; 16]), 1, &ours).unwrap();
    drop((keeper, ours));
    drop(libvirt);
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    loop {
        let keeper = daemon(&path);
        if keeper.take().unwrap().is_empty() {
            return;
        }
        assert!(std::time::Instant::now() < deadline);
        drop(keeper);
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn second_keeper_is_refused() {
    let (_directory, path) = start();
    let second = serve(&path, || panic!("it listens"));
    assert_eq!(second.unwrap_err().kind(), io::ErrorKind::AddrInUse);
}

#[test]
fn daemon_beside_another_takes_its_place_only_for_a_moment() {
    let (_directory, path) = start();
    let (mut libvirt, ours) = UnixStream::pair().unwrap();
    let keeper = daemon(&path);
    keeper.hold(SessionId([1; 16]), 1, &ours).unwrap();
    let second = daemon(&path);
    second.check().unwrap();
    drop(second);
    keeper.check().unwrap();
    keeper.hold(SessionId([2; 16]), 2, &ours).unwrap();
    assert_eq!(keeper.take().unwrap().len(), 2);
    drop((keeper, ours));
    libvirt.write_all(&keep_alive(1)).unwrap();
    let mut answer = [0; 28];
    libvirt.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..], keep_alive(2)[..]);
}

/// A keeper that is started in a thread when none listens.
#[derive(Debug)]
struct Started(PathBuf);

impl KeeperProgram for Started {
    fn connect(&self) -> io::Result<OwnedFd> {
        if let Ok(connected) = connect(&self.0) {
            return Ok(connected);
        }
        let (tell, ready) = channel();
        let path = self.0.clone();
        let _ = std::fs::remove_file(&path);
        std::thread::spawn(move || serve(&path, || tell.send(()).unwrap()));
        ready.recv().map_err(io::Error::other)?;
        connect(&self.0)
    }
}

#[test]
fn keeper_that_ends_is_started_again_with_all_connections() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keeper");
    let listener = rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    );
    let listener = listener.unwrap();
    rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    // The first keeper takes one connection, and then it is killed.
    let first = std::thread::spawn(move || {
        let daemon = rustix::net::accept(&listener).unwrap();
        let (message, held) = receive(&daemon).unwrap().unwrap();
        send(&daemon, Message::of(DONE), None).unwrap();
        (message.session, held.is_some())
    });
    let keeper = Keeper::start(Arc::new(Started(path.clone()))).unwrap();
    let (mut libvirt, ours) = UnixStream::pair().unwrap();
    libvirt.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let session = SessionId([5; 16]);
    keeper.hold(session, 7, &ours).unwrap();
    assert_eq!(first.join().unwrap(), (session, true));
    assert!(connect(&path).is_err(), "nobody listens");
    keeper.check().unwrap();
    assert_eq!(keeper.connections(), 1);
    // The daemon dies: the second keeper has the connection.
    drop((keeper, ours));
    libvirt.write_all(&keep_alive(1)).unwrap();
    let mut answer = [0; 28];
    libvirt.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..], keep_alive(2)[..]);
}
