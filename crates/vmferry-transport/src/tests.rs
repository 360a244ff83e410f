//! Real sockets and real TLS.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;

use crate::pki::{self, IssueRequest, Validity};
use crate::{Address, Channel, Dialer, Listener, TlsIdentity, TransportError};

const TIMEOUT: Duration = Duration::from_secs(10);

struct Pki {
    directory: TempDir,
}

impl Pki {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        pki::init(&directory.path().join("ca"), "test", Validity::days(10)).unwrap();
        Self { directory }
    }

    fn host(&self, name: &str, addresses: &[&str], validity: Validity) -> Arc<TlsIdentity> {
        let out = self.directory.path().join(name);
        let request = IssueRequest {
            name: name.into(),
            addresses: addresses.iter().map(|address| (*address).to_owned()).collect(),
            validity,
        };
        pki::issue(&self.directory.path().join("ca"), &out, &request).unwrap();
        Arc::new(load(&out).unwrap())
    }

    fn local(&self, name: &str) -> Arc<TlsIdentity> {
        self.host(name, &["127.0.0.1", "localhost"], Validity::days(1))
    }
}

fn load(directory: &Path) -> Result<TlsIdentity, TransportError> {
    TlsIdentity::load(
        &directory.join("ca.pem"),
        &directory.join("host.pem"),
        &directory.join("host.key"),
    )
}

fn listen(address: &str, tls: Option<Arc<TlsIdentity>>) -> Listener {
    Listener::bind(&address.parse().unwrap(), tls).unwrap()
}

/// Connects both ends; each side's result.
fn join(
    listener: &Listener,
    dialer: &Dialer,
) -> (Result<Channel, TransportError>, Result<Channel, TransportError>) {
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.accept().unwrap().unwrap().handshake(TIMEOUT));
        let dialled = dialer.connect();
        // TLS 1.3 tells a client that its certificate is refused when it first reads.
        let dialled = dialled.and_then(|channel| {
            let peer = channel.peer().address.clone();
            let (mut reader, mut writer) = channel.split();
            let greeted = writer.write_all(b"hello").and_then(|()| reader.read_exact(&mut [0; 5]));
            drop((reader, writer));
            greeted.map_err(|error| TransportError::from_io(error, &peer))?;
            dialer.connect()
        });
        let accepted = accepted.join().unwrap().and_then(|channel| {
            let (mut reader, mut writer) = channel.split();
            let _ = reader.read_exact(&mut [0; 5]).and_then(|()| writer.write_all(b"hello"));
            listener.accept().unwrap().unwrap().handshake(TIMEOUT)
        });
        (accepted, dialled)
    })
}

/// A connected pair, whose dialled end was made beside the accepted one.
fn pair(listener: &Listener, dialer: &Dialer) -> (Channel, Channel) {
    std::thread::scope(|scope| {
        let accepted =
            scope.spawn(|| listener.accept().unwrap().unwrap().handshake(TIMEOUT).unwrap());
        let dialled = dialer.connect().unwrap();
        (accepted.join().unwrap(), dialled)
    })
}

fn bytes(length: usize, mut seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    for chunk in bytes.chunks_mut(8) {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        chunk.copy_from_slice(&seed.to_le_bytes()[..chunk.len()]);
    }
    bytes
}

#[test]
fn both_directions_at_once_carry_what_was_sent() {
    let pki = Pki::new();
    let directory = tempfile::tempdir().unwrap();
    let unix = format!("unix:{}", directory.path().join("s").display());
    for (address, tls) in [
        ("tls:127.0.0.1:0", Some((pki.local("a"), pki.local("b")))),
        ("tcp:127.0.0.1:0", None),
        (unix.as_str(), None),
    ] {
        let (server, client) = tls.unzip();
        let listener = listen(address, server);
        let dialer = Dialer::new(listener.local_address().clone(), client);
        let (accepted, dialled) = pair(&listener, &dialer);
        assert_eq!(accepted.peer().tls, address.starts_with("tls"));
        if accepted.peer().tls {
            assert_eq!(accepted.peer().names[0], "spiffe://vmferry/host/b");
            assert_eq!(dialled.peer().names[0], "spiffe://vmferry/host/a");
        }
        let length = if accepted.peer().tls { 112 << 20 } else { 16 << 20 };
        let data = [bytes(length, 1), bytes(length, 2)];
        let data = &data;
        std::thread::scope(|scope| {
            for (channel, ours, theirs) in [(accepted, 0, 1), (dialled, 1, 0)] {
                let (mut reader, mut writer) = channel.split();
                scope.spawn(move || {
                    for piece in data[ours].chunks(300_001) {
                        writer.write_all(piece).unwrap();
                    }
                    writer.finish().unwrap();
                });
                scope.spawn(move || {
                    let mut received = Vec::new();
                    reader.read_to_end(&mut received).unwrap();
                    assert!(received == data[theirs]);
                });
            }
        });
    }
}

#[test]
fn a_cut_tls_link_is_an_error_and_an_announced_end_is_not() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let dialer = Dialer::new(listener.local_address().clone(), Some(pki.local("b")));
    let (accepted, dialled) = pair(&listener, &dialer);
    dialled.closer().close();
    let (mut reader, _writer) = accepted.split();
    let error = reader.read(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);

    let (accepted, dialled) = pair(&listener, &dialer);
    let (_dialled_reader, mut writer) = dialled.split();
    writer.finish().unwrap();
    let (mut reader, _writer) = accepted.split();
    assert_eq!(reader.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn strangers_and_stale_certificates_are_refused_on_both_sides_with_words() {
    let (pki, other) = (Pki::new(), Pki::new());
    let expired = Validity { from_days: -10, until_days: -2 };
    let early = Validity { from_days: 2, until_days: 10 };
    let names: &[&str] = &["127.0.0.1"];
    let good = pki.local("good");

    // (server, client, what the server says, what the client says)
    let cases = [
        (good.clone(), other.local("x"), "does not accept", "does not trust"),
        (good.clone(), pki.host("old", names, expired), "expired on 20", "it has expired"),
        (pki.host("old-server", names, expired), good.clone(), "it has expired", "expired on 20"),
        (good.clone(), pki.host("early", names, early), "is not valid before 20", "it has expired"),
        (
            pki.host("elsewhere", &["192.0.2.9"], Validity::days(1)),
            good.clone(),
            "does not accept",
            "not for 127.0.0.1",
        ),
    ];
    for (server, client, server_says, client_says) in cases {
        let listener = listen("tls:127.0.0.1:0", Some(server));
        let dialer = Dialer::new(listener.local_address().clone(), Some(client));
        let (accepted, dialled) = join(&listener, &dialer);
        let (accepted, dialled) = (accepted.unwrap_err(), dialled.unwrap_err());
        assert!(accepted.to_string().contains(server_says), "server: {accepted:?}");
        assert!(dialled.to_string().contains(client_says), "client: {dialled:?}");
        assert!(dialled.is_authentication(), "{dialled:?}");
    }
}

#[test]
fn the_name_that_counts_can_be_said_and_addresses_are_names_too() {
    let pki = Pki::new();
    let (server, client) = (pki.host("far", &["far", "::1"], Validity::days(1)), pki.local("b"));
    let listener = listen("tls:127.0.0.1:0", Some(server.clone()));
    let mut dialer = Dialer::new(listener.local_address().clone(), Some(client.clone()));
    dialer.server_name = Some("far".into());
    pair(&listener, &dialer);
    dialer.server_name = Some("::1".into());
    let (accepted, dialled) = pair(&listener, &dialer);
    assert_eq!(dialled.peer().names, ["spiffe://vmferry/host/far", "far", "::1"]);
    assert!(accepted.peer().tls);
    dialer.server_name = Some("no name".into());
    let error = dialer.connect().unwrap_err();
    assert!(matches!(error, TransportError::ServerName { .. }), "{error:?}");
}

#[test]
fn another_protocol_within_tls_is_refused() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let good = pki.local("b");
    for (protocols, client_says) in
        [(vec![b"h2".to_vec()], "not vmferry's protocol within"), (vec![], "")]
    {
        let mut config = (*good.client).clone();
        config.alpn_protocols = protocols;
        let client = TlsIdentity { client: Arc::new(config), server: good.server.clone() };
        let dialer = Dialer::new(listener.local_address().clone(), Some(Arc::new(client)));
        let (accepted, dialled) = join(&listener, &dialer);
        let (accepted, dialled) = (accepted.unwrap_err(), dialled.unwrap_err());
        assert!(accepted.to_string().contains("not vmferry's protocol within"), "{accepted:?}");
        assert!(dialled.to_string().contains(client_says), "{dialled:?}");
    }
}

#[test]
fn a_client_without_a_certificate_is_refused() {
    let pki = Pki::new();
    let server = pki.local("a");
    let listener = listen("tls:127.0.0.1:0", Some(server.clone()));
    let mut bare = rustls::ClientConfig::builder_with_provider(Arc::new(
        rustls::crypto::aws_lc_rs::default_provider(),
    ))
    .with_protocol_versions(&[&rustls::version::TLS13])
    .unwrap()
    .with_root_certificates({
        use rustls::pki_types::pem::PemObject;
        let mut roots = rustls::RootCertStore::empty();
        let path = pki.directory.path().join("ca/ca.pem");
        roots.add(rustls::pki_types::CertificateDer::from_pem_file(path).unwrap()).unwrap();
        roots
    })
    .with_no_client_auth();
    bare.alpn_protocols = vec![crate::identity::ALPN.to_vec()];
    let bare = Arc::new(TlsIdentity { client: Arc::new(bare), server: server.server.clone() });
    let dialer = Dialer::new(listener.local_address().clone(), Some(bare));
    let (accepted, dialled) = join(&listener, &dialer);
    let (accepted, dialled) = (accepted.unwrap_err(), dialled.unwrap_err());
    assert!(matches!(accepted, TransportError::NoCertificate { .. }), "{accepted:?}");
    assert!(dialled.to_string().contains("none was sent"), "{dialled:?}");
}

#[test]
fn plain_and_tls_do_not_mix_and_say_so() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let Address::Tls { port, .. } = listener.local_address().clone() else { unreachable!() };
    for (said, expected) in [
        (
            &b"VMFERRY\n and more"[..],
            "speaks plain vmferry, and this side expects vmferry over TLS",
        ),
        (b"GET / HTTP/1.1\r\n\r\n", "speaks plain HTTP"),
        (b"SSH-2.0-x\r\n", "speaks SSH"),
        (b"\x00\xff\x17garbage", "begins with"),
    ] {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(said).unwrap();
        let error = listener.accept().unwrap().unwrap().handshake(TIMEOUT).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.is_authentication());
    }
    // A server that answers a TLS client in plain.
    let plain = listen("tcp:127.0.0.1:0", None);
    let Address::Tcp { host, port } = plain.local_address().clone() else { unreachable!() };
    let dialer = Dialer::new(Address::Tls { host, port }, Some(pki.local("b")));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut reader, mut writer) =
                plain.accept().unwrap().unwrap().handshake(TIMEOUT).unwrap().split();
            let _ = reader.read(&mut [0; 4096]);
            let _ = writer.write_all(b"VMFERRY\r and some more bytes");
        });
        let error = dialer.connect().unwrap_err();
        assert!(error.to_string().contains("speaks plain vmferry"), "{error:?}");
    });
}

#[test]
fn a_plain_server_that_hangs_up_on_tls_is_named_as_one() {
    let pki = Pki::new();
    let plain = listen("tcp:127.0.0.1:0", None);
    let Address::Tcp { host, port } = plain.local_address().clone() else { unreachable!() };
    let dialer = Dialer::new(Address::Tls { host, port }, Some(pki.local("b")));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // As the engine does: a greeting's worth of bytes, which are none.
            let (mut reader, _writer) =
                plain.accept().unwrap().unwrap().handshake(TIMEOUT).unwrap().split();
            let mut greeting = [0; 40];
            reader.read_exact(&mut greeting).unwrap();
            assert_eq!(greeting[..2], [0x16, 3], "what the wire crate recognises");
        });
        let error = dialer.connect().unwrap_err();
        assert!(matches!(error, TransportError::HandshakeCut { .. }), "{error:?}");
        assert!(!error.is_authentication());
    });
}

#[test]
fn a_plain_client_of_a_tls_port_learns_why() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let Address::Tls { host, port } = listener.local_address().clone() else { unreachable!() };
    let (mut reader, mut writer) =
        Dialer::new(Address::Tcp { host, port }, None).connect().unwrap().split();
    writer.write_all(b"VMFERRY\n and more").unwrap();
    let error = listener.accept().unwrap().unwrap().handshake(TIMEOUT).unwrap_err();
    assert!(matches!(error, TransportError::NotTls { .. }), "{error:?}");
    let error = reader.read_exact(&mut [0; 24]).unwrap_err();
    let error = TransportError::from_io(error, "host-b");
    assert!(error.to_string().contains("does one side use tls:"), "{error}");
}

#[test]
fn a_silent_peer_holds_nobody_up() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let Address::Tls { port, .. } = listener.local_address().clone() else { unreachable!() };
    let _silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let pending = listener.accept().unwrap().unwrap();
    let error = pending.handshake(Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, TransportError::TimedOut { .. }), "{error:?}");

    // Nor does one that keeps saying a little: the bound is on all of it.
    let mut slow = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let pending = listener.accept().unwrap().unwrap();
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // A handshake record of 16 KiB, a byte at a time.
            let _ = slow.write_all(&[0x16, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc]);
            let pause = Duration::from_millis(5);
            while is_done.recv_timeout(pause) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                let _ = slow.write_all(&[0]);
            }
        });
        let error = pending.handshake(Duration::from_millis(100)).unwrap_err();
        assert!(matches!(error, TransportError::TimedOut { .. }), "{error:?}");
        drop(done);
    });
}

#[test]
fn a_dropped_writer_announces_the_end_while_the_reader_goes_on() {
    let pki = Pki::new();
    for (address, tls) in
        [("tls:127.0.0.1:0", Some((pki.local("a"), pki.local("b")))), ("tcp:127.0.0.1:0", None)]
    {
        let (server, client) = tls.unzip();
        let listener = listen(address, server);
        let dialer = Dialer::new(listener.local_address().clone(), client);
        let (accepted, dialled) = pair(&listener, &dialer);
        let (mut near, mut said) = dialled.split();
        let (mut far, mut answers) = accepted.split();
        said.write_all(b"question").unwrap();
        drop(said);
        let mut received = Vec::new();
        far.read_to_end(&mut received).unwrap();
        assert_eq!(received, b"question");
        answers.write_all(b"answer").unwrap();
        drop((far, answers));
        received.clear();
        near.read_to_end(&mut received).unwrap();
        assert_eq!(received, b"answer");

        // A channel that was never split ends in order too.
        let (accepted, dialled) = pair(&listener, &dialer);
        drop(dialled);
        let (mut reader, _writer) = accepted.split();
        assert_eq!(reader.read(&mut [0; 8]).unwrap(), 0);
    }
}

#[test]
fn a_tls_writer_that_timed_out_takes_no_more_and_announces_no_end() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let dialer = Dialer::new(listener.local_address().clone(), Some(pki.local("b")));
    let (accepted, dialled) = pair(&listener, &dialer);
    let (reader, mut writer) = dialled.split();
    writer.set_timeout(Some(Duration::from_millis(20))).unwrap();
    let data = bytes(64 << 20, 3);
    let mut written = 0;
    let error = loop {
        assert!(written < data.len(), "somebody reads");
        match writer.write(&data[written..]) {
            Ok(length) => written += length,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    assert_eq!(writer.write(b"more").unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    drop((writer, reader));
    let mut received = Vec::new();
    let (mut reader, _writer) = accepted.split();
    let error = reader.read_to_end(&mut received).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
    assert!(received.len() >= written);
    assert!(data.starts_with(&received));
}

#[test]
fn what_came_before_a_forged_record_is_handed_out_before_the_error() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let dialer = Dialer::new(listener.local_address().clone(), Some(pki.local("b")));
    let (accepted, dialled) = pair(&listener, &dialer);
    let stream = dialled.stream();
    let (mut dialled_reader, mut writer) = dialled.split();
    writer.write_all(b"true").unwrap();
    let mut forged = vec![0x17, 3, 3, 0, 32];
    forged.extend([7; 32]);
    (&*stream).write_all(&forged).unwrap();
    let (mut reader, _writer) = accepted.split();
    let mut received = Vec::new();
    let error = reader.read_to_end(&mut received).unwrap_err();
    assert_eq!(received, b"true");
    let error = TransportError::from_io(error, "host-a");
    assert!(matches!(error, TransportError::Tls { .. }), "{error:?}");
    assert!(reader.read(&mut [0; 8]).is_err(), "for good");
    // And the other side is told.
    let told = TransportError::from_io(dialled_reader.read(&mut [0; 8]).unwrap_err(), "host-b");
    assert!(matches!(told, TransportError::Tls { .. }), "{told:?}");
}

#[test]
fn closing_a_channel_wakes_both_halves() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let dialer = Dialer::new(listener.local_address().clone(), Some(pki.local("b")));
    let (_accepted, dialled) = pair(&listener, &dialer);
    let closer = dialled.closer();
    let (mut reader, mut writer) = dialled.split();
    std::thread::scope(|scope| {
        let reading = scope.spawn(move || reader.read(&mut [0; 8]).is_err());
        let writing = scope.spawn(move || {
            let piece = vec![0; 1 << 20];
            while writer.write_all(&piece).is_ok() {}
        });
        closer.close();
        assert!(reading.join().unwrap());
        writing.join().unwrap();
    });
}

#[test]
fn an_address_in_use_is_said_and_a_stale_socket_replaced() {
    let first = listen("tcp:127.0.0.1:0", None);
    let error = Listener::bind(first.local_address(), None).unwrap_err();
    assert!(matches!(error, TransportError::AddressInUse { .. }), "{error:?}");

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let address = format!("unix:{}", path.display());
    let living = listen(&address, None);
    let error = Listener::bind(&address.parse().unwrap(), None).unwrap_err();
    assert!(matches!(error, TransportError::AddressInUse { .. }), "{error:?}");
    drop(living);
    assert!(!path.exists());
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "its listener is gone, the file is not");
    listen(&address, None);
}

#[test]
fn closing_ends_accept() {
    let listener = listen("tcp:127.0.0.1:0", None);
    let closer = listener.closer();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| listener.accept().unwrap().is_none());
        closer.close();
        assert!(waiting.join().unwrap());
    });
    assert!(listener.accept().unwrap().is_none(), "for good");
}

#[test]
fn nobody_there_is_said() {
    let listener = listen("tcp:127.0.0.1:0", None);
    let address = listener.local_address().clone();
    drop(listener);
    let error = Dialer::new(address, None).connect().unwrap_err();
    assert!(error.to_string().contains("vmferry receive"), "{error}");
    let address = "tls:127.0.0.1:1".parse().unwrap();
    let error = Dialer::new(address, None).connect().unwrap_err();
    assert!(matches!(error, TransportError::NoIdentity));
}

#[test]
fn files_are_checked_and_never_overwritten() {
    use std::os::unix::fs::PermissionsExt;
    let pki = Pki::new();
    pki.local("a");
    let host = pki.directory.path().join("a");
    let ca = pki.directory.path().join("ca");
    let request = IssueRequest::new("a", Validity::days(1));
    let error = pki::issue(&ca, &host, &request).unwrap_err().to_string();
    assert!(error.contains("host.key: exists already"), "{error}");
    let error = pki::init(&ca, "x", Validity::days(1)).unwrap_err().to_string();
    assert!(error.contains("ca.key: exists already"), "{error}");

    let key = host.join("host.key");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o640)).unwrap();
    let error = load(&host).unwrap_err().to_string();
    assert!(error.contains("chmod 600"), "{error}");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    load(&host).unwrap();
    let other = Pki::new();
    other.local("a");
    let strange = other.directory.path().join("a/host.pem");
    let error = TlsIdentity::load(&host.join("ca.pem"), &strange, &key).unwrap_err().to_string();
    assert!(error.contains("does not fit the key"), "{error}");
    std::fs::write(host.join("host.pem"), "garbage").unwrap();
    let error = load(&host).unwrap_err().to_string();
    assert!(error.contains("host.pem: holds no certificate"), "{error}");
    std::fs::remove_file(host.join("ca.pem")).unwrap();
    let error = load(&host).unwrap_err().to_string();
    assert!(error.contains("ca.pem: can't be read"), "{error}");
}

#[test]
fn certificates_that_make_no_sense_are_not_made() {
    let pki = Pki::new();
    let ca = pki.directory.path().join("ca");
    let out = pki.directory.path().join("out");
    for (name, validity, expected) in [
        ("", Validity::days(1), "is no name"),
        ("..", Validity::days(1), "is no name"),
        ("a/b", Validity::days(1), "is no name"),
        ("a", Validity::days(u32::MAX), "fewer days"),
        ("a", Validity { from_days: i64::MIN, until_days: 1 }, "fewer days"),
        ("a", Validity { from_days: 2, until_days: 1 }, "before it begins"),
    ] {
        let request = IssueRequest::new(name, validity);
        let error = pki::issue(&ca, &out, &request).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!out.exists(), "nothing is left behind");
    }
}
