//! Behavior specific to gRPC channels.

use std::any::Any;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use super::{Pki, TIMEOUT, bytes, ends, listen, pair};
use crate::grpc::Call;
use crate::{Channel, Dialer, Listener, TlsIdentity, TransportError};

const ADDRESSES: [&str; 2] = ["grpc:127.0.0.1:0", "grpc-ack:127.0.0.1:0"];

fn host_pair(pki: &Pki) -> (Arc<TlsIdentity>, Arc<TlsIdentity>) {
    (pki.local("a"), pki.local("b"))
}

fn connected(address: &str) -> (Listener, Channel, Channel) {
    let (listener, dialer) = ends(address);
    let (accepted, dialed) = pair(&listener, &dialer);
    (listener, accepted, dialed)
}

#[test]
fn vectored_writes_and_reads_of_any_size_carry_the_same_bytes() {
    for address in ADDRESSES {
        let (_listener, accepted, dialed) = connected(address);
        let data = &bytes(3 << 20, 9);
        let (_near, mut writer) = dialed.split();
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
fn listener_serves_both_modes_and_many_channels_at_once() {
    let pki = Pki::new();
    let (a, b) = host_pair(&pki);
    let listener = &listen("grpc:127.0.0.1:0", Some(a));
    let text = listener.local_address().to_string();
    std::thread::scope(|scope| {
        for number in 0..16_u64 {
            let scheme = if number % 2 == 0 { "grpc:" } else { "grpc-ack:" };
            let address = text.replace("grpc:", scheme).parse().unwrap();
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
fn writer_times_out_and_buffers_little_if_the_peer_never_reads() {
    let (_listener, accepted, dialed) = connected("grpc:127.0.0.1:0");
    let (near, mut writer) = dialed.split();
    writer.set_timeout(Some(Duration::from_millis(200))).unwrap();
    let data = bytes(64 << 20, 3);
    let mut written = 0;
    let error = loop {
        assert!(written < 32 << 20, "the buffers are not bounded");
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
    assert!(data.starts_with(&received), "a prefix of the data arrives, without an end");
}

#[test]
fn acknowledged_chunk_waits_until_the_previous_one_is_read() {
    let (_listener, accepted, dialed) = connected("grpc-ack:127.0.0.1:0");
    let (_near, mut writer) = dialed.split();
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
fn reader_times_out_and_stays_usable() {
    for address in ADDRESSES {
        let (_listener, accepted, dialed) = connected(address);
        let (_near, mut writer) = dialed.split();
        let (mut reader, _far) = accepted.split();
        reader.set_timeout(Some(Duration::from_millis(20))).unwrap();
        assert_eq!(reader.read(&mut [0; 4]).unwrap_err().kind(), ErrorKind::TimedOut);
        reader.set_timeout(None).unwrap();
        writer.write_all(b"late").unwrap();
        reader.read_exact(&mut [0; 4]).unwrap();
    }
}

#[test]
fn lost_peer_is_an_error_on_both_halves() {
    for address in ADDRESSES {
        let (_listener, accepted, dialed) = connected(address);
        let (mut reader, mut far) = accepted.split();
        let closer = dialed.closer();
        let (_near, mut writer) = dialed.split();
        writer.write_all(b"some").unwrap();
        writer.flush().unwrap();
        closer.close();
        let mut received = Vec::new();
        let error = reader.read_to_end(&mut received).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{error}");
        assert!(b"some".starts_with(&received[..]));
        let error = far.write_all(&[0; 1 << 20]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
        assert!(writer.write_all(b"more").is_err(), "this side fails too");
    }
}

/// Writes until a write fails.
fn write_error(writer: &mut impl Write) -> String {
    loop {
        if let Err(error) = writer.write_all(&[0; 1000]) {
            return error.to_string();
        }
    }
}

#[test]
fn peer_status_is_the_error_of_the_next_write() {
    for address in ADDRESSES {
        let (_listener, accepted, dialed) = connected(address);
        let (_near, mut writer) = dialed.split();
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
fn writer_reports_that_the_peer_has_gone() {
    for address in ADDRESSES {
        let (_listener, accepted, dialed) = connected(address);
        let (_near, mut writer) = dialed.split();
        drop(accepted);
        let error = write_error(&mut writer);
        // The writer may see the end of the answer first, or the failed write.
        let expected = ["closed before the end was announced", "the call was cut"];
        assert!(expected.iter().any(|text| error.contains(text)), "{error}");
    }
}

#[test]
fn grpc_and_tls_mismatch_is_reported_by_both_sides() {
    let pki = Pki::new();
    let (a, b) = host_pair(&pki);
    for (served, dialed) in [("tls:", "grpc:"), ("grpc:", "tls:")] {
        let listener = listen(&format!("{served}127.0.0.1:0"), Some(a.clone()));
        let address = listener.local_address().to_string().replace(served, dialed);
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
