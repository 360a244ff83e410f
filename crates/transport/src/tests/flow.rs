//! Data in a channel, and how a channel ends.

use std::any::Any;
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use super::{authenticated, bytes, ends, pair};
use crate::tls::{Tls, TlsSession};
use crate::{Channel, TransportError};

#[test]
fn channel_carries_both_directions_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let unix = format!("unix:{}", directory.path().join("s").display());
    for address in [authenticated(), &["tcp:127.0.0.1:0", unix.as_str()]].concat() {
        let (listener, dialer) = ends(address);
        let (accepted, dialed) = pair(&listener, &dialer);
        assert_eq!(accepted.peer().tls, authenticated().contains(&address));
        if accepted.peer().tls {
            assert_eq!(accepted.peer().names[0], "spiffe://vmferry/host/b");
            assert_eq!(dialed.peer().names[0], "spiffe://vmferry/host/a");
        }
        let length = if address.starts_with("tls") { 112 << 20 } else { 16 << 20 };
        let data = [bytes(length, 1), bytes(length, 2)];
        let data = &data;
        std::thread::scope(|scope| {
            for (channel, ours, theirs) in [(accepted, 0, 1), (dialed, 1, 0)] {
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
fn read_in_place_offers_the_rest_again_and_reports_the_end() {
    for address in [authenticated(), &["tcp:127.0.0.1:0"]].concat() {
        let (listener, dialer) = ends(address);
        let (accepted, dialed) = pair(&listener, &dialer);
        let data = &bytes(3 << 20, 4);
        std::thread::scope(|scope| {
            let (_reader, mut writer) = dialed.split();
            scope.spawn(move || {
                writer.write_all(data).unwrap();
                writer.finish().unwrap();
            });
            let (mut reader, _writer) = accepted.split();
            let mut received = Vec::new();
            // Alternates between a head that is read through the buffer and pages that are read in
            // place.
            loop {
                let head = received.len()..data.len().min(received.len() + 48);
                received.resize(head.end, 0);
                reader.read_exact(&mut received[head]).unwrap();
                let mut room = 70_001.min(data.len() - received.len());
                while room > 0 {
                    let taken = reader.read_in_place(&mut |piece| {
                        let length = piece.len().min(room);
                        received.extend_from_slice(&piece[..length]);
                        room -= length;
                        length
                    });
                    assert!(taken.unwrap() > 0, "{address}");
                }
                if received.len() == data.len() {
                    break;
                }
            }
            assert!(received == *data, "{address}");
            assert_eq!(reader.read_in_place(&mut |_| unreachable!()).unwrap(), 0);
        });
    }
}

fn session(channel: &Channel) -> Arc<TlsSession> {
    let transport: &dyn Any = channel.transport();
    Arc::clone(&transport.downcast_ref::<Tls>().unwrap().0)
}

#[test]
fn key_update_during_transfer_loses_nothing() {
    let (listener, dialer) = ends("tls:127.0.0.1:0");
    let (accepted, dialed) = pair(&listener, &dialer);
    let data = &bytes(32 << 20, 5);
    std::thread::scope(|scope| {
        for channel in [accepted, dialed] {
            let session = session(&channel);
            let (mut reader, mut writer) = channel.split();
            scope.spawn(move || {
                for piece in data.chunks(1 << 20) {
                    writer.write_all(piece).unwrap();
                    session.change_keys();
                }
                writer.finish().unwrap();
            });
            scope.spawn(move || {
                let mut received = Vec::new();
                reader.read_to_end(&mut received).unwrap();
                assert!(received == *data);
            });
        }
    });
}

#[test]
fn cut_link_is_an_error_and_an_announced_end_is_not() {
    for address in authenticated() {
        let (listener, dialer) = ends(address);
        let (accepted, dialed) = pair(&listener, &dialer);
        dialed.closer().close();
        let (mut reader, _writer) = accepted.split();
        let error = reader.read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof, "{address}: {error:?}");

        let (accepted, dialed) = pair(&listener, &dialer);
        let (_dialed_reader, mut writer) = dialed.split();
        writer.finish().unwrap();
        let (mut reader, _writer) = accepted.split();
        assert_eq!(reader.read(&mut [0; 8]).unwrap(), 0);
    }
}

#[test]
fn dropped_writer_announces_the_end_and_the_reader_continues() {
    for address in [authenticated(), &["tcp:127.0.0.1:0"]].concat() {
        let (listener, dialer) = ends(address);
        let (accepted, dialed) = pair(&listener, &dialer);
        let (mut near, mut question) = dialed.split();
        let (mut far, mut answers) = accepted.split();
        question.write_all(b"question").unwrap();
        drop(question);
        let mut received = Vec::new();
        far.read_to_end(&mut received).unwrap();
        assert_eq!(received, b"question");
        answers.write_all(b"answer").unwrap();
        drop((far, answers));
        received.clear();
        near.read_to_end(&mut received).unwrap();
        assert_eq!(received, b"answer");

        // A channel that was never split also announces its end.
        let (accepted, dialed) = pair(&listener, &dialer);
        drop(dialed);
        let (mut reader, _writer) = accepted.split();
        assert_eq!(reader.read(&mut [0; 8]).unwrap(), 0);
    }
}

#[test]
fn tls_writer_refuses_writes_and_announces_no_end_after_a_timeout() {
    let (listener, dialer) = ends("tls:127.0.0.1:0");
    let (accepted, dialed) = pair(&listener, &dialer);
    let (reader, mut writer) = dialed.split();
    writer.set_timeout(Some(Duration::from_millis(20))).unwrap();
    let data = bytes(64 << 20, 3);
    let mut written = 0;
    let error = loop {
        assert!(written < data.len(), "the peer seems to read");
        match writer.write(&data[written..]) {
            Ok(length) => written += length,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
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
fn data_before_a_forged_record_is_returned_before_the_error() {
    let (listener, dialer) = ends("tls:127.0.0.1:0");
    let (accepted, dialed) = pair(&listener, &dialer);
    let session = session(&dialed);
    let (mut dialed_reader, mut writer) = dialed.split();
    writer.write_all(b"true").unwrap();
    let mut forged = vec![0x17, 3, 3, 0, 32];
    forged.extend([7; 32]);
    session.stream().write_all(&forged).unwrap();
    let (mut reader, _writer) = accepted.split();
    let mut received = Vec::new();
    let error = reader.read_to_end(&mut received).unwrap_err();
    assert_eq!(received, b"true");
    let error = TransportError::from_io(error, "host-a");
    assert!(matches!(error, TransportError::Tls { .. }), "{error:?}");
    assert!(reader.read(&mut [0; 8]).is_err(), "the error is permanent");
    // The other side receives an alert.
    let reported = TransportError::from_io(dialed_reader.read(&mut [0; 8]).unwrap_err(), "host-b");
    assert!(matches!(reported, TransportError::Tls { .. }), "{reported:?}");
}

#[test]
fn close_wakes_both_halves() {
    for address in authenticated() {
        let (listener, dialer) = ends(address);
        let (_accepted, dialed) = pair(&listener, &dialer);
        let closer = dialed.closer();
        let (mut reader, mut writer) = dialed.split();
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
}
