//! Cables that are cut.

use std::io::{Read, Write};
use std::time::Duration;

use vmferry_proxy::ProxyEvent;
use vmferry_proxy::stream::StreamFailure;

use crate::carried::{random, read_all, write};
use crate::support::Hosts;

#[test]
fn link_that_breaks_at_any_byte_loses_nothing() {
    let hosts = Hosts::start();
    let mut random_bytes = fastrand::Rng::with_seed(7);
    for turn in 0..40 {
        let (near, far) = hosts.connect();
        let (there, back) = (random(3 << 20, turn), random(1 << 20, turn + 1000));
        // Early breaks hit greetings and the first records.
        let most = if turn % 2 == 0 { 300 } else { 4 << 20 };
        hosts.cable.break_after(random_bytes.u64(0..most));
        let writers = [write(&near, there.clone()), write(&far, back.clone())];
        let reader = std::thread::spawn(move || read_all(&far));
        assert!(read_all(&near) == back, "turn {turn}: the way back");
        assert!(reader.join().unwrap() == there, "turn {turn}: the way there");
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    }
    let made = hosts.events.count('a', |event| matches!(event, ProxyEvent::LinkMade { .. }));
    assert!(made >= 30, "only {made} links broke");
    let failed = |event: &ProxyEvent| matches!(event, ProxyEvent::Ended { failure: Some(_), .. });
    assert_eq!((hosts.events.count('a', failed), hosts.events.count('b', failed)), (0, 0));
}

#[test]
fn frozen_cable_is_noticed_and_replaced() {
    let hosts = Hosts::start();
    let (near, far) = hosts.connect();
    (&near).write_all(b"before").unwrap();
    let mut before = [0; 6];
    (&far).read_exact(&mut before).unwrap();
    hosts.cable.freeze();
    let content = random(4 << 20, 1);
    let writer = write(&near, content.clone());
    hosts.events.wait_for('a', |event| matches!(event, ProxyEvent::LinkBroken { .. }));
    hosts.events.wait_for('b', |event| matches!(event, ProxyEvent::LinkBroken { .. }));
    // What the cable held arrives late, and must not disturb the new link.
    hosts.cable.mend();
    assert!(read_all(&far) == content);
    writer.join().unwrap();
    hosts.events.wait_for('a', |event| matches!(event, ProxyEvent::LinkMade { .. }));
}

#[test]
fn stream_that_begins_while_the_cable_is_cut_waits_for_it() {
    let hosts = Hosts::start();
    hosts.cable.cut();
    let near = std::os::unix::net::UnixStream::connect(&hosts.entrance).unwrap();
    (&near).write_all(b"hello").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    hosts.cable.mend();
    let (far, _) = hosts.exit.accept().unwrap();
    drop(near);
    assert_eq!(read_all(&far), b"hello");
}

#[test]
fn stream_without_a_link_for_too_long_ends_at_both_hosts() {
    let hosts = Hosts::with(|config| config.timings.reconnect = Duration::from_millis(1500));
    let (near, far) = hosts.connect();
    hosts.cable.cut();
    for (host, socket) in [('a', &near), ('b', &far)] {
        let ended = hosts.events.wait_for(host, |event| matches!(event, ProxyEvent::Ended { .. }));
        let ProxyEvent::Ended { failure: Some(StreamFailure::LinkLost { peer, .. }), .. } = ended
        else {
            panic!("{host}: {ended}");
        };
        assert!(host == 'b' || peer == "b");
        assert_eq!(read_all(socket), b"");
    }
}

#[test]
fn stream_of_a_daemon_that_was_started_again_ends() {
    let mut hosts = Hosts::start();
    let (near, far) = hosts.connect();
    (&near).write_all(b"before").unwrap();
    hosts.restart_b();
    assert_eq!(read_all(&near), b"");
    drop(far);
    let (again, _far) = hosts.connect();
    (&again).write_all(b"after").unwrap();
}
