//! Moves a guest over every transport and compares every byte.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::support::{World, text};
use rustix::io::{FdFlags, fcntl_setfd};
use serde_json::Value;

/// Moves a hot guest over two lanes; `send_to` derives the source's address from the destination's.
fn moves(listen: &str, tls: bool, send_to: impl Fn(&str) -> String) {
    let world = World::new();
    let directory = world.tls();
    let tls = if tls { vec!["--tls", &directory] } else { vec![] };
    let (a, b) = (world.host("a"), world.host("b"));
    let workload = "fill=8,text hot=24,random,rate=40000 ticks";
    let vmm = a.guest("web", &["--memory", "64M", "--workload", workload]);
    let (mut next, address) = b.receive(&[&["--listen", listen, "--once"][..], &tls[..]].concat());
    let to = send_to(&address);
    let arguments =
        ["send", "web", "--to", &to, "--verify", "--channels", "2", "--max-rounds", "4"];
    let limits = ["--downtime-limit", "2s", "--when-stuck", "switch-over"];
    let sent = a.run(&[&arguments[..], &limits[..], &tls[..]].concat());
    assert_eq!(sent.code, Some(0), "{listen}: {sent:?}");
    let stats: &Value = sent.last();
    assert_eq!(stats["digest_match"], true, "{listen}: {stats}");
    assert_eq!(stats["verify_match"], true, "{listen}: {stats}");
    assert_eq!(vmm.finish().code, Some(0), "the old VMM exits regularly");
    next.event("serving");
    b.check_guest("web");
}

#[test]
fn guest_moves_over_grpc_streamed() {
    moves("grpc:127.0.0.1:0", true, str::to_owned);
}

#[test]
fn guest_moves_over_grpc_acknowledged() {
    // A listener for one gRPC mode serves the other mode too.
    moves("grpc:127.0.0.1:0", true, |address| address.replace("grpc:", "grpc-ack:"));
    moves("grpc-ack:127.0.0.1:0", true, str::to_owned);
}

#[test]
fn guest_moves_over_a_unix_socket() {
    let world = World::new();
    moves(&format!("unix:{}", text(&world.path("link"))), false, str::to_owned);
}

#[test]
fn guest_moves_over_inherited_sockets() {
    // The control channel, two lanes, and a spare channel. Both processes inherit all of them.
    let pairs = (0..4).map(|_| UnixStream::pair().unwrap());
    let (near, far): (Vec<_>, Vec<_>) =
        pairs.map(|(near, far)| (OwnedFd::from(near), OwnedFd::from(far))).unzip();
    for socket in near.iter().chain(&far) {
        fcntl_setfd(socket, FdFlags::empty()).unwrap();
    }
    let address = |sockets: &[OwnedFd]| {
        let numbers = sockets.iter().map(|socket| socket.as_raw_fd().to_string());
        format!("fd:{}", numbers.collect::<Vec<_>>().join(","))
    };
    moves(&address(&far), false, |_| address(&near));
}

#[test]
fn inherited_descriptors_that_are_no_sockets_are_refused_by_number() {
    let world = World::new();
    let host = world.host("a");
    host.run(&["receive", "--listen", "fd:0"]).failed(3, "descriptor 0 is not a socket");
    let _guest = host.guest("web", &["--memory", "32M"]);
    let sent = host.run(&["send", "web", "--to", "fd:999"]);
    sent.failed(3, "descriptor 999 is not open");
}
