//! Orders in a real etcd.

mod support;

use vmferry_etcd_lab::EtcdCluster;
use vmferry_fleet::{HostName, HostOrders, Migration, MigrationPhase};

use support::{fleet, order};

#[test]
fn of_two_orders_for_one_guest_one_is_taken() {
    let etcd = EtcdCluster::start(1);
    let (one, other) = (fleet(&etcd), fleet(&etcd));
    for number in 1..20 {
        let (first, second) = (order(2 * number, 9, "a", "b"), order(2 * number + 1, 9, "a", "c"));
        let (first, second) = std::thread::scope(|scope| {
            let ordered = scope.spawn(|| one.order_migration(&first).map(|()| first.clone()));
            let second = other.order_migration(&second).map(|()| second.clone());
            (ordered.join().unwrap(), second)
        });
        let (taken, refused) = match (first, second) {
            (Ok(taken), Err(error)) | (Err(error), Ok(taken)) => (taken, error.to_string()),
            both => panic!("{both:?}"),
        };
        let expected = format!("guest-9 is being moved to {} already", taken.destination);
        assert!(refused.contains(&expected), "{refused}");
        let over = Migration { phase: MigrationPhase::Cancelled, ..taken.clone() };
        let now = one.change_migration(&taken, |_| Some(over.clone())).unwrap();
        assert_eq!(now, Some(over));
    }
}

#[test]
fn order_that_was_replaced_is_not_changed() {
    let etcd = EtcdCluster::start(1);
    let fleet = fleet(&etcd);
    let first = order(1, 9, "a", "b");
    fleet.order_migration(&first).unwrap();
    let over = Migration { phase: MigrationPhase::Cancelled, ..first.clone() };
    fleet.change_migration(&first, |_| Some(over.clone())).unwrap();
    let second = order(2, 9, "a", "b");
    fleet.order_migration(&second).unwrap();
    let failed = Migration { cancel: true, ..first.clone() };
    assert_eq!(fleet.change_migration(&first, |_| Some(failed.clone())).unwrap(), None);
    let [view] = &fleet.migrations().unwrap()[..] else { panic!("one migration") };
    assert_eq!(*view.migration.as_ref().unwrap(), second);
    // Two changes of one object: neither is lost.
    let cancelled =
        fleet.change_migration(&second, |found| Some(Migration { cancel: true, ..found.clone() }));
    assert!(cancelled.unwrap().unwrap().cancel);
    let admitted = MigrationPhase::Admitted { address: "b:1".into() };
    let now = fleet.change_migration(&second, |found| {
        Some(Migration { phase: admitted.clone(), ..found.clone() })
    });
    let now = now.unwrap().unwrap();
    assert!(now.cancel && now.phase == admitted, "{now:?}");
}

#[test]
fn host_that_is_not_there_gets_no_order() {
    let etcd = EtcdCluster::start(1);
    let fleet = fleet(&etcd);
    let host = HostName::new("a").unwrap();
    let error = fleet
        .order(&host, |_| HostOrders { cordoned: true, ..HostOrders::default() })
        .unwrap_err()
        .to_string();
    assert!(error.contains("the fleet at /f has no host a"), "{error}");
}
