//! Bytes in both directions, ends and slow programs.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use vmferry_proxy::ProxyEvent;

use crate::support::{Hosts, LIMIT};

/// `bytes` bytes that no codec makes smaller.
pub fn random(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut content = vec![0; bytes];
    random.fill(&mut content);
    content
}

/// Writes all of it and ends the direction, in a thread of its own.
pub fn write(socket: &UnixStream, content: Vec<u8>) -> std::thread::JoinHandle<()> {
    let mut socket = socket.try_clone().unwrap();
    std::thread::spawn(move || {
        socket.write_all(&content).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
    })
}

pub fn read_all(mut socket: &UnixStream) -> Vec<u8> {
    let mut content = Vec::new();
    socket.read_to_end(&mut content).unwrap();
    content
}

#[test]
fn both_directions_are_carried_at_once() {
    let hosts = Hosts::start();
    let (near, far) = hosts.connect();
    let (there, back) = (random(20 << 20, 1), random(5 << 20, 2));
    let writers = [write(&near, there.clone()), write(&far, back.clone())];
    let reader = std::thread::spawn(move || read_all(&far));
    assert!(read_all(&near) == back);
    assert!(reader.join().unwrap() == there);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    for host in ['a', 'b'] {
        let ended = hosts.events.wait_for(host, |event| matches!(event, ProxyEvent::Ended { .. }));
        let ProxyEvent::Ended { failure, .. } = ended else { unreachable!() };
        assert_eq!(failure, None, "{host}");
    }
    assert_eq!(hosts.a.status(), []);
    assert_eq!(hosts.cable.connections(), 1);
}

#[test]
fn one_direction_may_end_long_before_the_other() {
    let hosts = Hosts::start();
    let (near, mut far) = hosts.connect();
    write(&near, b"question".to_vec()).join().unwrap();
    assert_eq!(read_all(&far), b"question");
    far.write_all(b"answer").unwrap();
    let mut answer = [0; 6];
    (&near).read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"answer");
    drop(far);
    assert_eq!(read_all(&near), b"");
}

#[test]
fn short_messages_are_not_held_back() {
    let hosts = Hosts::start();
    let (mut near, mut far) = hosts.connect();
    for number in 0..200_u8 {
        near.write_all(&[number]).unwrap();
        let mut byte = [0];
        far.read_exact(&mut byte).unwrap();
        far.write_all(&byte).unwrap();
        near.read_exact(&mut byte).unwrap();
        assert_eq!(byte, [number]);
    }
}

#[test]
fn compressible_bytes_take_less_of_a_capped_link() {
    let hosts = Hosts::with(|config| config.bandwidth = Some(4 << 20));
    let (near, far) = hosts.connect();
    let line = b"the same line of a disk image, again and again, with a number: ";
    let content: Vec<u8> =
        (0..200_000_u32).flat_map(|number| [&line[..], &number.to_le_bytes()].concat()).collect();
    let writer = write(&near, content.clone());
    assert!(read_all(&far) == content);
    writer.join().unwrap();
    let carried = hosts.cable.carried();
    assert!(carried < content.len() as u64 / 3, "{carried} of {} bytes", content.len());
}

#[test]
fn program_that_does_not_read_stops_the_one_that_writes() {
    let hosts = Hosts::start();
    let (mut near, far) = hosts.connect();
    near.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    let (piece, mut written) = (random(1 << 20, 3), 0);
    let refused = loop {
        match near.write(&piece) {
            Ok(bytes) => written += bytes,
            Err(error) => break error,
        }
        assert!(written < 200 << 20, "nothing stops it");
    };
    assert_eq!(refused.kind(), std::io::ErrorKind::WouldBlock);
    // What was accepted arrives.
    near.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&far).len(), written);
}

#[test]
fn program_that_closes_its_end_is_not_written_to() {
    let hosts = Hosts::start();
    let (mut near, far) = hosts.connect();
    near.write_all(b"one").unwrap();
    drop(far);
    let started = Instant::now();
    // The first writes may be accepted before the news arrives.
    while near.write_all(&[0; 4096]).is_ok() {
        assert!(started.elapsed() < LIMIT);
    }
    drop(near);
    for host in ['a', 'b'] {
        hosts
            .events
            .wait_for(host, |event| matches!(event, ProxyEvent::Ended { failure: None, .. }));
    }
}

#[test]
fn many_streams_share_the_cable() {
    let hosts = Hosts::start();
    std::thread::scope(|scope| {
        let pairs: Vec<_> = (0..20).map(|_| hosts.connect()).collect();
        for (seed, (near, far)) in pairs.into_iter().enumerate() {
            scope.spawn(move || {
                let content = random(300 << 10, seed as u64);
                let writer = write(&near, content.clone());
                assert!(read_all(&far) == content);
                writer.join().unwrap();
            });
        }
    });
}
