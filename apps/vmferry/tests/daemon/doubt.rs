//! libvirt's answer to a Finish that is lost. The source's libvirt would resume its guest, although
//! the guest may run at the destination.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use vmferry_libvirt_lab::LibvirtVersion;

use crate::support::{Hosts, linux, must_succeed};

/// A migration whose Finish has reached a libvirt that does not act on it.
pub struct Finishing {
    pub hosts: Hosts,
    pub libvirtd: Pid,
    pub moving: std::process::Child,
}

pub fn finishing(version: LibvirtVersion) -> Finishing {
    let hosts = Hosts::with(version, "reconnect_timeout = \"3s\"");
    hosts.a.libvirt.create(&linux("web"));
    hosts.a.libvirt.check_guest("web");
    let moving = hosts.a.migrate_command("web", "host-b", &[]).spawn().unwrap();
    hosts.b.daemon().wait_for("prepares", |event| event["event"] == "prepared");
    // QEMU receives the memory without it.
    let libvirtd = Pid::from_raw(hosts.b.libvirt.libvirtd_pid() as i32).unwrap();
    kill_process(libvirtd, Signal::STOP).unwrap();
    let finish = |event: &serde_json::Value| event["event"] == "finishing";
    hosts.b.daemon().wait_for("passes the Finish", finish);
    Finishing { hosts, libvirtd, moving }
}

/// Exactly one host has the guest, and it runs.
pub fn guest_runs_at_the_destination_only(hosts: &Hosts) {
    hosts.b.libvirt.wait_for_state("web", Some("running"));
    hosts.a.libvirt.wait_for_state("web", None);
    hosts.b.libvirt.check_guest("web");
}

pub fn source_waits_paused(hosts: &Hosts) {
    assert_eq!(hosts.a.libvirt.domain_state("web").as_deref(), Some("paused"));
}

#[test]
fn daemon_that_is_killed_at_the_source_does_not_resume_the_guest() {
    let Finishing { mut hosts, libvirtd, moving } = finishing(LibvirtVersion::V11_3);
    hosts.a.daemon = None;
    // Without the keeper, libvirt would resume its guest at once.
    std::thread::sleep(Duration::from_secs(2));
    source_waits_paused(&hosts);
    kill_process(libvirtd, Signal::CONT).unwrap();
    hosts.b.libvirt.wait_for_state("web", Some("running"));
    source_waits_paused(&hosts);
    hosts.a.start_daemon();
    must_succeed(&hosts, &moving.wait_with_output().unwrap());
    guest_runs_at_the_destination_only(&hosts);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn link_that_is_lost_for_good_does_not_resume_the_guest() {
    let Finishing { hosts, libvirtd, moving } = finishing(LibvirtVersion::V9_0);
    hosts.b.cable.cut();
    hosts.a.daemon().wait_for("is in doubt", |event| event["event"] == "in-doubt");
    source_waits_paused(&hosts);
    let shown = hosts.a.vmferry(&["--json", "status", "web"]);
    let status: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(status["migration"]["in_doubt"], true, "{status}");
    let all = hosts.a.vmferry(&["--json", "status"]);
    let all: serde_json::Value = serde_json::from_slice(&all.stdout).unwrap();
    assert_eq!(all["guests"].as_array().unwrap().len(), 1, "{all}");
    kill_process(libvirtd, Signal::CONT).unwrap();
    hosts.b.libvirt.wait_for_state("web", Some("running"));
    source_waits_paused(&hosts);
    hosts.b.cable.mend();
    must_succeed(&hosts, &moving.wait_with_output().unwrap());
    guest_runs_at_the_destination_only(&hosts);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn operator_who_has_fenced_the_destination_resumes_the_guest() {
    let Finishing { hosts, libvirtd: _, moving } = finishing(LibvirtVersion::V11_3);
    hosts.b.cable.cut();
    hosts.a.daemon().wait_for("is in doubt", |event| event["event"] == "in-doubt");
    // Its libvirt never read the Finish, so its QEMU waits.
    hosts.b.libvirt.kill_libvirtd();
    let resolved = hosts.a.vmferry(&["resolve", "web", "--source-resumes", "--yes"]);
    assert!(resolved.status.success(), "{resolved:?}");
    assert!(!moving.wait_with_output().unwrap().status.success());
    hosts.a.libvirt.wait_for_state("web", Some("running"));
    hosts.a.libvirt.check_guest("web");
}
