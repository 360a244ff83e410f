//! Hosts of two releases: each protocol version on either side, in real processes, and commands and
//! VMMs of different releases.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use vmferry_kit::need_kvm;

use crate::support::proxy::Proxy;
use crate::support::scene::{Scene, Way};
use crate::support::{Host, World, text};
use serde_json::{Value, json};
use vmferry_qemu_lab::Version;

/// The options of `send` and `receive`, and the version that they negotiate.
const PAIRS: [(&[&str], &[&str], u64); 4] = [
    (&["--protocol", "1"], &["--protocol", "1"], 1),
    (&[], &["--protocol", "1"], 1),
    (&["--protocol", "1"], &[], 1),
    (&[], &[], 2),
];

const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// Checks that each side has reported what the version lets it report.
fn assert_introduced(version: u64, stats: &Value, received: &Value, vmm: &str) {
    assert_eq!((&stats["protocol"], &received["protocol"]), (&version.into(), &version.into()));
    for said in [&stats["destination"], &received["source"]] {
        if version == 1 {
            assert!(said.is_null(), "{said}");
        } else {
            assert_eq!(said["vmferry"], RELEASE);
            assert!(said["vmm"].as_str().unwrap().starts_with(vmm), "{said}");
        }
    }
}

#[test]
fn guest_moves_with_every_pair_of_versions() {
    need_kvm();
    let world = World::new();
    let mut host = world.host("0");
    let mut running = host.guest("web", &["--memory", "64M", "--workload", "hot=4,random ticks"]);
    for (index, (send, receive, version)) in (1..).zip(PAIRS) {
        let next = world.host(&index.to_string());
        let link = ["--listen", "tcp:127.0.0.1:0", "--plain", "--once"];
        let (mut destination, address) = next.receive(&[&link[..], receive].concat());
        let link = ["send", "web", "--to", &address, "--plain", "--verify"];
        let sent = host.run(&[&link[..], send].concat()).exited(0);
        let stats = sent.last();
        assert_eq!((&stats["digest_match"], &stats["verify_match"]), (&json!(true), &json!(true)));
        let connected = sent.lines.iter().find(|line| line["event"] == "connected").unwrap();
        assert_eq!(connected["protocol"], version, "{connected}");
        let received = destination.event("received");
        assert_introduced(version, stats, &received["stats"], "microvm ");
        destination.event("serving");
        next.check_guest("web");
        running.finish().exited(0);
        (host, running) = (next, destination);
    }
}

/// The query and COMMIT use a channel with a new greeting.
#[test]
fn doubt_is_resolved_between_two_releases() {
    need_kvm();
    for (send, receive, version) in &PAIRS[1..3] {
        let world = World::new();
        let (a, b) = (world.host("a"), world.host("b"));
        let _guest = a.guest("web", &["--memory", "64M", "--workload", "hot=4,random ticks"]);
        let link = ["--listen", "tcp:127.0.0.1:0", "--plain", "--once"];
        let (mut destination, address) = b.receive(&[&link[..], receive].concat());
        let proxy = Proxy::before(&address);
        let link = ["send", "web", "--to", &proxy.address, "--plain", "--verify"];
        let mut sending = a.start(&[&link[..], send].concat());
        sending.event("in-doubt");
        proxy.heal();
        destination.event("serving");
        let sent = sending.finish().exited(0);
        assert_eq!(sent.last()["protocol"], *version);
        b.check_guest("web");
    }
}

#[test]
fn hosts_without_a_common_version_keep_the_guest_and_give_advice() {
    need_kvm();
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let _guest = a.guest("web", &["--memory", "64M", "--workload", "hot=4,random ticks"]);
    let link = ["--listen", "tcp:127.0.0.1:0", "--plain", "--protocol", "1"];
    let (mut destination, address) = b.receive(&link);
    let send =
        |protocol| a.run(&["send", "web", "--to", &address, "--plain", "--protocol", protocol]);
    send("2").failed(
        5,
        "it speaks protocol version 1, and this side version 2: let both sides choose the version",
    );
    let told = destination.event("turned-away");
    let reason = told["reason"].as_str().unwrap();
    assert!(
        reason.contains("the source speaks protocol version 2, and this side version 1"),
        "{reason}"
    );
    a.check_guest("web");
    assert_eq!(send("1").code, Some(0), "it went on listening");
}

#[test]
fn unknown_version_is_a_usage_error() {
    let world = World::new();
    for arguments in [
        &["send", "web", "--to", "x:1", "--plain", "--protocol", "3"][..],
        &["receive", "--listen", "x:1", "--plain", "--protocol", "0"],
    ] {
        assert_eq!(world.host("a").run(arguments).code, Some(2), "{arguments:?}");
    }
}

/// A VMM's answer to a command of any release: the status and the first line.
fn ask(host: &Host, method: &str, path: &str, body: &str) -> (u16, Value) {
    let mut socket = UnixStream::connect(host.runtime.join("web.sock")).unwrap();
    let length = body.len();
    write!(socket, "{method} {path} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
    let mut lines = BufReader::new(socket).lines().map(Result::unwrap);
    let status = lines.next().unwrap();
    let status = status.split(' ').nth(1).unwrap().parse().unwrap();
    let body = lines.skip_while(|line| !line.is_empty()).nth(1).unwrap();
    (status, serde_json::from_str(&body).unwrap())
}

#[test]
fn newer_commands_get_a_clear_answer() {
    need_kvm();
    let world = World::new();
    let a = world.host("a");
    let _guest = a.guest("web", &["--memory", "64M", "--workload", "hot=4,random ticks"]);
    let refused = |method: &str, path: &str, body: &str, expected: (u16, &str), words: &str| {
        let (status, answer) = ask(&a, method, path, body);
        assert_eq!((status, answer["error"]["code"].as_str().unwrap()), expected, "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(words) && message.contains(RELEASE), "{message}");
    };
    let unknown = (404, "no-such-request");
    refused(
        "PUT",
        "/api/v1/guest/freeze",
        "{\"disks\":true}",
        unknown,
        "no request `PUT /api/v1/guest/freeze`",
    );
    // An option that keeps a guest safe must not be ignored.
    let migrate =
        json!({ "to": "unix:/nowhere", "channels": 1, "reconnect_timeout_ms": 0, "verify": true });
    let mut newer = migrate.clone();
    newer["flush_disks_first"] = true.into();
    let text = newer.to_string();
    refused(
        "PUT",
        "/api/v1/migration",
        &text,
        (400, "bad-request"),
        "unknown field `flush_disks_first`",
    );
    a.check_guest("web");
    // The negative control: the same request without the option and without optional fields.
    let mut optional = migrate;
    optional["optional"] = json!({ "because": "of maintenance" });
    let (status, answer) = ask(&a, "PUT", "/api/v1/migration", &optional.to_string());
    assert_eq!((status, &answer["event"]["event"]), (200, &json!("started")), "{answer}");
    let (status, answer) = ask(&a, "GET", "/api/v1/guest", "");
    assert_eq!((status, &answer["release"]), (200, &json!(RELEASE)), "{answer}");
}

/// A QEMU guest, attached and carried, to and from a host that is pinned to the previous release's
/// version.
fn qemu(way: Way) {
    for (send, receive, version) in &PAIRS[1..] {
        let mut scene = Scene::emulated(Version::V10_0, way);
        let link = ["--listen", "tcp:127.0.0.1:0", "--plain"];
        let (mut there, mut receiving, address) = scene.receive(&[&link[..], receive].concat());
        let mode = if way == Way::Carried { "carried" } else { "attached" };
        let qmp = text(&scene.here.qmp).to_owned();
        let link = ["send", "--qemu", &qmp, "--mode", mode, "--to", &address, "--plain"];
        let sent = scene.a.run(&[&link[..], send].concat()).exited(0);
        let received = receiving.event("received");
        assert_introduced(*version, sent.last(), &received["stats"], "QEMU 10.0");
        assert!(scene.here.child.wait().unwrap().success());
        there.check_guest();
    }
}

#[test]
fn attached_qemu_moves_between_versions() {
    qemu(Way::Attached);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn carried_qemu_moves_between_versions() {
    qemu(Way::Carried);
}
