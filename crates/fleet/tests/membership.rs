//! Hosts that publish themselves and their guests in a real etcd.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;
use vmferry_etcd_lab::EtcdCluster;
use vmferry_fleet::{Fleet, Guest, GuestPhase, HostView, Membership};

use support::{fleet, host, name};

/// Bounds the waits for leases, which last 10 s: reaching it is a failure.
const PATIENCE: Duration = Duration::from_secs(120);

struct Place {
    etcd: EtcdCluster,
    fleet: Arc<Fleet>,
}

impl Place {
    fn new() -> Self {
        let etcd = EtcdCluster::start(1);
        let fleet = Arc::new(fleet(&etcd));
        Self { etcd, fleet }
    }

    fn begin(&self, instance: u8) -> Result<Membership, vmferry_fleet::FleetError> {
        Membership::begin(Arc::clone(&self.fleet), name("host-a"), host(instance))
    }

    fn view(&self) -> HostView {
        let mut hosts = self.fleet.hosts().unwrap();
        assert_eq!(hosts.len(), 1, "{hosts:?}");
        hosts.remove(0)
    }

    /// The line about the revision of a guest's last change.
    fn revision_of(&self, uuid: Uuid) -> String {
        let key = format!("/f/hosts/host-a/guests/{uuid}");
        let fields = self.etcd.etcdctl_ok(&["get", "--write-out", "fields", &key]);
        fields.lines().find(|line| line.contains("ModRevision")).unwrap().to_owned()
    }
}

fn guest(number: u8) -> Guest {
    support::guest(number, GuestPhase::Running)
}

#[test]
fn host_is_present_until_its_lease_ends_and_its_guests_stay() {
    let place = Place::new();
    let mut member = place.begin(1).unwrap();
    member.keep(Some(1 << 29)).unwrap();
    member.publish(vec![guest(1)]).unwrap();
    let view = place.view();
    assert_eq!(view.host.unwrap(), host(1));
    assert_eq!(view.presence.unwrap().memory_available_bytes, Some(1 << 29));
    // Its agent is killed.
    drop(member);
    let deadline = Instant::now() + PATIENCE;
    while place.view().presence.is_some() {
        assert!(Instant::now() < deadline, "it is present for ever");
        // A lease ends by itself.
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(*place.view().guests[0].as_ref().unwrap(), guest(1));
    // The next one goes on at once, and an orderly end is seen at once.
    let member = place.begin(1).unwrap();
    assert!(place.view().presence.is_some());
    member.end().unwrap();
    assert!(place.view().presence.is_none());
}

#[test]
fn lease_that_has_ended_is_replaced() {
    let place = Place::new();
    let mut member = place.begin(1).unwrap();
    let leases = place.etcd.etcdctl_ok(&["lease", "list"]);
    let lease = leases.lines().last().unwrap();
    place.etcd.etcdctl_ok(&["lease", "revoke", lease]);
    assert!(place.view().presence.is_none());
    member.keep(None).unwrap();
    assert!(place.view().presence.is_some());
}

#[test]
fn only_changes_are_written() {
    let place = Place::new();
    let mut member = place.begin(1).unwrap();
    member.publish(vec![guest(1), guest(2)]).unwrap();
    let before = place.revision_of(guest(1).uuid);
    let paused = Guest { phase: GuestPhase::Paused, ..guest(2) };
    member.publish(vec![guest(1), paused.clone()]).unwrap();
    assert_eq!(place.revision_of(guest(1).uuid), before);
    let guests: Vec<Guest> = place.view().guests.into_iter().map(Result::unwrap).collect();
    assert_eq!(guests, [guest(1), paused]);
    // The next agent does not know what the last one has published.
    drop(member);
    let mut member = place.begin(1).unwrap();
    member.publish(vec![guest(3)]).unwrap();
    let guests: Vec<Guest> = place.view().guests.into_iter().map(Result::unwrap).collect();
    assert_eq!(guests, [guest(3)]);
}

#[test]
fn name_of_another_host_is_refused() {
    let place = Place::new();
    let mut first = place.begin(1).unwrap();
    let error = place.begin(2).unwrap_err().to_string();
    assert!(error.contains("another host host-a, whose daemon runs: give this"), "{error}");
    // The same host's next agent need not wait for the lease of the last one.
    place.begin(1).unwrap();
    first.publish(vec![guest(1)]).unwrap();
    place.etcd.etcdctl_ok(&["del", "/f/hosts/host-a/presence"]);
    let error = place.begin(2).unwrap_err().to_string();
    assert!(error.contains("another host host-a, which has guests"), "{error}");
    first.publish(Vec::new()).unwrap();
    place.begin(2).unwrap();
    assert_eq!(place.view().host.unwrap().instance, host(2).instance);
    let error = first.keep(Some(1)).unwrap_err().to_string();
    assert!(error.contains("whose daemon runs"), "{error}");
}

#[test]
fn objects_that_cannot_be_read_are_named_and_left_alone() {
    let place = Place::new();
    let mut member = place.begin(1).unwrap();
    member.publish(vec![guest(1), guest(2)]).unwrap();
    let key = format!("/f/hosts/host-a/guests/{}", guest(1).uuid);
    place.etcd.etcdctl_ok(&["put", &key, "{\"version\":9}"]);
    let paused = [1, 2].map(|number| Guest { phase: GuestPhase::Paused, ..guest(number) });
    let error = member.publish(paused.to_vec()).unwrap_err().to_string();
    assert!(error.contains(&key) && error.contains("upgrade vmferry on this host"), "{error}");
    let view = place.view();
    let error = view.guests[0].as_ref().unwrap_err().to_string();
    assert!(error.contains("version 9"), "{error}");
    assert_eq!(*view.guests[1].as_ref().unwrap(), paused[1]);
    place.etcd.etcdctl_ok(&["put", "/f/hosts/host-a/self", "edited"]);
    let error = place.view().host.unwrap_err().to_string();
    assert!(error.contains("should have a host and has `edited`"), "{error}");
    let error = place.begin(1).unwrap_err().to_string();
    assert!(error.contains("was it edited"), "{error}");
}
