//! The witness with real etcd clusters.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use vmferry::witness::{Register, Witness, WitnessRequest};
use vmferry_etcd_lab::{EtcdCluster, RestoredToken};
use vmferry_fleet::{
    Etcd, EtcdConfig, EtcdTls, EtcdWitness, Fleet, FleetError, FleetPrefix, HostName,
};
use vmferry_handover::{GuestIdentity, SessionId, SessionWord};

fn config(cluster: &EtcdCluster, client: &Path) -> EtcdConfig {
    let tls = Some(EtcdTls::read(client).unwrap());
    EtcdConfig { endpoints: cluster.endpoints(), tls }
}

fn connect(cluster: &EtcdCluster) -> Arc<Etcd> {
    Arc::new(Etcd::connect(&config(cluster, &cluster.client("root"))).unwrap())
}

fn prefix() -> FleetPrefix {
    FleetPrefix::new("/test/fleet").unwrap()
}

/// A cluster with a fleet.
fn cluster(members: u16) -> EtcdCluster {
    let cluster = EtcdCluster::start(members);
    assert!(Fleet::make(&connect(&cluster), &prefix()).unwrap());
    cluster
}

fn joined(cluster: &EtcdCluster) -> EtcdWitness {
    EtcdWitness::new(Arc::new(Fleet::join(connect(cluster), prefix()).unwrap()), host())
}

fn host() -> HostName {
    HostName::new("host-b").unwrap()
}

fn guest() -> GuestIdentity {
    GuestIdentity { uuid: uuid::Uuid::from_bytes([9; 16]), name: "web".into() }
}

/// A session that has begun.
fn opened(witness: &EtcdWitness) -> SessionId {
    let session = fresh_session();
    for _ in 0..60 {
        // etcd may be electing a leader.
        if let Ok(register) = witness.open(session, &guest()) {
            assert_eq!(register, Register::Open);
            return session;
        }
    }
    panic!("etcd does not answer");
}

/// A session that no other call has returned.
fn fresh_session() -> SessionId {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    SessionId([NEXT.fetch_add(1, Ordering::Relaxed); 16])
}

fn key(session: SessionId) -> String {
    format!("/test/fleet/sessions/{session}")
}

/// The error's text, with its causes.
fn problem(result: Result<Register, vmferry_handover::VmError>) -> String {
    let error = result.expect_err("this witness can't answer");
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[test]
fn of_a_claim_and_a_take_back_at_the_same_time_one_succeeds() {
    let cluster = cluster(1);
    let (source, destination) = (joined(&cluster), joined(&cluster));
    assert_eq!(source.id(), destination.id());
    let (mut claimed, mut taken_back) = (0, 0);
    for _ in 0..60 {
        let session = opened(&destination);
        let (claim, take_back) = std::thread::scope(|scope| {
            let claim = scope.spawn(|| destination.ask(session, Some(WitnessRequest::Claim)));
            let take_back = source.ask(session, Some(WitnessRequest::TakeBack)).unwrap();
            (claim.join().unwrap().unwrap(), take_back)
        });
        assert_eq!(claim, take_back, "both see the same register");
        assert_eq!(source.ask(session, None).unwrap(), claim);
        match claim {
            Register::Claimed => claimed += 1,
            Register::TakenBack => taken_back += 1,
            other => panic!("{other:?}"),
        }
    }
    println!("{claimed} were claimed, {taken_back} were taken back");
}

#[test]
fn register_goes_its_way_and_keeps_unknown_members() {
    let cluster = cluster(1);
    let witness = joined(&cluster);
    let session = fresh_session();
    // Nobody can decide a session that has not begun, or whose key was removed.
    for request in [None, Some(WitnessRequest::Claim), Some(WitnessRequest::TakeBack)] {
        assert_eq!(witness.ask(session, request).unwrap(), Register::Unopened);
    }
    assert_eq!(witness.open(session, &guest()).unwrap(), Register::Open);
    assert_eq!(witness.open(session, &guest()).unwrap(), Register::Open);
    for (request, register) in [
        (WitnessRequest::Claim, Register::Claimed),
        (WitnessRequest::Claim, Register::Claimed),
        (WitnessRequest::TakeBack, Register::Claimed),
        (WitnessRequest::Report(SessionWord::Fetching), Register::Fetching),
        (WitnessRequest::Report(SessionWord::Owns), Register::Owns),
        (WitnessRequest::Report(SessionWord::Aborted), Register::Owns),
    ] {
        assert_eq!(witness.ask(session, Some(request)).unwrap(), register, "{request:?}");
        assert_eq!(witness.ask(session, None).unwrap(), register);
        let text = cluster.etcdctl_ok(&["get", "--print-value-only", &key(session)]);
        if request == WitnessRequest::TakeBack {
            // As a later release may write it.
            let later = text.trim().replace('}', r#","later":1}"#);
            cluster.etcdctl_ok(&["put", &key(session), &later]);
        }
    }
    let text = cluster.etcdctl_ok(&["get", "--print-value-only", &key(session)]);
    let guest = guest().uuid;
    let expected = format!(
        r#"{{"version":1,"register":"owns","guest":"{guest}","destination":"host-b","later":1}}"#
    );
    assert_eq!(text.trim(), expected);
    cluster.etcdctl_ok(&["del", &key(session)]);
    let request = Some(WitnessRequest::TakeBack);
    assert_eq!(witness.ask(session, request).unwrap(), Register::Unopened);
}

#[test]
fn witness_answers_while_most_members_run_and_never_afterward() {
    let mut cluster = cluster(3);
    let witness = joined(&cluster);
    let first = opened(&witness);
    assert_eq!(witness.ask(first, Some(WitnessRequest::Claim)).unwrap(), Register::Claimed);
    // One is killed, or silent.
    cluster.kill(0);
    let second = answered(&witness, opened(&witness), WitnessRequest::TakeBack);
    assert_eq!(second, Register::TakenBack);
    cluster.restart(0);
    cluster.wait_for(0);
    cluster.stop(1);
    assert_eq!(answered(&witness, opened(&witness), WitnessRequest::Free), Register::Freed);
    // The third is alone.
    let late = opened(&witness);
    cluster.kill(0);
    let text = problem(witness.ask(late, Some(WitnessRequest::Claim)));
    assert!(text.contains("no member of etcd answered within"), "{text}");
    cluster.resume(1);
    cluster.restart(0);
    // The claim may have taken effect, and then nobody else gets the guest.
    let register = answered(&witness, late, WitnessRequest::TakeBack);
    assert!(matches!(register, Register::Claimed | Register::TakenBack), "{register:?}");
    assert_eq!(answered(&witness, late, WitnessRequest::Claim), register);
    assert_eq!(witness.ask(first, None).unwrap(), Register::Claimed);
}

/// Asks until etcd, which may be electing a leader, answers.
fn answered(witness: &EtcdWitness, session: SessionId, request: WitnessRequest) -> Register {
    for _ in 0..60 {
        if let Ok(register) = witness.ask(session, Some(request)) {
            return register;
        }
    }
    panic!("etcd does not answer");
}

#[test]
fn request_whose_answer_is_lost_is_decided_once() {
    let cluster = cluster(1);
    let (source, destination) = (joined(&cluster), joined(&cluster));
    for _ in 0..3 {
        let session = opened(&destination);
        // It is silent from before the request until after its deadline.
        cluster.stop(0);
        problem(destination.ask(session, Some(WitnessRequest::Claim)));
        cluster.resume(0);
        let register = answered(&source, session, WitnessRequest::TakeBack);
        assert!(matches!(register, Register::Claimed | Register::TakenBack), "{register:?}");
        assert_eq!(answered(&destination, session, WitnessRequest::Claim), register);
    }
}

#[test]
fn restored_cluster_decides_nothing() {
    let mut cluster = cluster(1);
    let snapshot = cluster.snapshot();
    let before = joined(&cluster);
    let session = opened(&before);
    assert_eq!(before.ask(session, Some(WitnessRequest::Claim)).unwrap(), Register::Claimed);

    // With its own token the restored cluster has another number.
    cluster.restore(&snapshot, RestoredToken::Other);
    let text = problem(before.ask(session, Some(WitnessRequest::TakeBack)));
    assert!(text.contains("etcd's data was replaced or restored from a backup: cluster"), "{text}");
    let after = joined(&cluster);
    assert_ne!(after.id(), before.id());

    // With the same token it has the same number. Its revisions are lower at first.
    let claim = Some(WitnessRequest::Claim);
    assert_eq!(after.ask(opened(&after), claim).unwrap(), Register::Claimed);
    cluster.restore(&snapshot, RestoredToken::Same);
    for _ in 0..4 {
        let text = problem(after.ask(fresh_session(), claim));
        assert!(text.contains("restored from a backup: revision"), "{text}");
    }
    // A process that has not seen a higher one does not know: it has to be said.
    let again = joined(&cluster);
    assert_eq!(again.id(), after.id());
    Fleet::renew(&connect(&cluster), &prefix()).unwrap();
    let text = problem(again.ask(fresh_session(), claim));
    assert!(text.contains("was replaced or restored: it has incarnation"), "{text}");
    assert_ne!(joined(&cluster).id(), after.id());
    let joined = joined(&cluster);
    assert_eq!(joined.ask(opened(&joined), claim).unwrap(), Register::Claimed);
}

#[test]
fn object_that_cannot_be_read_decides_nothing() {
    let cluster = cluster(1);
    let witness = joined(&cluster);
    let session = fresh_session();
    for (object, expected) in [
        (r#"{"version":1,"register":"lent"}"#, "should have a session and has `{\"version\":1"),
        ("", "was it edited? Restore it"),
        (r#"{"version":2,"register":"open"}"#, "upgrade vmferry on this host"),
    ] {
        cluster.etcdctl_ok(&["put", &key(session), object]);
        let text = problem(witness.ask(session, Some(WitnessRequest::Claim)));
        assert!(text.contains(expected) && text.contains(&key(session)), "{text}");
        let now = cluster.etcdctl_ok(&["get", "--print-value-only", &key(session)]);
        assert_eq!(now.trim(), object, "it is left as it is");
    }
    // The fleet's own object, changed and removed.
    cluster.etcdctl_ok(&["put", "/test/fleet/fleet", "{}"]);
    let text = problem(witness.ask(session, None));
    assert!(text.contains("the key /test/fleet/fleet of etcd should have a fleet"), "{text}");
    cluster.etcdctl_ok(&["del", "/test/fleet/fleet"]);
    let text = problem(witness.ask(session, None));
    assert!(text.contains("etcd has no fleet at /test/fleet"), "{text}");
}

#[test]
fn fleets_of_one_etcd_are_separate() {
    let cluster = cluster(1);
    let etcd = connect(&cluster);
    let other = FleetPrefix::new("/test/other").unwrap();
    let error = Fleet::join(Arc::clone(&etcd), other.clone()).unwrap_err();
    assert!(error.to_string().contains("etcd has no fleet at /test/other"), "{error}");
    assert!(Fleet::make(&etcd, &other).unwrap());
    assert!(!Fleet::make(&etcd, &other).unwrap(), "it is there already");
    let theirs = EtcdWitness::new(Arc::new(Fleet::join(etcd, other).unwrap()), host());
    let ours = joined(&cluster);
    assert_ne!(theirs.id(), ours.id());
    let session = opened(&theirs);
    assert_eq!(theirs.ask(session, Some(WitnessRequest::Claim)).unwrap(), Register::Claimed);
    assert_eq!(ours.ask(session, None).unwrap(), Register::Unopened);
}

#[test]
fn wrong_certificates_and_addresses_are_refused() {
    let cluster = EtcdCluster::start(1);
    let client = cluster.client("host-a");
    let foreign = EtcdCluster::start(1);
    let refused = |config: &EtcdConfig| {
        let joined = Etcd::connect(config)
            .map_err(FleetError::from)
            .and_then(|etcd| Fleet::join(Arc::new(etcd), prefix()));
        joined.expect_err("this configuration is wrong").to_string()
    };
    let tls = Some(EtcdTls::read(&foreign.client("host-a")).unwrap());
    let text = refused(&EtcdConfig { endpoints: cluster.endpoints(), tls });
    assert!(text.contains("certificate"), "{text}");
    let text = refused(&EtcdConfig { endpoints: Vec::new(), tls: None });
    assert!(text.contains("no address of etcd"), "{text}");
    let plain = cluster.endpoints()[0].replace("https", "http");
    let text = refused(&EtcdConfig { endpoints: vec![plain], tls: None });
    assert!(text.contains("no member of etcd answered"), "{text}");
    let mut wrong = config(&cluster, &client);
    wrong.endpoints = vec!["not an address".to_owned()];
    assert!(refused(&wrong).contains("`not an address`"));
    let error = EtcdTls::read(Path::new("/nonexistent")).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/ca.pem can't be read"), "{error}");
}
