//! The check for leftovers of a migration finds deliberate leftovers.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::support::World;
use crate::support::leftovers::{Living, descriptors_at_rest, left, look, processes};
use crate::support::trial::{GUEST, claim};
use vmferry_handover::journal::{FileJournal, Journal, Record, Side};
use vmferry_wire::{GuestIdentity, SessionId};

/// Less than the 10 s after which a VMM closes a silent connection.
const PATIENCE: Duration = Duration::from_secs(5);

#[test]
fn deliberate_leftovers_are_found() {
    let world = World::without_certificates();
    let (a, b) = (world.host("a"), world.host("b"));
    let guest = a.guest("web", &GUEST);
    let pid = guest.child.id();
    let before = descriptors_at_rest(pid);
    let living = [Living { host: &a, pid, descriptors: before }];
    let (directory, hosts) = (world.directory.path(), [&a, &b]);
    let nothing = || assert_eq!(left(directory, &hosts, &living, &[]), [""; 0]);
    let found = |what: &str| {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = look(directory, &hosts, &living, &[]);
            if found.len() == 1 && found[0].contains(what) {
                return;
            }
            assert!(Instant::now() < deadline, "{what}: {found:?}");
            // No event tells when a process is about to accept a connection.
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    nothing();

    let (mut process, _) = b.receive(&["--listen", "tcp:127.0.0.1:0", "--plain"]);
    found("lives: ");
    process.kill();

    let connection = UnixStream::connect(a.runtime.join("web.sock")).unwrap();
    found("of `socket` open");
    drop(connection);
    nothing();

    std::fs::write(b.runtime.join("core"), "").unwrap();
    found("core is left");
    std::fs::remove_file(b.runtime.join("core")).unwrap();

    let identity = GuestIdentity { uuid: uuid::Uuid::new_v4(), name: "web".into() };
    let journals = a.runtime.join("journal");
    let session = SessionId([1; 16]);
    let journal =
        FileJournal::begin(&journals, session, Side::Source, identity, ("b", &[])).unwrap();
    found("a process still leads session");
    drop(journal);
    nothing();

    drop(guest);
    assert!(processes(directory).is_empty());
}

#[test]
fn two_owners_are_found() {
    let world = World::without_certificates();
    let (a, b) = (world.host("a"), world.host("b"));
    let _here = a.guest("web", &GUEST);
    assert!(claim(&a).runs && !claim(&b).runs);
    let _there = b.guest("web", &GUEST);
    assert!(claim(&a).runs && claim(&b).runs);
    let identity = GuestIdentity { uuid: uuid::Uuid::new_v4(), name: "web".into() };
    for (host, side) in [(&a, Side::Source), (&b, Side::Destination)] {
        assert!(!claim(host).has);
        let (journals, session) = (host.runtime.join("journal"), SessionId([1; 16]));
        let peer = ("the other", [].as_slice());
        let mut journal =
            FileJournal::begin(&journals, session, side, identity.clone(), peer).unwrap();
        if side == Side::Destination {
            journal.append(&Record::RunIntent).unwrap();
        }
        assert!(claim(host).has);
    }
}
