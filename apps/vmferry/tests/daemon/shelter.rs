//! What each host keeps while the other's word is awaited: the destination its connection to
//! libvirt, the source's daemon its keeper, and both their journals.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vmferry_libvirt_lab::LibvirtVersion;

use crate::doubt::{Finishing, finishing, guest_runs_at_the_destination_only, source_waits_paused};
use crate::sessions::finish_of;
use crate::support::{Daemon, Host, Hosts, LIMIT, child_of, linux, must_succeed};

fn is(name: &'static str) -> impl Fn(&Value) -> bool {
    move |event| event["event"] == name
}

fn pid_of(daemon: &Daemon) -> Pid {
    let listening = daemon.wait_for("listens", is("listening"));
    Pid::from_raw(listening["pid"].as_i64().unwrap() as i32).unwrap()
}

/// Waits until something is there.
fn poll<T>(what: &str, mut get: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(found) = get() {
            return found;
        }
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn answer_that_comes_after_the_link_was_given_up_is_not_lost() {
    let Finishing { hosts, libvirtd, moving } = finishing(LibvirtVersion::V11_3);
    hosts.b.cable.cut();
    // Both streams have failed then.
    hosts.a.daemon().wait_for("is in doubt", is("in-doubt"));
    hosts.b.daemon().wait_for("keeps libvirt's connection", is("awaiting"));
    source_waits_paused(&hosts);
    kill_process(libvirtd, Signal::CONT).unwrap();
    hosts.b.daemon().wait_for("hears libvirt's answer", is("finished"));
    let there = finish_of(&hosts.b, "web");
    assert_eq!(there["owner"], "destination", "{there}");
    assert_eq!(there["evidence"]["record"], "answered", "{there}");
    assert_eq!(there["led"], false, "the connection is closed: {there}");
    source_waits_paused(&hosts);
    hosts.b.cable.mend();
    must_succeed(&hosts, &moving.wait_with_output().unwrap());
    guest_runs_at_the_destination_only(&hosts);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn word_about_a_guest_that_moves_paused_comes_by_itself() {
    for version in [LibvirtVersion::V9_0, LibvirtVersion::V11_3] {
        let mut hosts = Hosts::with(version, "reconnect_timeout = \"3s\"");
        hosts.a.libvirt.create(&linux("web"));
        hosts.a.libvirt.check_guest("web");
        hosts.a.libvirt.virsh_ok(&["suspend", "web"]);
        let moving = hosts.a.migrate_command("web", "host-b", &[]).spawn().unwrap();
        hosts.b.daemon().wait_for("prepares", is("prepared"));
        let libvirtd = Pid::from_raw(hosts.b.libvirt.libvirtd_pid() as i32).unwrap();
        kill_process(libvirtd, Signal::STOP).unwrap();
        hosts.b.daemon().wait_for("passes the Finish", is("finishing"));
        // The daemon never hears the answer.
        let daemon = pid_of(hosts.b.daemon());
        kill_process(daemon, Signal::STOP).unwrap();
        kill_process(libvirtd, Signal::CONT).unwrap();
        let reason = || hosts.b.libvirt.virsh_ok(&["domstate", "--reason", "web"]);
        poll("Finish succeeds", || (reason().trim() == "paused (user)").then_some(()));
        hosts.b.daemon = None;
        let there = finish_of(&hosts.b, "web");
        assert_eq!(there["evidence"]["record"], "passed", "{there}");
        assert_eq!(there["owner"], "destination", "libvirt says so: {there}");
        hosts.b.start_daemon();
        must_succeed(&hosts, &moving.wait_with_output().unwrap());
        hosts.a.libvirt.wait_for_state("web", None);
        hosts.b.libvirt.virsh_ok(&["resume", "web"]);
        hosts.b.libvirt.check_guest("web");
    }
}

/// The keeper of a host's daemon, which is its helper's child.
fn keeper_of(daemon: Pid) -> Option<Pid> {
    child_of(child_of(daemon, "help-daemon")?, "keep-connections")
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn keeper_that_is_killed_is_started_again_and_has_the_connection() {
    let Finishing { mut hosts, libvirtd, moving } = finishing(LibvirtVersion::V11_3);
    let daemon = pid_of(hosts.a.daemon());
    kill_process(keeper_of(daemon).expect("a keeper runs"), Signal::KILL).unwrap();
    let again = hosts.a.daemon().wait_for("starts a keeper", is("keeper-restarted"));
    assert_eq!(again["connections"], 1, "{again}");
    hosts.a.daemon = None;
    // Without the second keeper, libvirt would resume its guest at once.
    std::thread::sleep(Duration::from_secs(2));
    source_waits_paused(&hosts);
    kill_process(libvirtd, Signal::CONT).unwrap();
    hosts.b.libvirt.wait_for_state("web", Some("running"));
    hosts.a.start_daemon();
    must_succeed(&hosts, &moving.wait_with_output().unwrap());
    guest_runs_at_the_destination_only(&hosts);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn word_that_can_not_be_written_is_tried_again_until_it_can() {
    let Finishing { hosts, libvirtd, moving } = finishing(LibvirtVersion::V9_0);
    let journals = journals_of(&hosts.b);
    let away = journals.with_extension("away");
    std::fs::rename(&journals, &away).unwrap();
    kill_process(libvirtd, Signal::CONT).unwrap();
    let failed = hosts.b.daemon().wait_for("reports the journal", is("unjournaled"));
    assert_eq!(failed["guest"], "web", "{failed}");
    hosts.b.libvirt.wait_for_state("web", Some("running"));
    source_waits_paused(&hosts);
    std::fs::rename(&away, &journals).unwrap();
    // Without another daemon and without an operator.
    must_succeed(&hosts, &moving.wait_with_output().unwrap());
    guest_runs_at_the_destination_only(&hosts);
    let there = finish_of(&hosts.b, "web");
    assert_eq!(there["evidence"]["word"], "runs", "{there}");
}

/// The directory of a host's journals, by a path outside of the host.
fn journals_of(host: &Host) -> PathBuf {
    let shown = host.vmferry(&["--json", "status", "--sessions"]);
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    host.libvirt.path(shown["directory"].as_str().unwrap())
}
