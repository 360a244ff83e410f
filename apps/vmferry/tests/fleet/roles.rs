//! Fleets in an etcd that checks roles.

use std::path::PathBuf;

use serde_json::Value;
use vmferry_etcd_lab::EtcdCluster;

use crate::members::{is_only_on, shows};
use crate::place::{Member, Place, host_table, table};
use crate::support::proxy::Message;
use crate::support::{World, run_ok, text};

/// A table with the certificate of another user.
fn of_user(etcd: &EtcdCluster, table: &str, user: &str) -> String {
    table.replace(text(&etcd.client("host")), text(&etcd.client(user)))
}

/// A file with the fleet's table for this user's commands.
fn file(world: &World, etcd: &EtcdCluster, user: &str) -> PathBuf {
    let file = world.path(&format!("as-{user}.toml"));
    std::fs::write(&file, of_user(etcd, &table(etcd, "/vmferry"), user)).unwrap();
    file
}

/// Starts a daemon with this user's certificate for etcd, and waits for nothing.
fn spawn(world: &World, etcd: &EtcdCluster, user: &str, prefix: &str, host: &str) -> Member {
    let tables = of_user(etcd, &host_table(etcd, prefix, host), user);
    Member::spawn_with(world, &format!("{user}-as-{host}"), "plain = true\n", &tables)
}

/// An etcd that checks roles, with users for the hosts `a` and `b` and for alice.
fn checked() -> (World, EtcdCluster) {
    let (world, etcd) = (World::new(), EtcdCluster::start(1));
    let (operator, root) = (world.host("operator"), file(&world, &etcd, "root"));
    let init = ["fleet", "init", "--config", text(&root)];
    let users = ["--host", "a", "--host", "b", "--operator", "alice"];
    let made = run_ok(&operator, &[&init[..], &users].concat());
    assert_eq!((&made["made"], &made["checks_roles"]), (&true.into(), &false.into()), "{made}");
    let counted = |value: &Value, what: &str| {
        value["users"].as_array().unwrap().iter().filter(|user| user[what] == true).count()
    };
    for what in ["user_made", "role_made", "granted"] {
        assert_eq!(counted(&made, what), 3, "{made}");
    }
    etcd.enable_authentication();
    let again = run_ok(&operator, &[&init[..], &users].concat());
    assert_eq!(again["users"].as_array().unwrap().len(), 3, "{again}");
    for what in ["user_made", "role_made", "role_corrected", "granted"] {
        assert_eq!(counted(&again, what), 0, "{again}");
    }
    assert_eq!((&again["made"], &again["checks_roles"]), (&false.into(), &true.into()), "{again}");
    (world, etcd)
}

#[test]
fn hosts_with_their_own_certificates_move_a_guest() {
    let (world, etcd) = checked();
    let [a, b] = ["a", "b"].map(|host| {
        let tables = of_user(&etcd, &host_table(&etcd, "/vmferry", host), host);
        Member::start_with(&world, host, "plain = true\n", &tables)
    });
    let table = file(&world, &etcd, "alice");
    let mut place = Place { a, b, world, etcd, table };
    let moved = place.send(Message::Commit);
    moved.proxy.release();
    moved.send.finish().exited(0);
    assert_eq!(place.registers().len(), 1, "the destination has claimed it");
    let alice = place.world.host("operator");
    shows(&alice, &place.table, "guests", |shown| is_only_on(shown, "b", "running"));
    let cordon = ["fleet", "cordon", "b", "--config", text(&place.table)];
    assert_eq!(run_ok(&alice, &cordon)["changed"], true);
    shows(&alice, &place.table, "hosts", |shown| shown["hosts"][1]["cordoned"] == true);
    // The agent ends its lease, and the next one joins again.
    place.a.daemon.signal(rustix::process::Signal::TERM);
    place.a.daemon.finish_by_ref().exited(0);
    shows(&alice, &place.table, "status", |status| status["silent"][0] == "a");
    place.a.restart();
    shows(&alice, &place.table, "status", |status| status["hosts_present"] == 2);
}

#[test]
fn wrong_certificate_prefix_and_name_of_a_host_are_refused() {
    let (world, etcd) = checked();
    for (user, prefix, host, why) in [
        ("eve", "/vmferry", "a", "etcd has no user `eve`, which is the common name of this"),
        ("a", "/other", "a", "do not let user `a` read /other/fleet; its roles: `/vmferry host a`"),
        ("a", "/vmferry", "b", "do not let user `a` write /vmferry/hosts/b/presence; its roles:"),
        ("alice", "/vmferry", "a", "do not let user `alice` write /vmferry/hosts/a/presence;"),
    ] {
        let mut member = spawn(&world, &etcd, user, prefix, host);
        let absent = member.daemon.event("fleet-absent");
        let message = absent["message"].as_str().unwrap();
        assert!(message.contains(why), "{message}");
        assert!(!member.witness.exists(), "it provides no witness");
    }
    let left = etcd.etcdctl_ok(&["get", "--prefix", "--keys-only", "/vmferry/hosts/"]);
    assert_eq!(left.trim(), "", "nothing was written");
    let mut right = spawn(&world, &etcd, "a", "/vmferry", "a");
    right.daemon.event("fleet-joined");
}

#[test]
fn commands_without_the_permission_say_who_lacks_it() {
    let (world, etcd) = checked();
    let operator = world.host("operator");
    let [a, alice, eve, root] = ["a", "alice", "eve", "root"].map(|user| file(&world, &etcd, user));
    let fails = |file: &PathBuf, arguments: &[&str], code: i32, why: &str| {
        let command = [&["fleet"], arguments, &["--config", text(file)]].concat();
        operator.run(&command).failed(code, why);
    };
    let whose = "a fleet is made by a user of etcd with the role root";
    fails(&a, &["init"], 4, whose);
    fails(&a, &["init", "--restored"], 4, "do not let user `a` write /vmferry/fleet");
    fails(&alice, &["init", "--host", "eve"], 4, whose);
    fails(&eve, &["init"], 4, "etcd has no user `eve`");
    fails(&eve, &["status"], 4, "does not let it read /vmferry/fleet");
    let _a = {
        let mut member = spawn(&world, &etcd, "a", "/vmferry", "a");
        member.daemon.event("fleet-joined");
        member
    };
    fails(&a, &["cordon", "a"], 4, "do not let user `a` write /vmferry/orders/a");
    run_ok(&operator, &["fleet", "cordon", "a", "--config", text(&alice)]);
    fails(&root, &["init", "--host", "a b"], 2, "`a b` can't be the name of a host");
    fails(&root, &["init", "--operator", ""], 2, "`` can't be the name of an operator");
    let users = etcd.etcdctl_ok(&["user", "list"]);
    assert_eq!(users.lines().collect::<Vec<_>>(), ["a", "alice", "b", "root"]);
}
