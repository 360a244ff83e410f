//! Listening, connecting, and peers that speak another protocol or nothing.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::{Pki, TIMEOUT, listen};
use crate::{Address, Dialer, Listener, TransportError};

#[test]
fn plain_and_tls_mismatch_is_reported() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let Address::Tls { port, .. } = listener.local_address().clone() else { unreachable!() };
    for (opening, expected) in [
        (
            &b"VMFERRY\n and more"[..],
            "speaks plain vmferry, and this side expects vmferry over TLS",
        ),
        (b"GET / HTTP/1.1\r\n\r\n", "speaks plain HTTP"),
        (b"SSH-2.0-x\r\n", "speaks SSH"),
        (b"\x00\xff\x17garbage", "begins with"),
    ] {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(opening).unwrap();
        let error = listener.accept().unwrap().unwrap().handshake(TIMEOUT).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.is_authentication());
    }
    // A server that answers a TLS client in plain text.
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
fn plain_server_that_closes_a_tls_connection_is_reported() {
    let pki = Pki::new();
    let plain = listen("tcp:127.0.0.1:0", None);
    let Address::Tcp { host, port } = plain.local_address().clone() else { unreachable!() };
    let dialer = Dialer::new(Address::Tls { host, port }, Some(pki.local("b")));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Like the engine: reads a greeting's length, and gets a TLS record instead.
            let (mut reader, _writer) =
                plain.accept().unwrap().unwrap().handshake(TIMEOUT).unwrap().split();
            let mut greeting = [0; 40];
            reader.read_exact(&mut greeting).unwrap();
            assert_eq!(greeting[..2], [0x16, 3], "the first bytes of a TLS record");
        });
        let error = dialer.connect().unwrap_err();
        assert!(matches!(error, TransportError::HandshakeCut { .. }), "{error:?}");
        assert!(!error.is_authentication());
    });
}

#[test]
fn plain_client_of_a_tls_port_gets_a_reason() {
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
fn handshake_times_out_for_silent_and_slow_peers() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let Address::Tls { port, .. } = listener.local_address().clone() else { unreachable!() };
    let _silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let pending = listener.accept().unwrap().unwrap();
    let error = pending.handshake(Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, TransportError::TimedOut { .. }), "{error:?}");

    // A peer that sends little by little is limited too: the time limit covers the whole handshake.
    let mut slow = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let pending = listener.accept().unwrap().unwrap();
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // A handshake record of 16 KiB, one byte at a time.
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
fn bind_reports_an_address_in_use_and_replaces_a_stale_socket() {
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
    assert!(path.exists(), "the file outlives its listener");
    listen(&address, None);
}

#[test]
fn close_ends_accept() {
    let listener = listen("tcp:127.0.0.1:0", None);
    let closer = listener.closer();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| listener.accept().unwrap().is_none());
        closer.close();
        assert!(waiting.join().unwrap());
    });
    assert!(listener.accept().unwrap().is_none(), "the listener stays closed");
}

#[test]
fn connect_reports_a_missing_listener() {
    let listener = listen("tcp:127.0.0.1:0", None);
    let address = listener.local_address().clone();
    drop(listener);
    let error = Dialer::new(address, None).connect().unwrap_err();
    assert!(error.to_string().contains("vmferry receive"), "{error}");
    let address = "tls:127.0.0.1:1".parse().unwrap();
    let error = Dialer::new(address, None).connect().unwrap_err();
    assert!(matches!(error, TransportError::NoIdentity));
}
