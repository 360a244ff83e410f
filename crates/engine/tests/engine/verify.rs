//! `--verify`: both paused memories are compared as they were placed.

use vmferry::Compared;
use vmferry::config::ProtocolVersions;
use vmferry::{ErrorClass, MigrateError};

use crate::support::{
    DestinationGuest, PAGES, Scenario, given, kept, nothing, owned, running_guest,
};

fn writer() -> DestinationGuest {
    DestinationGuest { load_writes: true, ..DestinationGuest::default() }
}

#[test]
fn verify_ignores_writes_of_the_state_load() {
    let scenario = Scenario::new();
    let (outcome, received) = scenario.run(running_guest(PAGES / 16), writer(), |_| {});
    let (_, stats) = given(outcome);
    assert_eq!((stats.digest_match, stats.verify_match), (Some(true), Some(true)));
    assert!(stats.verify_ms > 0.0, "{stats:?}");
    let guest = owned(received).vm.guest.unwrap();
    guest.wait_for_work();
    guest.pause();
}

/// The negative control: a difference from what was sent is found before the state is loaded.
#[test]
fn verify_detects_a_lost_page_before_the_load() {
    let (outcome, received) = Scenario::new().run_forgetful(running_guest(500));
    let (vm, error) = kept(outcome);
    let MigrateError::VerifyMismatch { compared, .. } = &error else { panic!("{error}") };
    assert_eq!(*compared, Compared::BeforeLoad);
    assert!(!error.to_string().contains("upgrade vmferry"), "{error}");
    assert_eq!(nothing(received).class(), ErrorClass::Corrupt);
    vm.guest.wait_for_work();
    vm.guest.pause();
}

/// A destination that speaks version 1 compares after the load, and the error explains what that
/// may mean.
#[test]
fn verify_in_version_1_compares_after_the_load_and_says_so() {
    let mut scenario = Scenario::new();
    scenario.destination.protocol = ProtocolVersions::new(1..=1).unwrap();
    let (outcome, received) = scenario.run(running_guest(PAGES / 16), writer(), |_| {});
    let (vm, error) = kept(outcome);
    assert!(error.to_string().contains("compares after that: upgrade vmferry there"), "{error}");
    assert_eq!(nothing(received).class(), ErrorClass::Corrupt);
    vm.guest.wait_for_work();
    vm.guest.pause();
}
