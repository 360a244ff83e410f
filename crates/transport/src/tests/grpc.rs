//! What gRPC channels do beyond what every channel does.

use std::any::Any;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use super::{Pki, TIMEOUT, bytes, listen, pair};
use crate::grpc::Call;
use crate::{Channel, Dialer, Listener, TlsIdentity, TransportError};

const WAYS: [&str; 2] = ["grpc:127.0.0.1:0", "grpc-ack:127.0.0.1:0"];

fn host_pair(pki: &Pki) -> (Arc<TlsIdentity>, Arc<TlsIdentity>) {
    (pki.local("a"), pki.local("b"))
}

fn connected(address: &str, pki: &Pki) -> (Listener, Channel, Channel) {
    let (a, b) = host_pair(pki);
    let listener = listen(address, Some(a));
    let dialer = Dialer::new(listener.local_address().clone(), Some(b));
    let (accepted, dialled) = pair(&listener, &dialer);
    (listener, accepted, dialled)
}

#[test]
fn slices_are_joined_and_pieces_read_as_they_are_asked_for() {
    for address in WAYS {
        let (_listener, accepted, dialled) = connected(address, &Pki::new());
        let data = &bytes(3 << 20, 9);
        let (_near, mut writer) = dialled.split();
        let (mut reader, _far) = accepted.split();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut written = 0;
                while written < data.len() {
                    let rest = &data[written..];
                    let cut = rest.len() / 3;
                    let slices = [&rest[..cut], &[], &rest[cut..]].map(IoSlice::new);
                    written += writer.write_vectored(&slices).unwrap();
                }
                writer.finish().unwrap();
            });
            let (mut received, mut length) = (Vec::new(), 1);
            loop {
                let mut into = vec![0; length];
                let read = reader.read(&mut into).unwrap();
                if read == 0 {
                    break;
                }
                received.extend_from_slice(&into[..read]);
                length = length * 7 % 100_003;
            }
            assert!(received == *data);
        });
    }
}

#[test]
fn a_listener_serves_both_ways_and_many_channels_at_once() {
    let pki = Pki::new();
    let (a, b) = host_pair(&pki);
    let listener = &listen("grpc:127.0.0.1:0", Some(a));
    let text = listener.local_address().to_string();
    std::thread::scope(|scope| {
        for number in 0..16_u64 {
            let way = if number % 2 == 0 { "grpc:" } else { "grpc-ack:" };
            let address = text.replace("grpc:", way).parse().unwrap();
            let dialer = Dialer::new(address, Some(b.clone()));
            scope.spawn(move || {
                let (mut reader, mut writer) = dialer.connect().unwrap().split();
                let data = bytes(700_000, number);
                writer.write_all(&data).unwrap();
                writer.finish().unwrap();
                let mut echo = Vec::new();
                reader.read_to_end(&mut echo).unwrap();
                assert!(echo == data);
            });
            scope.spawn(move || {
                let channel = listener.accept().unwrap().unwrap().handshake(TIMEOUT).unwrap();
                let (mut reader, mut writer) = channel.split();
                let mut data = Vec::new();
                reader.read_to_end(&mut data).unwrap();
                writer.write_all(&data).unwrap();
                writer.finish().unwrap();
            });
        }
    });
}

#[test]
fn a_peer_that_never_reads_holds_a_bounded_amount_and_a_writer_no_longer_than_its_timeout() {
    let (_listener, accepted, dialled) = connected("grpc:127.0.0.1:0", &Pki::new());
    let (near, mut writer) = dialled.split();
    writer.set_timeout(Some(Duration::from_millis(200))).unwrap();
    let data = bytes(64 << 20, 3);
    let mut written = 0;
    let error = loop {
        assert!(written < 32 << 20, "somebody buffers without bound");
        match writer.write(&data[written..]) {
            Ok(length) => written += length,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(writer.write(b"more").unwrap_err().kind(), ErrorKind::BrokenPipe);
    drop((writer, near));
    let mut received = Vec::new();
    let (mut reader, _far) = accepted.split();
    reader.read_to_end(&mut received).unwrap_err();
    assert!(data.starts_with(&received), "and what arrives is what was sent, without an end");
}

#[test]
fn an_acknowledged_chunk_waits_for_the_one_before_to_be_read() {
    let (_listener, accepted, dialled) = connected("grpc-ack:127.0.0.1:0", &Pki::new());
    let (_near, mut writer) = dialled.split();
    let (mut reader, _far) = accepted.split();
    for _ in 0..3 {
        writer.write_all(b"first").unwrap();
        reader.read_exact(&mut [0; 5]).unwrap();
    }
    writer.write_all(b"unread").unwrap();
    writer.set_timeout(Some(Duration::from_millis(50))).unwrap();
    assert_eq!(writer.write(b"next").unwrap_err().kind(), ErrorKind::TimedOut);
}

#[test]
fn a_reader_waits_no_longer_than_its_timeout_and_is_good_after_it() {
    for address in WAYS {
        let (_listener, accepted, dialled) = connected(address, &Pki::new());
        let (_near, mut writer) = dialled.split();
        let (mut reader, _far) = accepted.split();
        reader.set_timeout(Some(Duration::from_millis(20))).unwrap();
        assert_eq!(reader.read(&mut [0; 4]).unwrap_err().kind(), ErrorKind::TimedOut);
        reader.set_timeout(None).unwrap();
        writer.write_all(b"late").unwrap();
        reader.read_exact(&mut [0; 4]).unwrap();
    }
}

#[test]
fn a_peer_that_vanishes_in_the_middle_is_an_error_on_both_halves() {
    for address in WAYS {
        let (_listener, accepted, dialled) = connected(address, &Pki::new());
        let (mut reader, mut far) = accepted.split();
        let closer = dialled.closer();
        let (_near, mut writer) = dialled.split();
        writer.write_all(b"some").unwrap();
        writer.flush().unwrap();
        closer.close();
        let mut received = Vec::new();
        let error = reader.read_to_end(&mut received).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{error}");
        assert!(b"some".starts_with(&received[..]));
        let error = far.write_all(&[0; 1 << 20]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
        assert!(writer.write_all(b"more").is_err(), "and on this side");
    }
}

/// Writes until it can't.
fn write_error(writer: &mut impl Write) -> String {
    loop {
        if let Err(error) = writer.write_all(&[0; 1000]) {
            return error.to_string();
        }
    }
}

#[test]
fn a_status_of_the_peer_is_the_error_of_the_next_write() {
    for address in WAYS {
        let (_listener, accepted, dialled) = connected(address, &Pki::new());
        let (_near, mut writer) = dialled.split();
        let transport: &dyn Any = accepted.transport();
        let flow = transport.downcast_ref::<Call>().unwrap().flow();
        std::thread::scope(|scope| {
            let writing = scope.spawn(move || write_error(&mut writer));
            flow.refuse(tonic::Status::resource_exhausted("the disk is full"));
            let error = writing.join().unwrap();
            assert!(error.contains("the disk is full (ResourceExhausted)"), "{error}");
        });
    }
}

#[test]
fn a_writer_learns_that_the_other_side_has_gone() {
    for address in WAYS {
        let (_listener, accepted, dialled) = connected(address, &Pki::new());
        let (_near, mut writer) = dialled.split();
        drop(accepted);
        let error = write_error(&mut writer);
        // The end of what comes is seen first, or that what goes is not taken.
        let says = ["closed before the end was announced", "the call was cut"];
        assert!(says.iter().any(|says| error.contains(says)), "{error}");
    }
}

#[test]
fn a_grpc_side_and_a_tls_side_do_not_mix_and_say_so() {
    let pki = Pki::new();
    let (a, b) = host_pair(&pki);
    for (served, dialled) in [("tls:", "grpc:"), ("grpc:", "tls:")] {
        let listener = listen(&format!("{served}127.0.0.1:0"), Some(a.clone()));
        let address = listener.local_address().to_string().replace(served, dialled);
        let dialer = Dialer::new(address.parse().unwrap(), Some(b.clone()));
        std::thread::scope(|scope| {
            let accepted = scope.spawn(|| listener.accept().unwrap().unwrap().handshake(TIMEOUT));
            let error = dialer.connect().unwrap_err();
            assert!(matches!(error, TransportError::NotTls { .. }), "{error:?}");
            let error = accepted.join().unwrap().unwrap_err();
            assert!(matches!(error, TransportError::NotTls { .. }), "{error:?}");
        });
    }
}
