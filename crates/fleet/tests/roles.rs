//! Users and roles in a real etcd whose authentication is enabled.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vmferry::chain;
use vmferry::witness::{Register, Witness, WitnessRequest};
use vmferry_etcd_lab::EtcdCluster;
use vmferry_fleet::{
    EtcdWitness, Fate, Fleet, FleetError, FleetPrefix, FleetUser, GrantedRole, Guest, GuestPhase,
    Host, HostOrders, Loss, Membership, Migration, MigrationPhase, OperatorName, RoleChange,
};
use vmferry_handover::SessionId;

use support::{connect, host, name, prefix};

fn guest() -> Guest {
    support::guest(9, GuestPhase::Running)
}

fn order(number: u8) -> Migration {
    support::order(number, 9, "host-a", "host-b")
}

fn host_user(text: &str) -> FleetUser {
    FleetUser::Host(name(text))
}

fn operator(text: &str) -> FleetUser {
    FleetUser::Operator(OperatorName::new(text).unwrap())
}

/// The fleet `/f`, as this user sees it.
fn join(etcd: &EtcdCluster, user: &str) -> Result<Arc<Fleet>, FleetError> {
    Fleet::join(connect(etcd, user), prefix()).map(Arc::new)
}

/// An etcd that checks roles, with a fleet of `host-a`, `host-b` and the operator `alice`.
fn place() -> EtcdCluster {
    let etcd = EtcdCluster::start(1);
    Fleet::make(&connect(&etcd, "root"), &prefix()).unwrap();
    let fleet = join(&etcd, "root").unwrap();
    for user in [host_user("host-a"), host_user("host-b"), operator("alice")] {
        fleet.grant(&user).unwrap();
    }
    assert!(!fleet.checks_roles().unwrap());
    etcd.enable_authentication();
    assert!(fleet.checks_roles().unwrap());
    etcd
}

/// Checks that etcd's roles do not let `user` do this.
#[track_caller]
fn forbidden<T: std::fmt::Debug>(result: Result<T, FleetError>, user: &str, what: &str) {
    let text = chain(&result.expect_err("the role forbids it"));
    assert!(text.contains(&format!("etcd's roles do not let user `{user}` {what}; ")), "{text}");
}

fn keys(etcd: &EtcdCluster) -> Vec<String> {
    let text = etcd.etcdctl_ok(&["get", "--prefix", "--keys-only", "/"]);
    text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

#[test]
fn host_with_its_role_does_all_that_an_agent_does() {
    let etcd = place();
    let fleet = join(&etcd, "host-a").unwrap();
    let mut member = Membership::begin(Arc::clone(&fleet), name("host-a"), host(1)).unwrap();
    member.keep(Some(1 << 20)).unwrap();
    member.describe(Host { cpus: 3, ..host(1) }).unwrap();
    member.publish(vec![guest()]).unwrap();
    // The next agent finds what the last one has published, and a guest is removed.
    let mut member = Membership::begin(Arc::clone(&fleet), name("host-a"), host(1)).unwrap();
    member.publish(Vec::new()).unwrap();
    fleet.check_incarnation().unwrap();
    let operator = join(&etcd, "alice").unwrap();
    operator.order_migration(&order(1)).unwrap();
    operator
        .order(&name("host-a"), |_| HostOrders { cordoned: true, ..HostOrders::default() })
        .unwrap();
    let hosts = fleet.hosts().unwrap();
    assert!(hosts[0].presence.is_some() && hosts[0].orders.cordoned, "{hosts:?}");
    let sending = MigrationPhase::Admitted { address: "b:1".into() };
    let changed = fleet.change_migration(&order(1), |found| {
        Some(Migration { phase: sending.clone(), ..found.clone() })
    });
    assert_eq!(changed.unwrap().unwrap().phase, sending);
    assert_eq!(fleet.migrations().unwrap().len(), 1);
    let witness = EtcdWitness::new(fleet, name("host-a"));
    let (session, identity) = (SessionId([1; 16]), order(1).guest);
    assert_eq!(witness.open(session, &identity).unwrap(), Register::Open);
    let claimed = witness.ask(session, Some(WitnessRequest::Claim)).unwrap();
    assert_eq!(claimed, Register::Claimed);
    let other = EtcdWitness::new(join(&etcd, "host-b").unwrap(), name("host-b"));
    assert_eq!(other.id(), witness.id());
    assert_eq!(other.ask(session, Some(WitnessRequest::TakeBack)).unwrap(), claimed);
    // Its lease ends.
    member.end().unwrap();
    assert!(operator.hosts().unwrap()[0].presence.is_none());
}

#[test]
fn host_that_has_joined_goes_on_when_authentication_is_enabled() {
    let etcd = EtcdCluster::start(1);
    Fleet::make(&connect(&etcd, "root"), &prefix()).unwrap();
    join(&etcd, "root").unwrap().grant(&host_user("host-a")).unwrap();
    let fleet = join(&etcd, "host-a").unwrap();
    let mut member = Membership::begin(fleet, name("host-a"), host(1)).unwrap();
    let mut other =
        Membership::begin(join(&etcd, "host-b").unwrap(), name("host-b"), host(2)).unwrap();
    etcd.enable_authentication();
    member.keep(Some(1 << 20)).unwrap();
    member.publish(vec![guest()]).unwrap();
    let text = chain(&other.keep(Some(1 << 20)).unwrap_err());
    assert!(text.contains("etcd has no user `host-b`"), "{text}");
}

#[test]
fn host_writes_neither_keys_of_other_hosts_nor_orders_nor_the_fleet() {
    let etcd = place();
    let fleet = join(&etcd, "host-a").unwrap();
    Membership::begin(join(&etcd, "host-b").unwrap(), name("host-b"), host(2)).unwrap();
    let before = keys(&etcd);
    // Another host's certificate, and the host's name.
    let begun = Membership::begin(Arc::clone(&fleet), name("host-b"), host(2));
    forbidden(begun, "host-a", "write /f/hosts/host-b/presence");
    let begun = Membership::begin(Arc::clone(&fleet), name("host-c"), host(3));
    forbidden(begun, "host-a", "write /f/hosts/host-c/presence");
    let ordered =
        fleet.order(&name("host-b"), |_| HostOrders { cordoned: true, ..HostOrders::default() });
    forbidden(ordered, "host-a", "write /f/orders/host-b");
    let renewed = Fleet::renew(&connect(&etcd, "host-a"), &prefix());
    forbidden(renewed, "host-a", "write /f/fleet");
    let granted = fleet.grant(&host_user("host-a"));
    forbidden(granted, "host-a", "manage users and roles");
    let foreign = Fleet::join(connect(&etcd, "host-a"), FleetPrefix::new("/g").unwrap());
    forbidden(foreign, "host-a", "read /g/fleet");
    let made = Fleet::make(&connect(&etcd, "host-a"), &FleetPrefix::new("/g").unwrap());
    forbidden(made, "host-a", "write /g/fleet");
    assert_eq!(keys(&etcd), before, "nothing was written");
}

#[test]
fn operator_declares_hosts_lost_and_changes_no_fleet() {
    let etcd = place();
    let host = join(&etcd, "host-a").unwrap();
    let mut member =
        Membership::begin(Arc::clone(&host), name("host-a"), support::host(1)).unwrap();
    member.publish(vec![guest()]).unwrap();
    let session = SessionId([1; 16]);
    EtcdWitness::new(host, name("host-b")).open(session, &order(1).guest).unwrap();
    let fleet = join(&etcd, "alice").unwrap();
    let renewed = Fleet::renew(&connect(&etcd, "alice"), &prefix());
    forbidden(renewed, "alice", "write /f/fleet");
    let loss = Loss { at: 7, fence: "fence".into() };
    let declared = join(&etcd, "host-b").unwrap().declare_lost(&name("host-a"), &loss);
    forbidden(declared, "host-b", "write /f/orders/host-a");
    let lost = fleet.declare_lost(&name("host-a"), &loss).unwrap();
    assert_eq!(lost[0].fate, Fate::Free);
    let witness = EtcdWitness::new(fleet, name("host-a"));
    assert_eq!(witness.ask(session, None).unwrap(), Register::Freed);
    let readmitted = join(&etcd, "host-b").unwrap().readmit(&name("host-a"));
    forbidden(readmitted, "host-b", "write /f/orders/host-a");
}

#[test]
fn certificate_of_no_user_is_named() {
    let etcd = place();
    let text = chain(&join(&etcd, "eve").unwrap_err());
    assert!(text.contains("etcd has no user `eve`, which is the common name"), "{text}");
    assert!(text.contains("does not let it read /f/fleet: use the certificate"), "{text}");
    // A user without a role is told apart.
    etcd.etcdctl_ok(&["user", "add", "eve", "--no-password"]);
    let text = chain(&join(&etcd, "eve").unwrap_err());
    assert!(text.contains("do not let user `eve` read /f/fleet; its roles: none."), "{text}");
    let fleet = join(&etcd, "root").unwrap();
    let granted = fleet.grant(&host_user("eve")).unwrap();
    assert!(granted.granted && !granted.user_made, "{granted:?}");
    join(&etcd, "eve").unwrap();
}

#[test]
fn what_is_there_is_left_and_other_permissions_are_corrected() {
    let etcd = place();
    let fleet = join(&etcd, "root").unwrap();
    let unchanged = GrantedRole {
        role: "/f host host-a".to_owned(),
        change: RoleChange::Unchanged,
        user_made: false,
        granted: false,
        other_roles: Vec::new(),
    };
    assert_eq!(fleet.grant(&host_user("host-a")).unwrap(), unchanged);
    let permissions = || etcd.etcdctl_ok(&["role", "get", &unchanged.role]);
    let right = permissions();
    for range in ["[/f/, /f0)", "[/f/hosts/host-a/, /f/hosts/host-a0)", "[/f/sessions/, /f/s"] {
        assert!(right.contains(range), "{right}");
    }
    // Too much, too little, and another kind.
    let change = |what: &[&str]| drop(etcd.etcdctl_ok(&[&["role"], what].concat()));
    let role = unchanged.role.as_str();
    change(&["grant-permission", role, "readwrite", "/f/", "--prefix"]);
    change(&["grant-permission", role, "write", "/f/fleet"]);
    change(&["revoke-permission", role, "/f/sessions/", "--prefix"]);
    let fleet_as_host = connect(&etcd, "host-a");
    Fleet::renew(&fleet_as_host, &prefix()).expect("the edited role permits it");
    let corrected = fleet.grant(&host_user("host-a")).unwrap();
    assert_eq!(corrected, GrantedRole { change: RoleChange::Corrected, ..unchanged.clone() });
    assert_eq!(permissions(), right);
    forbidden(Fleet::renew(&fleet_as_host, &prefix()), "host-a", "write /f/fleet");
    // A range that etcd has twice: it looks at the first permission that begins with a key.
    change(&["revoke-permission", role, "/f/", "--prefix"]);
    change(&["grant-permission", role, "read", "/f/"]);
    for kind in ["read", "readwrite"] {
        change(&["grant-permission", role, kind, "/f/", "--prefix"]);
    }
    fleet.grant(&host_user("host-a")).unwrap();
    assert_eq!(permissions(), right);
    // Further roles are shown and left.
    etcd.etcdctl_ok(&["user", "grant-role", "host-a", "root"]);
    let granted = fleet.grant(&host_user("host-a")).unwrap();
    assert_eq!(granted, GrantedRole { other_roles: vec!["root".to_owned()], ..unchanged });
}

#[test]
fn requests_go_on_while_users_and_roles_are_changed() {
    let etcd = place();
    let (administrator, host) = (join(&etcd, "root").unwrap(), join(&etcd, "host-a").unwrap());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let changes = scope.spawn(|| {
            for number in 0.. {
                administrator.grant(&host_user(&format!("host-{number}"))).unwrap();
                if done.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        // etcd checks the permission to end a lease with keys after it has ordered the request
        // among the changes.
        let again = || {
            let begun = Membership::begin(Arc::clone(&host), name("host-a"), support::host(1));
            begun.and_then(Membership::end)
        };
        let all: Result<Vec<()>, FleetError> = (0..50).map(|_| again()).collect();
        done.store(true, Ordering::Relaxed);
        changes.join().unwrap();
        all.unwrap();
    });
}
