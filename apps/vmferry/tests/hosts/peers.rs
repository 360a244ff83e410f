//! Peers with valid certificates that misbehave: by name, and by what they send inside TLS.

use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::support::{Host, Running, World, run_ok, text};
use vmferry_transport::{Address, Dialer, Listener, TlsIdentity};

fn source(world: &World) -> (Host, Running) {
    let host = world.host("a");
    let guest = host.guest("web", &["--memory", "64M", "--workload", "hot=4,random,rate=20000"]);
    (host, guest)
}

fn identity(directory: &str) -> Arc<TlsIdentity> {
    let at = Path::new(directory);
    let files = (at.join("ca.pem"), at.join("host.pem"), at.join("host.key"));
    Arc::new(TlsIdentity::load(&files.0, &files.1, &files.2).unwrap())
}

#[test]
fn peer_name_can_differ_from_the_address() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let (good, authority, out) = (world.tls(), world.path("ca"), world.path("named"));
    let issue = ["pki", "issue", "far", "--dir", text(&authority), "--out", text(&out)];
    run_ok(&world.host("pki"), &[&issue[..], &["--address", "host-b.example"]].concat());
    let (mut destination, address) =
        world.host("b").receive(&["--listen", "127.0.0.1:0", "--tls", text(&out)]);
    let send = ["send", "web", "--to", &address, "--tls", &good];
    let with = |name: &str| a.run(&[&send[..], &["--server-name", name]].concat());
    a.run(&send).failed(4, "not for 127.0.0.1");
    with("host-c.example").failed(4, "not for host-c.example");
    a.check_guest("web");
    with("host-b.example").exited(0);
    destination.event("serving");
    world.host("b").check_guest("web");
}

#[test]
fn garbage_inside_tls_is_refused() {
    let world = World::new();
    let (a, _guest) = source(&world);
    let good = world.tls();
    // A client with a valid certificate that does not speak the protocol.
    let (mut destination, address) =
        world.host("b").receive(&["--listen", "127.0.0.1:0", "--tls", &good]);
    let parsed: Address = address.parse().unwrap();
    let channel = Dialer::new(parsed, Some(identity(&good))).connect().unwrap();
    let (mut reader, mut writer) = channel.split();
    writer.write_all(&[0x5a; 64]).unwrap();
    let said = destination.event("turned-away");
    assert!(
        said["reason"].as_str().unwrap().contains("an unknown protocol that begins with"),
        "{said}"
    );
    // The destination closes the connection.
    let mut rest = Vec::new();
    let _ = reader.read_to_end(&mut rest);
    drop((reader, writer));

    // A server with a valid certificate that answers with garbage.
    let at: Address = "tls:127.0.0.1:0".parse().unwrap();
    let listener = Listener::bind(&at, Some(identity(&good))).unwrap();
    let liar = listener.local_address().to_string();
    let answering = std::thread::spawn(move || {
        let pending = listener.accept().unwrap().unwrap();
        let (mut reader, mut writer) = pending.handshake(Duration::from_secs(10)).unwrap().split();
        reader.read_exact(&mut [0; 40]).unwrap();
        writer.write_all(&[0x41; 24]).unwrap();
        // Until the source closes the connection.
        let _ = reader.read(&mut [0; 1]);
    });
    a.run(&["send", "web", "--to", &liar, "--tls", &good]).failed(5, "AAAA");
    answering.join().unwrap();
    a.check_guest("web");

    a.run(&["send", "web", "--to", &address, "--tls", &good]).exited(0);
    destination.event("serving");
    world.host("b").check_guest("web");
}
