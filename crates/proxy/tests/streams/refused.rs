//! Peers and programs that get nothing.

use std::io::{Read, Write};
use std::net::TcpStream;

use vmferry_proxy::ProxyEvent;
use vmferry_proxy::stream::StreamFailure;
use vmferry_wire::{Hello, Role, Token};

use crate::carried::read_all;
use crate::support::Hosts;

fn refusal(hosts: &Hosts) -> String {
    let event = hosts.events.wait_for('b', |event| matches!(event, ProxyEvent::Refused { .. }));
    event.to_string()
}

#[test]
fn connection_without_a_rule_is_refused_at_both_hosts() {
    let hosts = Hosts::with(|config| {
        config.forwards.iter_mut().for_each(|rule| rule.connect = None);
    });
    let near = std::os::unix::net::UnixStream::connect(&hosts.entrance).unwrap();
    assert_eq!(read_all(&near), b"");
    assert!(refusal(&hosts).contains("open forward rule: there is no rule"), "{}", refusal(&hosts));
    let ended = hosts.events.wait_for('a', |event| matches!(event, ProxyEvent::Ended { .. }));
    let ProxyEvent::Ended { failure: Some(StreamFailure::Refused { peer, reason }), .. } = ended
    else {
        panic!("{ended}");
    };
    assert_eq!((peer.as_str(), reason.contains("no rule")), ("b", true), "{reason}");
}

#[test]
fn program_that_does_not_listen_is_named() {
    let hosts = Hosts::start();
    std::fs::remove_file(hosts.directory.path().join("exit")).unwrap();
    let near = std::os::unix::net::UnixStream::connect(&hosts.entrance).unwrap();
    assert_eq!(read_all(&near), b"");
    assert!(refusal(&hosts).contains("exit can't be reached"), "{}", refusal(&hosts));
}

/// Sends these bytes to `b` and reads until it closes.
fn send(hosts: &Hosts, bytes: &[u8]) -> Vec<u8> {
    let mut link = TcpStream::connect(hosts.cable.address).unwrap();
    link.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    // A reset is an end as well.
    let _ = link.read_to_end(&mut answer);
    answer
}

fn hello(role: Role, version: u16) -> Vec<u8> {
    let (version_min, version_max, token) = (version, version, Token([7; 16]));
    Hello { version_min, version_max, role, lane: 0, token, attempt: 1 }.encode().to_vec()
}

#[test]
fn garbage_is_refused() {
    let hosts = Hosts::start();
    for bytes in [
        b"GET / HTTP/1.1\r\n\r\n that is not a greeting at all".to_vec(),
        hello(Role::Stream, 9),
        [hello(Role::Stream, 1), vec![9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]].concat(),
        [hello(Role::Stream, 1), vec![1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]].concat(),
        [hello(Role::Control, 1), vec![1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, b'x', 0, 0]].concat(),
    ] {
        let before = hosts.events.count('b', |event| matches!(event, ProxyEvent::Refused { .. }));
        send(&hosts, &bytes);
        let mut refused = 0;
        hosts.events.wait_for('b', |event| {
            refused += usize::from(matches!(event, ProxyEvent::Refused { .. }));
            refused > before
        });
    }
    // Everything works as before.
    let (near, far) = hosts.connect();
    drop(near);
    assert_eq!(read_all(&far), b"");
}

#[test]
fn unknown_stream_is_not_continued() {
    let hosts = Hosts::start();
    let opening = [vec![3, 1], vec![0; 8], vec![4, 0], b"rule".to_vec(), vec![0, 0]].concat();
    let answer = send(&hosts, &[hello(Role::Stream, 1), opening].concat());
    assert_eq!(answer[0], 2);
    assert!(String::from_utf8_lossy(&answer).contains("started again"));
}
