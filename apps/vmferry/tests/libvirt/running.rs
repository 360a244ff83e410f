//! Migrations that are watched, changed and cancelled.

use rustix::process::Signal;
use vmferry_libvirt_lab::LibvirtVersion;

use crate::hosts::Hosts;
use crate::sending::{create_quick, run, send, start_sending};

/// So slow that the first round does not end.
const SLOW: [&str; 2] = ["--max-bandwidth", "1MiB/s"];

#[test]
fn migration_is_shown_changed_and_cancelled() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    create_quick(&hosts, "web");
    let mut sending = start_sending(&hosts, "web", "host-b", &SLOW);
    sending.event("round-started");
    sending.event("progress");
    let status = run(&hosts, &hosts.a, &["status", "web"]).exited(0);
    let status = status.last();
    assert_eq!((&status["guest"], &status["phase"]), (&"libvirt".into(), &"migrating".into()));
    assert_eq!(status["migration"]["phase"], "pre-copy", "{status}");
    assert_eq!(status["migration"]["round"], 1, "{status}");
    let all = run(&hosts, &hosts.a, &["status"]).exited(0);
    assert_eq!(all.last()["guests"][0]["name"], "web");
    let set = ["set", "web", "--max-bandwidth", "2MiB/s", "--downtime-limit", "20ms"];
    run(&hosts, &hosts.a, &set).exited(0);
    let speed = hosts.a.libvirt.virsh_ok(&["migrate-getspeed", "web"]);
    assert_eq!(speed.trim(), "2");
    let limit = hosts.a.libvirt.virsh_ok(&["migrate-getmaxdowntime", "web"]);
    assert_eq!(limit.trim(), "20");
    let throttle = run(&hosts, &hosts.a, &["set", "web", "--throttle", "20"]);
    throttle.failed(9, "--auto-converge");
    let release = run(&hosts, &hosts.a, &["switch-over", "web"]);
    release.failed(9, "libvirt has no hold");
    run(&hosts, &hosts.a, &["cancel", "web"]).exited(0);
    let ended = sending.finish();
    ended.failed(11, "it was cancelled. The guest runs on this host");
    hosts.b.libvirt.wait_for_state("web", None);
    hosts.a.libvirt.check_guest("web");
    run(&hosts, &hosts.a, &["status", "web"]).exited(8);
}

#[test]
fn signal_cancels_at_any_time() {
    let hosts = Hosts::start(LibvirtVersion::V9_0);
    create_quick(&hosts, "web");
    for event in ["started", "progress", "round-started"] {
        let mut sending = start_sending(&hosts, "web", "host-b", &SLOW);
        sending.event(event);
        sending.signal(Signal::TERM);
        sending.finish().failed(11, "The guest runs on this host");
        hosts.b.libvirt.wait_for_state("web", None);
    }
    hosts.a.libvirt.check_guest("web");
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn timeout_refuses_or_switches_over() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    create_quick(&hosts, "web");
    let refuse = [&SLOW[..], &["--timeout", "1s"]].concat();
    send(&hosts, "web", "host-b", &refuse).failed(10, "its rounds have taken 1s");
    hosts.a.libvirt.check_guest("web");
    let cap = ["--max-bandwidth", "20MiB/s", "--downtime-limit", "1ms"];
    let force = [&cap[..], &["--timeout", "1s", "--when-stuck", "switch-over"]].concat();
    send(&hosts, "web", "host-b", &force).exited(0);
    hosts.b.libvirt.check_guest("web");
}
