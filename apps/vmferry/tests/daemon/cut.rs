//! The cable is cut while guests move.

use std::time::Duration;

use vmferry_libvirt_lab::LibvirtVersion;

use crate::support::{Hosts, linux, must_succeed};

/// Cuts the cable for a while as soon as the source's daemon has said something.
fn cut_while_it_moves(version: LibvirtVersion, cut: Duration, at: &str, more: &[&str]) {
    let hosts = Hosts::start(version);
    hosts.a.libvirt.create(&linux("web"));
    hosts.a.libvirt.check_guest("web");
    let moving = hosts.a.migrate_command("web", "host-b", more).spawn().unwrap();
    hosts.a.daemon().wait_for(at, |event| {
        event["event"] == "opened" && event["stream"]["target"].as_str().unwrap().contains(at)
            || event["event"] == at
    });
    hosts.b.cable.freeze();
    std::thread::sleep(cut);
    hosts.b.cable.mend();
    must_succeed(&hosts, &moving.wait_with_output().unwrap());
    hosts.b.libvirt.check_guest("web");
    assert_eq!(hosts.a.libvirt.domain_state("web"), None);
}

#[test]
fn cut_of_10_s_while_memory_is_copied_fails_nothing() {
    cut_while_it_moves(LibvirtVersion::V11_3, Duration::from_secs(10), "web.mig", &[]);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn cut_of_10_s_while_libvirt_prepares_fails_nothing() {
    cut_while_it_moves(LibvirtVersion::V9_0, Duration::from_secs(10), "libvirt", &[]);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn daemon_that_is_killed_at_the_destination_leaves_the_guest_at_the_source() {
    let mut hosts = Hosts::start(LibvirtVersion::V11_3);
    hosts.a.libvirt.create(&linux("web"));
    hosts.a.libvirt.check_guest("web");
    // Slow enough that memory is still being copied.
    let slow = hosts.a.libvirt.virsh(&["migrate-setspeed", "web", "5"]);
    assert!(slow.status.success());
    let moving = hosts.a.migrate_command("web", "host-b", &[]).spawn().unwrap();
    hosts.a.daemon().wait_for("opens the memory's stream", |event| {
        event["event"] == "opened" && event["stream"]["target"] == "host-b/web.mig"
    });
    hosts.b.daemon = None;
    hosts.b.start_daemon();
    let moved = moving.wait_with_output().unwrap();
    assert!(!moved.status.success());
    hosts.a.libvirt.wait_for_state("web", Some("running"));
    hosts.a.libvirt.check_guest("web");
    hosts.b.libvirt.wait_for_state("web", None);
    // The next attempt works.
    hosts.a.libvirt.virsh_ok(&["migrate-setspeed", "web", "1000"]);
    must_succeed(&hosts, &hosts.a.migrate("web", "host-b", &[]));
    hosts.b.libvirt.check_guest("web");
}
