//! What goes through a channel, and how it ends.

use std::any::Any;
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use super::{Pki, authenticated, bytes, listen, pair};
use crate::tls::{Tls, TlsSession};
use crate::{Channel, Dialer, TransportError};

#[test]
fn both_directions_at_once_carry_what_was_sent() {
    let pki = Pki::new();
    let directory = tempfile::tempdir().unwrap();
    let unix = format!("unix:{}", directory.path().join("s").display());
    let (a, b) = (pki.local("a"), pki.local("b"));
    for address in [authenticated(), &["tcp:127.0.0.1:0", unix.as_str()]].concat() {
        let tls = authenticated().contains(&address).then(|| (a.clone(), b.clone()));
        let (server, client) = tls.unzip();
        let listener = listen(address, server);
        let dialer = Dialer::new(listener.local_address().clone(), client);
        let (accepted, dialled) = pair(&listener, &dialer);
        assert_eq!(accepted.peer().tls, authenticated().contains(&address));
        if accepted.peer().tls {
            assert_eq!(accepted.peer().names[0], "spiffe://vmferry/host/b");
            assert_eq!(dialled.peer().names[0], "spiffe://vmferry/host/a");
        }
        let length = if address.starts_with("tls") { 112 << 20 } else { 16 << 20 };
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
fn what_is_not_taken_in_place_comes_again_and_the_end_is_seen() {
    let pki = Pki::new();
    let (a, b) = (pki.local("a"), pki.local("b"));
    for address in [authenticated(), &["tcp:127.0.0.1:0"]].concat() {
        let tls = authenticated().contains(&address).then(|| (a.clone(), b.clone()));
        let (server, client) = tls.unzip();
        let listener = listen(address, server);
        let dialer = Dialer::new(listener.local_address().clone(), client);
        let (accepted, dialled) = pair(&listener, &dialer);
        let data = &bytes(3 << 20, 4);
        std::thread::scope(|scope| {
            let (_reader, mut writer) = dialled.split();
            scope.spawn(move || {
                writer.write_all(data).unwrap();
                writer.finish().unwrap();
            });
            let (mut reader, _writer) = accepted.split();
            let mut received = Vec::new();
            // By turns a head that goes through the buffer, and no more in place than is wanted.
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
fn new_keys_in_the_midst_of_both_directions_lose_nothing() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let dialer = Dialer::new(listener.local_address().clone(), Some(pki.local("b")));
    let (accepted, dialled) = pair(&listener, &dialer);
    let data = &bytes(32 << 20, 5);
    std::thread::scope(|scope| {
        for channel in [accepted, dialled] {
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
fn a_cut_link_is_an_error_and_an_announced_end_is_not() {
    let pki = Pki::new();
    let (a, b) = (pki.local("a"), pki.local("b"));
    for address in authenticated() {
        let listener = listen(address, Some(a.clone()));
        let dialer = Dialer::new(listener.local_address().clone(), Some(b.clone()));
        let (accepted, dialled) = pair(&listener, &dialer);
        dialled.closer().close();
        let (mut reader, _writer) = accepted.split();
        let error = reader.read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof, "{address}: {error:?}");

        let (accepted, dialled) = pair(&listener, &dialer);
        let (_dialled_reader, mut writer) = dialled.split();
        writer.finish().unwrap();
        let (mut reader, _writer) = accepted.split();
        assert_eq!(reader.read(&mut [0; 8]).unwrap(), 0);
    }
}

#[test]
fn a_dropped_writer_announces_the_end_while_the_reader_goes_on() {
    let pki = Pki::new();
    let (a, b) = (pki.local("a"), pki.local("b"));
    for address in [authenticated(), &["tcp:127.0.0.1:0"]].concat() {
        let tls = authenticated().contains(&address).then(|| (a.clone(), b.clone()));
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
fn what_came_before_a_forged_record_is_handed_out_before_the_error() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let dialer = Dialer::new(listener.local_address().clone(), Some(pki.local("b")));
    let (accepted, dialled) = pair(&listener, &dialer);
    let session = session(&dialled);
    let (mut dialled_reader, mut writer) = dialled.split();
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
    assert!(reader.read(&mut [0; 8]).is_err(), "for good");
    // And the other side is told.
    let told = TransportError::from_io(dialled_reader.read(&mut [0; 8]).unwrap_err(), "host-b");
    assert!(matches!(told, TransportError::Tls { .. }), "{told:?}");
}

#[test]
fn closing_a_channel_wakes_both_halves() {
    let pki = Pki::new();
    let (a, b) = (pki.local("a"), pki.local("b"));
    for address in authenticated() {
        let listener = listen(address, Some(a.clone()));
        let dialer = Dialer::new(listener.local_address().clone(), Some(b.clone()));
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
}
