//! Hosts that were declared lost, in a real etcd.

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;

use uuid::Uuid;
use vmferry::witness::{Register, Witness, WitnessRequest};
use vmferry_etcd_lab::EtcdCluster;
use vmferry_fleet::{EtcdWitness, Fate, Fleet, GuestPhase, Loss, Membership, MigrationPhase};
use vmferry_handover::{SessionId, SessionWord};

use support::{fleet, guest, host, identity, name, order};

/// A fleet of the hosts `a`, which will be lost, and `b`.
struct Place {
    fleet: Arc<Fleet>,
    a: Membership,
    b: Membership,
    etcd: EtcdCluster,
}

fn loss() -> Loss {
    Loss { at: 7, fence: "fence_ipmilan".into() }
}

impl Place {
    fn new() -> Self {
        let etcd = EtcdCluster::start(1);
        let fleet = Arc::new(fleet(&etcd));
        let join = |host_name, instance| {
            Membership::begin(Arc::clone(&fleet), name(host_name), host(instance)).unwrap()
        };
        let (a, b) = (join("a", 1), join("b", 2));
        Self { fleet, a, b, etcd }
    }

    fn witness_of(&self, host: &str) -> EtcdWitness {
        EtcdWitness::new(Arc::clone(&self.fleet), name(host))
    }

    /// A session in which `host` receives a guest.
    fn session(&self, number: u8, host: &str, guest: u8) -> SessionId {
        let session = SessionId([number; 16]);
        let register = self.witness_of(host).open(session, &identity(guest)).unwrap();
        assert_eq!(register, Register::Open);
        session
    }

    fn ask(&self, session: SessionId, requests: &[WitnessRequest]) -> Register {
        let witness = self.witness_of("b");
        for request in requests {
            witness.ask(session, Some(*request)).unwrap();
        }
        witness.ask(session, None).unwrap()
    }

    /// Declares `a` lost; returns the fates of its guests.
    fn lose(&self) -> BTreeMap<String, Fate> {
        let lost = self.fleet.declare_lost(&name("a"), &loss()).unwrap();
        lost.into_iter().map(|guest| (guest.name, guest.fate)).collect()
    }

    fn guests_of(&self, host: &str) -> usize {
        let hosts = self.fleet.hosts().unwrap();
        hosts.iter().find(|view| view.name == name(host)).unwrap().guests.len()
    }
}

#[test]
fn guests_of_a_lost_host_are_free_unless_another_host_has_claimed_them() {
    use WitnessRequest::{Claim, Report, TakeBack};
    let mut place = Place::new();
    place.a.publish((1..=8).map(|n| guest(n, GuestPhase::Running)).collect()).unwrap();
    place.b.publish(vec![guest(8, GuestPhase::Running)]).unwrap();
    let b = || name("b");
    // 1 was never sent, and 2 has COMMIT on its way.
    let late = place.session(2, "b", 2);
    let claimed = place.session(3, "b", 3);
    place.ask(claimed, &[Claim]);
    let owned = place.session(4, "b", 4);
    place.ask(owned, &[Claim, Report(SessionWord::Owns)]);
    let lacking = place.session(5, "b", 5);
    place.ask(lacking, &[Claim, Report(SessionWord::Fetching)]);
    let aborted = place.session(6, "b", 6);
    place.ask(aborted, &[Claim, Report(SessionWord::Aborted)]);
    // 7 has been on `b`, and has come back since.
    let there = place.session(7, "b", 7);
    place.ask(there, &[Claim, Report(SessionWord::Owns)]);
    let back = place.session(17, "a", 7);
    place.ask(back, &[Claim, Report(SessionWord::Owns)]);

    let expected = [
        ("guest-1", Fate::Free),
        ("guest-2", Fate::Free),
        ("guest-3", Fate::Claimed { host: b() }),
        ("guest-4", Fate::Elsewhere { host: b() }),
        ("guest-5", Fate::Lacking { host: b() }),
        ("guest-6", Fate::Free),
        ("guest-7", Fate::Free),
        ("guest-8", Fate::Elsewhere { host: b() }),
    ];
    let expected: BTreeMap<String, Fate> =
        expected.into_iter().map(|(guest, fate)| (guest.to_owned(), fate)).collect();
    assert_eq!(place.lose(), expected);
    // Nothing that is free can be claimed any more, and the source can't take it back.
    assert_eq!(place.ask(late, &[Claim, TakeBack]), Register::Freed);
    // What is not decided is decided by what `b` says.
    assert_eq!(place.lose(), expected);
    place.ask(claimed, &[Report(SessionWord::Aborted)]);
    assert_eq!(place.lose()["guest-3"], Fate::Free);
    // The guest was started elsewhere.
    place.b.publish(vec![guest(1, GuestPhase::Running), guest(8, GuestPhase::Running)]).unwrap();
    assert_eq!(place.lose()["guest-1"], Fate::Elsewhere { host: b() });
    assert_eq!((place.guests_of("a"), place.guests_of("b")), (8, 2));
}

#[test]
fn guest_that_was_on_its_way_to_the_lost_host_is_left_to_its_source() {
    let mut place = Place::new();
    let open = place.session(1, "a", 1);
    let claimed = place.session(2, "a", 2);
    place.ask(claimed, &[WitnessRequest::Claim]);
    place.b.publish(vec![guest(1, GuestPhase::Sending), guest(2, GuestPhase::InDoubt)]).unwrap();
    // It has run there by the lost host's word, which may be older than its end.
    place.a.publish(vec![guest(1, GuestPhase::Other), guest(2, GuestPhase::Running)]).unwrap();
    let fates = place.lose();
    assert_eq!(fates["guest-1"], Fate::Elsewhere { host: name("b") });
    assert_eq!(fates["guest-2"], Fate::InDoubt { host: name("b") });
    // The source takes this one back itself, and nobody knows whether the other one has run.
    assert_eq!(place.ask(open, &[WitnessRequest::TakeBack]), Register::TakenBack);
    assert_eq!(place.ask(claimed, &[WitnessRequest::TakeBack]), Register::Claimed);
    assert_eq!(place.guests_of("b"), 2);
}

/// The lost host's entry is old: the guest has left it long ago.
#[test]
fn session_of_a_guest_that_another_host_sends_is_left_alone() {
    let mut place = Place::new();
    place.a.publish(vec![guest(1, GuestPhase::Running)]).unwrap();
    place.b.publish(vec![guest(1, GuestPhase::Sending)]).unwrap();
    let session = place.session(1, "c", 1);
    assert_eq!(place.lose()["guest-1"], Fate::Elsewhere { host: name("b") });
    assert_eq!(place.ask(session, &[WitnessRequest::Claim]), Register::Claimed);
}

#[test]
fn lost_host_is_out_of_the_fleet_until_it_is_readmitted() {
    let mut place = Place::new();
    place.a.publish(vec![guest(1, GuestPhase::Running)]).unwrap();
    place.a.check().unwrap();
    place.lose();
    let again = Membership::begin(Arc::clone(&place.fleet), name("a"), host(1));
    for error in [place.a.check().unwrap_err(), again.unwrap_err()] {
        assert!(error.is_lasting());
        assert!(error.to_string().contains("host a was fenced and declared lost"), "{error}");
    }
    place.b.check().unwrap();
    assert!(place.fleet.readmit(&name("a")).unwrap());
    assert!(!place.fleet.readmit(&name("a")).unwrap());
    place.a.check().unwrap();
    let error = place.fleet.declare_lost(&name("c"), &loss()).unwrap_err();
    assert!(error.to_string().contains("has no host c"), "{error}");
}

#[test]
fn orders_of_a_lost_host_end() {
    let mut place = Place::new();
    let guests = [1, 2, 3].map(|number| guest(number, GuestPhase::Running));
    place.a.publish(guests.to_vec()).unwrap();
    place.b.publish(vec![guest(2, GuestPhase::Running), guest(4, GuestPhase::Running)]).unwrap();
    let claimed = place.session(3, "b", 3);
    place.ask(claimed, &[WitnessRequest::Claim]);
    for (number, source, destination) in
        [(1, "a", "b"), (2, "a", "b"), (3, "a", "b"), (4, "b", "a")]
    {
        let order = order(number, number, source, destination);
        place.fleet.order_migration(&order).unwrap();
    }
    place.lose();
    let migrations = place.fleet.migrations().unwrap();
    let phases: Vec<MigrationPhase> =
        migrations.into_iter().map(|view| view.migration.unwrap().phase).collect();
    let failed = || MigrationPhase::Failed { reason: "a was declared lost".into() };
    let done = MigrationPhase::Done { session: None, downtime_ms: None, carried: None };
    assert_eq!(phases, [failed(), done, MigrationPhase::Ordered, failed()]);
}

#[test]
fn object_that_cannot_be_read_frees_nothing() {
    let mut place = Place::new();
    place.a.publish(vec![guest(1, GuestPhase::Running)]).unwrap();
    let session = place.session(1, "b", 1);
    for key in [
        format!("/f/sessions/{}", SessionId([8; 16])),
        format!("/f/hosts/a/guests/{}", Uuid::from_bytes([8; 16])),
        "/f/orders/a".to_owned(),
    ] {
        place.etcd.etcdctl_ok(&["put", &key, "edited"]);
        let error = place.fleet.declare_lost(&name("a"), &loss()).unwrap_err();
        assert!(error.to_string().contains(&key), "{error}");
        assert_eq!(place.ask(session, &[]), Register::Open);
        place.etcd.etcdctl_ok(&["del", &key]);
    }
    assert_eq!(place.lose()["guest-1"], Fate::Free);
    assert_eq!(place.ask(session, &[]), Register::Freed);
}
