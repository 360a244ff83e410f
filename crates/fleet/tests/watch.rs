//! Copies that follow a real etcd, whose members fail.

mod support;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use vmferry_etcd_lab::EtcdCluster;
use vmferry_fleet::{
    Etcd, EtcdConfig, EtcdError, EtcdTls, Fleet, FleetError, Migration, MigrationPhase, Watch,
};

use support::{order, prefix};

/// Bounds the waits: reaching it is a failure. A silent member is noticed after 8 s.
const PATIENCE: Duration = Duration::from_secs(120);

/// A client that asks these members.
fn client(etcd: &EtcdCluster, members: &[usize]) -> Arc<Etcd> {
    let tls = Some(EtcdTls::read(&etcd.client("root")).unwrap());
    let all = etcd.endpoints();
    let endpoints = members.iter().map(|number| all[*number].clone()).collect();
    Arc::new(Etcd::connect(&EtcdConfig { endpoints, tls }).unwrap())
}

fn join(client: Arc<Etcd>) -> Fleet {
    Fleet::join(client, prefix()).unwrap()
}

/// A copy of a fleet's migrations.
struct Copy {
    fleet: Fleet,
    changes: Receiver<()>,
    _watch: Watch,
}

impl Copy {
    fn of(fleet: Fleet) -> Self {
        let (changed, changes) = channel();
        let watch = fleet.follow_migrations(move || changed.send(()).unwrap_or_default());
        Self { fleet, changes, _watch: watch }
    }

    /// Waits until it has this number of migrations.
    fn has(&self, wanted: usize) {
        let deadline = Instant::now() + PATIENCE;
        let count = || self.fleet.followed_migrations().map(|all| all.len());
        while count() != Some(wanted) {
            let left = deadline.saturating_duration_since(Instant::now());
            let heard = self.changes.recv_timeout(left);
            assert!(heard.is_ok(), "{wanted} migrations never come: {:?}", count());
        }
    }
}

fn migration(number: u8) -> Migration {
    order(number, number, "a", "b")
}

/// Orders a migration, once etcd has elected a leader.
fn give(writer: &Fleet, number: u8) {
    let ordered = (0..60).any(|_| match writer.order_migration(&migration(number)) {
        Ok(()) => true,
        Err(FleetError::Etcd(EtcdError::NoAnswer { .. })) => false,
        Err(error) => panic!("{error}"),
    });
    assert!(ordered, "etcd does not answer");
}

#[test]
fn copy_follows_etcd_whichever_member_fails() {
    let mut etcd = EtcdCluster::start(3);
    let writer = client(&etcd, &[0, 1, 2]);
    Fleet::make(&writer, &prefix()).unwrap();
    let writer = join(writer);
    let copy = Copy::of(join(client(&etcd, &[0, 1, 2])));
    copy.has(0);
    give(&writer, 1);
    copy.has(1);
    // It follows the first member.
    etcd.kill(0);
    give(&writer, 2);
    copy.has(2);
    etcd.restart(0);
    etcd.wait_for(0);
    // Now the second one, whose connections stay open.
    etcd.stop(1);
    give(&writer, 3);
    copy.has(3);
    etcd.resume(1);
    etcd.wait_for(1);
    // An object that was removed.
    let key = format!("{}/migrations/{}", prefix(), migration(2).guest.uuid);
    etcd.etcdctl_ok(&["del", &key]);
    copy.has(2);
    // A member that is left alone knows no changes.
    etcd.kill(0);
    etcd.kill(1);
    for member in [0, 1] {
        etcd.restart(member);
        etcd.wait_for(member);
    }
    give(&writer, 4);
    copy.has(3);
}

#[test]
fn what_a_copy_knows_decides_nothing() {
    let etcd = EtcdCluster::start(1);
    let writer = client(&etcd, &[0]);
    Fleet::make(&writer, &prefix()).unwrap();
    let (writer, copy) = (join(writer), Copy::of(join(client(&etcd, &[0]))));
    let order = migration(1);
    writer.order_migration(&order).unwrap();
    copy.has(1);
    let cancel = |found: &Migration| Some(Migration { cancel: true, ..found.clone() });
    let now = copy.fleet.change_migration(&order, cancel).unwrap();
    assert!(now.unwrap().cancel);
    // What it has written is known at once.
    let known = copy.fleet.followed_migrations().unwrap().remove(0).migration.unwrap();
    assert!(known.cancel);
    // What others have written since may not be known yet.
    let admitted = MigrationPhase::Admitted { address: "b:1".into() };
    let admit = |found: &Migration| Some(Migration { phase: admitted.clone(), ..found.clone() });
    assert!(writer.change_migration(&order, admit).unwrap().unwrap().cancel);
    let now = copy.fleet.change_migration(&order, |_| None).unwrap();
    assert_eq!(now.unwrap().phase, admitted);
}
