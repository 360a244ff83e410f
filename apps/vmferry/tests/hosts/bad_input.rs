//! Every kind of wrong input, each with its exit status and message, and an unharmed guest.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use crate::support::{Host, Running, World, run_ok, text};

const HOT: [&str; 4] = ["--memory", "64M", "--workload", "hot=8,random,rate=20000"];

/// A source with a hot guest.
fn source(world: &World) -> (Host, Running) {
    let host = world.host("a");
    let guest = host.guest("web", &HOT);
    (host, guest)
}

/// The port of `tcp:127.0.0.1:PORT`.
fn port(address: &str) -> u16 {
    address.rsplit(':').next().unwrap().parse().unwrap()
}

#[test]
fn untrusted_certificates_are_refused() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let good = world.tls();
    world.authority("other-ca");
    let stranger = world.certificate("other-ca", "stranger");
    let (mut destination, address) =
        world.host("b").receive(&["--listen", "127.0.0.1:0", "--tls", &good]);

    let sent = a.run(&["send", "web", "--to", &address, "--tls", text(&stranger)]);
    sent.failed(4, "authority that this host does not trust");
    destination.event("turned-away");
    a.check_guest("web");

    // The other host trusts the destination, and the destination does not trust it.
    let half = world.path("half");
    std::fs::create_dir(&half).unwrap();
    std::fs::copy(world.path("good/ca.pem"), half.join("ca.pem")).unwrap();
    for file in ["host.pem", "host.key"] {
        std::fs::copy(stranger.join(file), half.join(file)).unwrap();
    }
    let sent = a.run(&["send", "web", "--to", &address, "--tls", text(&half)]);
    sent.failed(4, "does not accept this host's certificate");
    let turned_away = destination.event("turned-away");
    assert!(turned_away["reason"].as_str().unwrap().contains("does not trust"), "{turned_away}");
    a.check_guest("web");

    // None of that stopped the destination.
    a.run(&["send", "web", "--to", &address, "--tls", &good]).exited(0);
    destination.event("serving");
    world.host("b").check_guest("web");
}

#[test]
fn expired_and_missing_certificates_are_refused() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let good = world.tls();
    let expired = world.path("expired");
    vmferry_transport::pki::issue(
        &world.path("ca"),
        &expired,
        &vmferry_transport::pki::IssueRequest {
            name: "old".into(),
            addresses: vec!["127.0.0.1".into()],
            validity: vmferry_transport::pki::Validity { from_days: -9, until_days: -2 },
        },
    )
    .unwrap();
    let (_destination, address) =
        world.host("b").receive(&["--listen", "127.0.0.1:0", "--tls", &good]);
    let sent = a.run(&["send", "web", "--to", &address, "--tls", text(&expired)]);
    sent.failed(4, "expired");
    a.check_guest("web");

    let (_destination, old) =
        world.host("c").receive(&["--listen", "127.0.0.1:0", "--tls", text(&expired)]);
    a.run(&["send", "web", "--to", &old, "--tls", &good]).failed(4, "expired");
    a.check_guest("web");

    a.run(&["send", "web", "--to", &address]).failed(2, "needs this host's certificate");
    let none = world.path("none");
    a.run(&["send", "web", "--to", &address, "--tls", text(&none)]).failed(4, "can't be read");
    world
        .host("d")
        .run(&["receive", "--listen", "127.0.0.1:0"])
        .failed(2, "needs this host's certificate");
    a.check_guest("web");
}

#[test]
fn plain_and_tls_peers_refuse_each_other() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let good = world.tls();
    let (_tls, tls) = world.host("b").receive(&["--listen", "127.0.0.1:0", "--tls", &good]);
    let as_plain = tls.replace("tls:", "tcp:");
    let sent = a.run(&["send", "web", "--to", &as_plain, "--plain"]).exited(3);
    sent.failed(3, "does one side use tls:");
    a.check_guest("web");

    let (mut plain, address) = world.host("c").receive(&["--listen", "tcp:127.0.0.1:0", "--plain"]);
    let as_tls = address.replace("tcp:", "tls:");
    let sent = a.run(&["send", "web", "--to", &as_tls, "--tls", &good]);
    assert!([Some(3), Some(4)].contains(&sent.code), "{sent:?}");
    let turned_away = plain.event("turned-away");
    assert!(turned_away["reason"].as_str().unwrap().contains("TLS"), "{turned_away}");
    a.check_guest("web");
    a.run(&["send", "web", "--to", &address]).failed(2, "neither encrypted nor authenticated");
}

#[test]
fn destination_refuses_garbage_and_other_versions() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let b = world.host("b");
    let (mut destination, address) = b.receive(&["--listen", "tcp:127.0.0.1:0", "--plain"]);
    for (bytes, said) in [
        (&b"GET / HTTP/1.1\r\nHost: x\r\n\r\nmore than forty bytes"[..], "HTTP"),
        (&b"SSH-2.0-OpenSSH_9.9 and then more than forty bytes"[..], "SSH"),
        (&[0xff; 64][..], "an unknown protocol that begins with"),
    ] {
        let mut stream = TcpStream::connect(("127.0.0.1", port(&address))).unwrap();
        stream.write_all(bytes).unwrap();
        let turned_away = destination.event("turned-away");
        assert!(turned_away["reason"].as_str().unwrap().contains(said), "{turned_away}");
    }
    // A greeting of version 99: the answer names this side's versions.
    let mut hello = *b"VMFERRY\n\x63\x00\x63\x00\x01\x00\x00\x00________________________";
    hello[16..].fill(0);
    let mut stream = TcpStream::connect(("127.0.0.1", port(&address))).unwrap();
    stream.write_all(&hello).unwrap();
    let mut reply = [0; 24];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(&reply[..14], b"VMFERRY\r\x01\x00\x01\x00\x02\x00");
    let turned_away = destination.event("turned-away");
    assert!(turned_away["reason"].as_str().unwrap().contains("99"), "{turned_away}");

    a.run(&["send", "web", "--to", &address, "--plain"]).exited(0);
    destination.event("serving");
    b.check_guest("web");
}

/// A destination that answers every greeting with these bytes.
fn impostor(answer: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut hello = [0; 40];
            if stream.read_exact(&mut hello).is_ok() {
                let _ = stream.write_all(answer);
                // Until the source closes the connection.
                let _ = stream.read(&mut hello);
            }
        }
    });
    address
}

#[test]
fn source_refuses_garbage_and_other_versions() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let version = b"VMFERRY\r\x01\x00\x07\x00\x09\x00\x09\x00\0\0\0\0\0\0\0\0";
    let sent = a.run(&["send", "web", "--to", &impostor(version), "--plain"]);
    sent.failed(5, "versions 7 to 9");
    a.check_guest("web");
    let sent =
        a.run(&["send", "web", "--to", &impostor(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "--plain"]);
    sent.failed(5, "HTTP");
    a.check_guest("web");
    let sent = a.run(&["send", "web", "--to", &impostor(&[0x41; 24]), "--plain"]);
    sent.failed(5, "AAAA");
    a.check_guest("web");
    // A correct greeting, and a wrong control message: type 0x4242.
    let liar =
        b"VMFERRY\r\x00\x00\x01\x00\x01\x00\x01\x00\0\0\0\0\0\0\0\0\x04\0\0\0\x42\x42\0\0\0\0\0\0";
    let sent = a.run(&["send", "web", "--to", &impostor(liar), "--plain"]);
    sent.failed(5, "unknown control message type");
    a.check_guest("web");
}

#[test]
fn destination_refuses_another_guest_or_layout() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let b = world.host("b");
    for (flags, message) in [
        (["--expect-name", "db"], "expects guest db"),
        (["--expect-uuid", "00000000-0000-0000-0000-000000000001"], "expects guest 00000000"),
        (["--expect-memory", "128M"], "memory layout differs"),
    ] {
        let (_destination, address) = b
            .receive(&[&["--listen", "tcp:127.0.0.1:0", "--plain", "--once"][..], &flags].concat());
        a.run(&["send", "web", "--to", &address, "--plain"]).failed(6, message);
        a.check_guest("web");
    }
}

#[test]
fn wrong_addresses_guests_and_ports_are_refused() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let b = world.host("b");
    let (_destination, address) = b.receive(&["--listen", "tcp:127.0.0.1:0", "--plain"]);
    b.run(&["receive", "--listen", &address, "--plain"]).failed(7, "is in use");
    a.run(&["send", "nobody", "--to", &address, "--plain"]).failed(8, "no guest listens");
    a.run(&["status", "nobody"]).failed(8, "no guest listens");
    a.run(&["cancel", "nobody"]).failed(8, "no guest listens");
    a.run(&["cancel", "web"]).failed(9, "no migration");
    a.run(&["resolve", "web", "--source-resumes"]).failed(9, "not in doubt");
    a.run(&["resolve", "nobody", "--source-resumes"]).failed(8, "no guest or session is named");
    a.run(&["run", "web"]).failed(7, "runs already");
    a.run(&["run", "../x"]).failed(2, "letters, digits");
    a.run(&["run", "x", "--workload", "dance"]).failed(2, "`dance` is unknown");
    a.run(&["run", "x", "--workload", "display=30"]).failed(2, "`display=30` is unknown");
    a.run(&["run", "x", "--workload", "read"]).failed(2, "`read` needs a size in MiB");
    for log in ["clear", "ring"] {
        a.run(&["run", "x", "--guest", "process", "--dirty-log", log])
            .failed(2, "needs a guest on KVM");
    }
    a.run(&["send", "web", "--to", "tcp:127.0.0.1:99999", "--plain"])
        .failed(2, "is not an address");
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    a.run(&["send", "web", "--to", &format!("tcp:{closed}"), "--plain"]).failed(3, "can't connect");
    a.check_guest("web");

    run_ok(&a, &["pause", "web"]);
    a.run(&["send", "web", "--to", &address, "--plain"]).failed(9, "resume");
    run_ok(&a, &["resume", "web"]);
    a.check_guest("web");
}

#[test]
fn second_send_and_second_guest_are_refused() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let b = world.host("b");
    let (_destination, address) = b.receive(&["--listen", "tcp:127.0.0.1:0", "--plain"]);
    // Slow enough to be under way when the second send arrives.
    let mut slow = vec!["send", "web", "--to", &address, "--plain", "--max-bandwidth", "1M"];
    slow.extend(["--compress", "none"]);
    let mut first = a.start(&slow);
    first.event("round-started");
    a.run(&slow).failed(7, "is under way");

    let other = world.host("c");
    let _other_guest = other.guest("db", &HOT);
    other
        .run(&["send", "db", "--to", &address, "--plain"])
        .failed(7, "receiving or running another");
    other.check_guest("db");

    run_ok(&a, &["cancel", "web"]);
    first.finish().failed(11, "cancelled");
    a.check_guest("web");
}

#[test]
fn unreachable_downtime_limit_is_refused() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let (_destination, address) =
        world.host("b").receive(&["--listen", "tcp:127.0.0.1:0", "--plain"]);
    let mut send = vec!["send", "web", "--to", &address, "--plain", "--compress", "none"];
    send.push("--downtime-limit");
    let sent = a.run(&[&send[..], &["1us"]].concat());
    sent.failed(10, "the handover itself takes about");
    a.check_guest("web");
    let sent =
        a.run(&[&send[..], &["50ms", "--max-rounds", "3", "--max-bandwidth", "16M"]].concat());
    sent.failed(10, "the guest writes");
    a.check_guest("web");
    let sent = a.run(&[&send[..], &["50ms", "--timeout", "1s", "--max-bandwidth", "16M"]].concat());
    sent.failed(10, "does not converge");
    a.check_guest("web");
}
