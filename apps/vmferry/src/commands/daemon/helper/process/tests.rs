use std::io::Write;

use rustix::event::{PollFd, PollFlags, poll};
use vmferry_proxy::{Entrance, SocketOrder};

use super::*;
use crate::commands::daemon::helper::host::tests::host;

/// A helper that serves in a thread of the test.
struct Served {
    daemon: UnixStream,
    places: Arc<Places>,
    thread: std::thread::JoinHandle<io::Result<()>>,
    _directory: tempfile::TempDir,
}

impl Served {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let host = Arc::new(host(directory.path(), &["b"]));
        let (daemon, theirs) = UnixStream::pair().unwrap();
        let places = Arc::new(Places::default());
        let of_thread = Arc::clone(&places);
        let thread = std::thread::spawn(move || serve_all(&theirs, &host, &of_thread));
        Self { daemon, places, thread, _directory: directory }
    }

    /// A connection for a request.
    fn connect(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        descriptors::send(&self.daemon, &[0], &[theirs.into()]).unwrap();
        ours
    }

    /// The answer to these bytes.
    fn answer(&self, bytes: &[u8]) -> Said {
        let mut connection = self.connect();
        // It may be closed before all is written.
        let _ = connection.write_all(bytes);
        lines::read(&mut BufReader::new(&connection)).unwrap().unwrap()
    }

    fn works(&self) {
        let said = self.answer(&lines::line(&Ask::Attempt).unwrap());
        assert!(matches!(said, Said::Configured { .. }), "{said:?}");
    }
}

#[test]
fn bad_request_ends_alone() {
    let served = Served::new();
    let unknown = br#"{"run":"/bin/sh"}"#;
    let path = br#"{"sockets":{"listen":{"rule":{"name":"x","path":"/etc/x"}}}}"#;
    for bytes in [&b"garbage"[..], b"", unknown, path, &[0xff; 100], b"{}"] {
        let said = served.answer(&[bytes, b"\n"].concat());
        let Said::Failed(why) = &said else { panic!("{bytes:?}: {said:?}") };
        assert!(why.contains("can't read the request"), "{why}");
    }
    let endless = served.answer(&vec![b'x'; 1 << 20]);
    assert!(matches!(endless, Said::Failed(_)), "{endless:?}");
    served.works();
    drop(served.daemon);
    served.thread.join().unwrap().unwrap();
}

#[test]
fn byte_without_a_connection_ends_the_helper() {
    let mut served = Served::new();
    served.works();
    served.daemon.write_all(b"x").unwrap();
    let error = served.thread.join().unwrap().unwrap_err();
    assert!(error.to_string().contains("without a connection"), "{error}");
}

#[test]
fn requests_do_not_wait_for_each_other_and_are_limited() {
    let served = Served::new();
    let mut silent: Vec<_> = (1..Kind::Unread.most()).map(|_| served.connect()).collect();
    served.works();
    silent.extend((0..3).map(|_| served.connect()));
    let mut fds: Vec<_> = silent.iter().map(|one| PollFd::new(one, PollFlags::IN)).collect();
    assert!(poll(&mut fds, None).unwrap() > 0);
    let is_answered = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::IN);
    let refused = &silent[fds.iter().position(is_answered).unwrap()];
    let said: Option<Said> = lines::read(&mut BufReader::new(refused)).unwrap();
    let Some(Said::Failed(why)) = said else { panic!("{said:?}") };
    assert!(why.contains("are being served"), "{why}");
}

/// A peer has definitions judged until no place is left for another path.
#[test]
fn definitions_leave_places_for_addresses() {
    let served = Served::new();
    served.works();
    let enter = || served.places.enter(Kind::Definitions).unwrap();
    let taken: Vec<_> = (0..Kind::Definitions.most()).map(|_| enter()).collect();
    let resolve = lines::line(&Ask::Resolve("/".into())).unwrap();
    let said = served.answer(&resolve);
    let Said::Failed(why) = &said else { panic!("{said:?}") };
    assert!(why.contains("128 requests about definitions are being served"), "{why}");
    let said = served.answer(&lines::line(&Ask::Addresses("tcp:127.0.0.1:7002".into())).unwrap());
    assert_eq!(said, Said::Addresses(vec![std::net::IpAddr::from([127, 0, 0, 1])]));
    served.works();
    drop(taken);
    let said = served.answer(&resolve);
    assert!(matches!(said, Said::Resolved(_)), "{said:?}");
}

#[test]
fn socket_of_a_daemon_that_has_gone_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let host = host(directory.path(), &["b"]);
    host.carry_out(&Ask::Attempt).unwrap();
    host.carry_out(&Ask::Sockets(SocketOrder::MakeOutgoing { peer: "b".into() })).unwrap();
    let socket = directory.path().join("b/libvirt");
    let listen = Ask::Sockets(SocketOrder::Listen(Entrance::Libvirt { peer: "b".into() }));
    let request = |keep: bool| {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&lines::line(&listen).unwrap()).unwrap();
        let kept = keep.then_some(ours);
        let places = Arc::new(Places::default());
        let unread = places.enter(Kind::Unread).unwrap();
        serve_one(&theirs, &host, &places, unread);
        kept
    };
    request(false);
    assert!(!socket.exists());
    let _kept = request(true);
    assert!(socket.exists());
}
