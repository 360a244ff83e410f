//! Hosts and guests as the fleet shows them.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::place::{Member, Place, init};
use crate::support::proxy::Message;
use crate::support::trial::GUEST;
use crate::support::{Host, run_ok, text};

/// Bounds the waits: reaching it is a failure. A lease lasts 10 s.
const PATIENCE: Duration = Duration::from_secs(120);

/// What `vmferry fleet` shows, which is polled until it is as wanted.
pub fn shows(operator: &Host, table: &Path, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let shown = run_ok(operator, &["fleet", what, "--config", text(table)]);
        if wanted(&shown) {
            return shown;
        }
        assert!(Instant::now() < deadline, "never came: {shown}");
        // What agents publish notifies no reader of the command.
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Whether one guest is shown: on this host, in this phase.
pub fn is_only_on(shown: &Value, host: &str, phase: &str) -> bool {
    let guests = shown["guests"].as_array().unwrap();
    guests.len() == 1 && guests[0]["host"] == host && guests[0]["phase"] == phase
}

impl Place {
    fn shows(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        shows(&self.world.host("operator"), &self.table, what, wanted)
    }

    /// Waits until the guest is on this host, and only there.
    fn guest_is_on(&self, host: &str) -> Value {
        let shown = self.shows("guests", |shown| is_only_on(shown, host, "running"));
        shown["guests"][0].clone()
    }
}

#[test]
fn guest_is_shown_where_it_is() {
    let place = Place::new();
    let mut moved = place.send(Message::Commit);
    let sending = place.shows("guests", |shown| shown["guests"][0]["phase"] == "sending");
    assert_eq!(sending["guests"][0]["host"], "a", "{sending}");
    moved.proxy.release();
    moved.send.finish().exited(0);
    moved.guest.finish_by_ref().exited(0);
    let guest = place.guest_is_on("b");
    assert_eq!(guest["memory_bytes"], 64 << 20, "{guest}");
    assert_eq!((&guest["vmm"], &guest["on_two_hosts"]), (&"vmferry".into(), &false.into()));
    let status = place.shows("status", |_| true);
    assert_eq!((&status["hosts"], &status["hosts_present"]), (&2.into(), &2.into()), "{status}");
    assert_eq!((&status["guests"], &status["problems"]), (&1.into(), &Value::Array(Vec::new())));
    let hosts = place.shows("hosts", |_| true);
    let host = &hosts["hosts"][0];
    assert_eq!((&host["name"], &host["labels"]["rack"]), (&"a".into(), &"r1".into()), "{hosts}");
    assert!(host["memory_available_bytes"].as_u64() > Some(0), "{host}");
    assert!(host["facts"]["cpu_flags"].as_array().unwrap().len() > 5, "{host}");
}

#[test]
fn host_that_is_not_heard_keeps_its_guests() {
    let mut place = Place::new();
    let _guest = place.b.host.guest("web", &GUEST);
    place.guest_is_on("b");
    let order = ["fleet", "move", "web", "--config", text(&place.table)];
    place.world.host("operator").run(&order).failed(9, "web is not one of QEMU");
    place.b.daemon.kill();
    let status = place.shows("status", |status| status["silent"][0] == "b");
    assert_eq!((&status["hosts_present"], &status["guests"]), (&1.into(), &1.into()), "{status}");
    place.guest_is_on("b");
    place.b.restart();
    place.shows("status", |status| status["hosts_present"] == 2);
    // An orderly end is seen at once, and nothing else is.
    place.b.daemon.signal(Signal::TERM);
    place.b.daemon.finish_by_ref().exited(0);
    place.shows("status", |status| status["silent"][0] == "b");
    place.guest_is_on("b");
}

#[test]
fn guest_whose_vmm_is_stopped_stays_known() {
    let place = Place::new();
    let guest = place.a.host.guest("web", &GUEST);
    place.guest_is_on("a");
    let pid = Pid::from_raw(guest.child.id().cast_signed()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    place.shows("guests", |shown| shown["guests"][0]["phase"] == "silent");
    kill_process(pid, Signal::CONT).unwrap();
    place.guest_is_on("a");
    drop(guest);
    place.shows("guests", |shown| shown["guests"].as_array().unwrap().is_empty());
}

#[test]
fn object_of_a_newer_release_is_reported_and_the_agent_goes_on() {
    let mut place = Place::new();
    let _web = place.a.host.guest("web", &GUEST);
    let guest = place.guest_is_on("a");
    let key = format!("/vmferry/hosts/a/guests/{}", guest["uuid"].as_str().unwrap());
    place.etcd.etcdctl_ok(&["put", &key, "{\"version\":9}"]);
    run_ok(&place.a.host, &["pause", "web"]);
    let silent = place.a.daemon.event("fleet-silent");
    let message = silent["message"].as_str().unwrap();
    assert!(message.contains(&key) && message.contains("upgrade vmferry"), "{silent}");
    assert_eq!(place.shows("status", |_| true)["problems"].as_array().unwrap().len(), 1);
    let _db = place.a.host.guest("db", &GUEST);
    let db = |shown: &Value| {
        let guests = shown["guests"].as_array().unwrap();
        guests.iter().any(|guest| guest["name"] == "db")
    };
    place.shows("guests", db);
    place.etcd.etcdctl_ok(&["del", &key]);
    place.shows("guests", |shown| {
        let guests = shown["guests"].as_array().unwrap();
        guests.iter().any(|guest| guest["name"] == "web" && guest["phase"] == "paused")
    });
}

#[test]
fn guest_on_two_hosts_is_a_problem() {
    let place = Place::new();
    let uuid = ["--uuid", "6b1f7a4c-0000-4000-8000-000000000009"];
    let flags = [&GUEST[..], &uuid].concat();
    let guests = [&place.a, &place.b].map(|member| member.host.guest("web", &flags));
    let twice = |shown: &Value| {
        let guests = shown["guests"].as_array().unwrap();
        guests.len() == 2 && guests.iter().all(|guest| guest["on_two_hosts"] == true)
    };
    place.shows("guests", twice);
    let status = place.shows("status", |_| true);
    let problem = status["problems"][0].as_str().unwrap();
    assert!(problem.contains("is on a and on b"), "{status}");
    let order = ["fleet", "move", "web", "--config", text(&place.table)];
    place.world.host("operator").run(&order).failed(9, "web is more than one guest");
    drop(guests);
}

#[test]
fn host_with_another_hosts_name_does_not_join() {
    let place = Place::new();
    let mut other = Member::spawn(&place.world, "c", &place.etcd, "/vmferry", "a");
    let absent = other.daemon.event("fleet-absent");
    let message = absent["message"].as_str().unwrap();
    assert!(message.contains("the fleet has another host a, whose daemon runs"), "{absent}");
    assert!(!other.witness.exists(), "it provides no witness");
    // In another fleet of the same etcd the name is free.
    init(&place.world, &place.etcd, "/other");
    Member::start_as(&place.world, "d", &place.etcd, "/other", "a");
    let status = place.shows("status", |_| true);
    assert_eq!(status["hosts"], 2, "{status}");
}
