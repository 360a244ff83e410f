//! `vmferry fleet`.

use vmferry_etcd_lab::{EtcdCluster, RestoredToken};

use crate::place::{Place, table};
use crate::support::{World, run_ok, text};

#[test]
fn init_makes_a_fleet_once() {
    let (world, etcd) = (World::without_certificates(), EtcdCluster::start(1));
    let (host, config) = (world.host("a"), world.path("fleet.toml"));
    std::fs::write(&config, table(&etcd, "/vmferry")).unwrap();
    let init = ["fleet", "init", "--config", text(&config)];
    let made = run_ok(&host, &init);
    assert_eq!((&made["made"], &made["prefix"]), (&true.into(), &"/vmferry".into()), "{made}");
    let again = run_ok(&host, &init);
    assert_eq!((&again["made"], &again["incarnation"]), (&false.into(), &made["incarnation"]));
    let renewed = run_ok(&host, &[&init[..], &["--restored"]].concat());
    assert_eq!(renewed["renewed"], true);
    assert_ne!(renewed["incarnation"], made["incarnation"]);
}

#[test]
fn agents_join_again_when_etcd_was_restored() {
    let mut place = Place::new();
    let snapshot = place.etcd.snapshot();
    place.etcd.restore(&snapshot, RestoredToken::Other);
    let left = place.a.daemon.event("fleet-left");
    let message = left["message"].as_str().unwrap();
    assert!(message.contains("replaced or restored from a backup"), "{left}");
    place.a.daemon.event("fleet-joined");
    let config = place.world.path("fleet-vmferry.toml");
    let restored = ["fleet", "init", "--restored", "--config", text(&config)];
    run_ok(&place.world.host("operator"), &restored);
    let left = place.a.daemon.event("fleet-left");
    assert!(left["message"].as_str().unwrap().contains("incarnation"), "{left}");
    place.a.daemon.event("fleet-joined");
}
