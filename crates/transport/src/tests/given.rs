//! Sockets connected by the caller.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};

use super::TIMEOUT;
use crate::{Address, Dialer, Listener, TransportError};

/// Sends a byte over each channel.
fn talk(dialer: &Dialer, listener: &Listener, channels: u8) {
    for number in 0..channels {
        let (mut near, mut writer) = dialer.connect().unwrap().split();
        writer.write_all(&[number]).unwrap();
        let pending = listener.accept().unwrap().unwrap();
        let (mut reader, mut far) = pending.handshake(TIMEOUT).unwrap().split();
        let mut received = [0];
        reader.read_exact(&mut received).unwrap();
        assert_eq!(received, [number]);
        far.finish().unwrap();
        assert_eq!(near.read(&mut [0]).unwrap(), 0);
    }
}

#[test]
fn given_sockets_are_used_in_order_and_their_end_is_reported() {
    let mut pairs = (0..3).map(|_| UnixStream::pair().unwrap()).collect::<Vec<_>>();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialed = TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
    let (accepted, _) = tcp.accept().unwrap();
    let (near, far): (Vec<_>, Vec<_>) =
        pairs.drain(..).map(|(near, far)| (OwnedFd::from(near), OwnedFd::from(far))).unzip();
    let numbers = |fds: &[OwnedFd], last: RawFd| {
        Address::Fd(fds.iter().map(AsRawFd::as_raw_fd).chain([last]).collect())
    };

    let dialer = Dialer::new(numbers(&near, dialed.as_raw_fd()), None);
    let listener = Listener::bind(&numbers(&far, accepted.as_raw_fd()), None).unwrap();
    talk(&dialer, &listener, 4);
    let error = dialer.clone().connect().unwrap_err();
    assert!(error.to_string().contains("has no socket left"), "{error}");

    let (near, far) = UnixStream::pair().unwrap();
    let dialer = Dialer::over([near.into()]).unwrap();
    let listener = Listener::over([far.into()]).unwrap();
    talk(&dialer, &listener, 1);
}

#[test]
fn accept_skips_closed_sockets_and_close_ends_the_wait() {
    let (near, far) = UnixStream::pair().unwrap();
    let (quiet, _other) = UnixStream::pair().unwrap();
    let listener = Listener::over([far.into(), quiet.into()]).unwrap();
    drop(near);
    let closer = listener.closer();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| listener.accept().unwrap().is_none());
        closer.close();
        assert!(waiting.join().unwrap());
    });
}

#[test]
fn unusable_descriptor_is_refused_by_its_number() {
    let directory = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(directory.path().join("f")).unwrap();
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let listening = UnixListener::bind(directory.path().join("s")).unwrap();
    for (number, problem) in [
        (file.as_raw_fd(), "is not a socket"),
        (udp.as_raw_fd(), "is not a stream socket"),
        (listening.as_raw_fd(), "is not connected"),
        (999_999, "is not open"),
    ] {
        let address = Address::Fd(vec![number]);
        let error = Listener::bind(&address, None).unwrap_err();
        assert!(matches!(error, TransportError::Descriptor { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(&format!("descriptor {number} {problem}")), "{text}");
        assert!(Dialer::new(address, None).connect().is_err());
    }
}
