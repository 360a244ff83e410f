//! What is refused: the guest runs on at the source, and both ends say why.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use vmferry_qemu_lab::Version;
use vmferry_transport::{Dialer, IdentityFiles, Ticket, TlsIdentity};
use vmferry_wire::{HELLO_REPLY_BYTES, Hello, HelloReply, HelloStatus, Role, Token};

use crate::place::Place;
use crate::support::scene::{Scene, Way};

const BROKEN: &str =
    "\n[[receive]]\nname = \"broken\"\nexec = \"echo no such machine >&2; false\"\n";

#[test]
fn guest_that_is_refused_runs_on_and_both_ends_say_why() {
    let mut place = Place::new(Way::Attached);
    place.configure(BROKEN);
    let refused = |place: &mut Place, template: &str, code: i32, why: &str| {
        place.send(template).finish().failed(code, why);
        let event = place.daemon.event_where(|event| event["event"] == "refused");
        let reason = event["reason"].as_str().unwrap();
        assert!(reason.contains(why), "{event}");
        assert!(event["wanted"].as_str().unwrap().contains(template), "{event}");
        place.no_receiver_is_left();
    };
    refused(&mut place, "unknown", 6, "has no template \"unknown\"");
    refused(&mut place, "broken", 1, "no such machine");
    let policy = place.scene.world.path("policy.toml");
    let others = "[[allow]]\nsource = \"spiffe://vmferry/host/test-host\"\nguests = [\"web\"]\n";
    std::fs::write(policy, others).unwrap();
    refused(&mut place, "usual", 4, "tested");
    place.scene.runs_on_here();
}

#[test]
fn only_so_many_guests_arrive_at_once() {
    let scene = Scene::new(Version::V10_0, Way::Attached);
    let mut place = Place::with(scene, true, "max_receivers = 1");
    // Before the first one moves: starting a guest can take longer than that.
    let other = place.scene.machine.start_booted(&place.scene.lab, "other");
    let mut first = place.send("usual");
    first.event_where(|event| event["event"] == "round-started");
    let (host, address) = (place.scene.world.host("c"), place.address());
    let here = std::mem::replace(&mut place.scene.here, other);
    let second = place.send_from(&host, &address, "usual");
    second.finish().failed(7, "max_receivers");
    let mut other = std::mem::replace(&mut place.scene.here, here);
    other.check_guest();
    first.finish().exited(0);
    let arrived = place.received();
    // A guest that is here does not count.
    place.scene.here = other;
    place.send_from(&host, &address, "usual").finish().exited(0);
    place.received().check();
    arrived.check();
}

#[test]
fn wrong_tickets_are_refused() {
    let mut place = Place::new(Way::Attached);
    let files = IdentityFiles::in_directory(place.scene.world.tls().as_ref());
    let identity = std::sync::Arc::new(TlsIdentity::new(files).unwrap());
    let mut dialer = Dialer::new(place.address().parse().unwrap(), Some(identity));
    dialer.ticket = Some(Ticket([7; 16]));
    for role in [Role::Control, Role::Data, Role::Resume] {
        let (mut reader, mut writer) = dialer.connect().unwrap().split();
        let token = Token([0; 16]);
        let hello = Hello { version_min: 1, version_max: 2, role, lane: 0, token, attempt: 0 };
        writer.write_all(&hello.encode()).unwrap();
        let mut reply = [0; HELLO_REPLY_BYTES];
        reader.read_exact(&mut reply).unwrap();
        assert_eq!(HelloReply::parse(&reply).unwrap().status, HelloStatus::NoReceiver);
        let event = place.daemon.event_where(|event| event["event"] == "refused");
        assert!(event["reason"].as_str().unwrap().contains("no receiver"), "{event}");
    }
    // Without a certificate nothing is said at all.
    let mut bare = TcpStream::connect(place.cable.address).unwrap();
    bare.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    bare.write_all(b"TICKET\r\nseventeen bytes, and garbage").unwrap();
    let mut said = Vec::new();
    // The daemon may close the connection before it has read all.
    let _ = bare.read_to_end(&mut said);
    assert!(!said.starts_with(b"VMFERRY"), "{said:?}");
    let sent = place.send("usual").finish().exited(0);
    assert_eq!(sent.last()["digest_match"], true, "{sent:?}");
    place.received().check();
}
