//! Guests that move.

use serde_json::Value;
use vmferry_libvirt_lab::{Domain, ImageFormat, LibvirtVersion};

use crate::hosts::{Hosts, linux};
use crate::processes::Ended;
use crate::sending::{create_quick, quick, send, start_sending};

fn has(ended: &Ended, event: &str) -> bool {
    ended.lines.iter().any(|line| line["event"] == event)
}

/// The statistics are those that the daemon has logged for the streams of memory.
fn must_have_statistics_of_links(hosts: &Hosts, stats: &Value) {
    let memory = |event: &Value| {
        let target = event["stream"]["target"].as_str().unwrap_or_default();
        event["event"] == "ended" && target.ends_with(".mig")
    };
    hosts.a.daemon().wait_for("ends a stream of memory", memory);
    let events = hosts.a.daemon().events();
    let sum = |name: &str| -> u64 {
        events.iter().filter(|event| memory(event)).filter_map(|event| event[name].as_u64()).sum()
    };
    let links = &stats["libvirt"]["links"]["memory"];
    assert_eq!((links["read_bytes"].as_u64(), sum("read") > 0), (Some(sum("read")), true));
    assert_eq!(
        (links["sent_bytes"].as_u64(), &stats["sent_bytes"]),
        (Some(sum("sent")), &links["sent_bytes"])
    );
    let ratio = sum("read") as f64 / sum("sent") as f64;
    assert!((stats["compression_ratio"].as_f64().unwrap() - ratio).abs() < 1e-6, "{stats}");
    assert_eq!((&stats["channels"], &stats["compression"]), (&links["streams"], &"auto".into()));
    assert_eq!(stats["reconnections"], 0, "{stats}");
    assert!(stats["transport"].as_str().unwrap().starts_with("tls 127.0.0.1:"), "{stats}");
}

fn guest_moves(version: LibvirtVersion) {
    let hosts = Hosts::start(version);
    let web = linux("web");
    hosts.a.libvirt.create(&web);
    hosts.a.libvirt.check_guest("web");
    let record = hosts.directory.path().join("run.jsonl");
    let save = ["--save-run", record.to_str().unwrap()];
    let ended = send(&hosts, "web", "host-b", &save).exited(0);
    assert_eq!(hosts.a.libvirt.domain_state("web"), None);
    hosts.b.libvirt.check_guest("web");
    for event in ["started", "progress", "round-started", "round-done"] {
        assert!(has(&ended, event), "no {event}: {:?}", ended.lines);
    }
    let started = &ended.lines[0];
    assert_eq!((&started["guest"], &started["to"]), (&"web".into(), &"host-b".into()));
    let stats = ended.last();
    let memory = web.mib << 20;
    assert!(stats["memory_bytes"].as_u64() >= Some(memory - (1 << 20)), "{stats}");
    for member in ["total_ms", "downtime_ms", "sent_bytes"] {
        assert!(stats[member].as_f64() > Some(0.0), "{member}: {stats}");
    }
    must_have_statistics_of_links(&hosts, stats);
    // The transient guest's completed job is known from an event.
    assert_eq!(stats["libvirt"]["complete"], true, "{stats}");
    assert_eq!(stats["libvirt"]["uuid"], web.uuid.to_string());
    let record = std::fs::read_to_string(record).unwrap();
    let last: Value = serde_json::from_str(record.lines().last().unwrap()).unwrap();
    assert_eq!((&last["event"], &last["stats"]), (&"done".into(), stats));
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn guest_moves_with_libvirt_9_0() {
    guest_moves(LibvirtVersion::V9_0);
}

#[test]
fn guest_moves_with_libvirt_11_3() {
    guest_moves(LibvirtVersion::V11_3);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn guest_is_named_by_its_uuid_and_its_definition_moves_with_it() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    let web = quick("web");
    hosts.a.libvirt.define_and_start(&web);
    let more = ["--persistent", "--undefine-source", "--dname", "moved", "--downtime-limit", "2s"];
    let ended = send(&hosts, &web.uuid.to_string(), "host-b", &more).exited(0);
    assert_eq!(ended.lines[0]["guest"], "web");
    assert_eq!(hosts.a.libvirt.domain_state("web"), None);
    let information = hosts.b.libvirt.virsh_ok(&["dominfo", "moved"]);
    let persistent = information.lines().find(|line| line.starts_with("Persistent:"));
    assert!(persistent.is_some_and(|line| line.ends_with("yes")), "{information}");
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn disk_of_one_host_is_copied() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    let disk = hosts.a.libvirt.create_disk("own.qcow2", 16, ImageFormat::Qcow2);
    hosts.b.libvirt.create_disk("own.qcow2", 16, ImageFormat::Qcow2);
    hosts.a.libvirt.create(&Domain { machine: "pc", ..linux("disks").with_disk(disk) });
    hosts.a.libvirt.check_guest("disks");
    let ended = send(&hosts, "disks", "host-b", &["--copy-storage-all"]).exited(0);
    assert!(ended.last()["libvirt"]["disk_sent_bytes"].as_u64() > Some(0), "{ended:?}");
    hosts.b.libvirt.check_guest("disks");
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn memory_has_several_streams_and_follows_the_guest_in_post_copy() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    hosts.a.libvirt.create(&linux("web"));
    hosts.a.libvirt.check_guest("web");
    let ended = send(&hosts, "web", "host-b", &["--multifd", "2"]).exited(0);
    assert_eq!(ended.lines[0]["channels"], 2);
    hosts.b.libvirt.check_guest("web");
    hosts.a.libvirt.create(&linux("late"));
    hosts.a.libvirt.check_guest("late");
    send(&hosts, "late", "host-b", &["--postcopy", "--max-bandwidth", "1G"]).exited(0);
    hosts.b.libvirt.check_guest("late");
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn lost_link_is_in_the_statistics() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    create_quick(&hosts, "web");
    let cap = ["--max-bandwidth", "20MiB/s", "--downtime-limit", "2s"];
    let mut sending = start_sending(&hosts, "web", "host-b", &cap);
    sending.event("round-started");
    hosts.b.cable.cut();
    let memory = |event: &Value| {
        event["stream"]["target"].as_str().is_some_and(|target| target.ends_with(".mig"))
    };
    let broken = |event: &Value| event["event"] == "link-broken" && memory(event);
    hosts.a.daemon().wait_for("loses the link of memory", broken);
    hosts.b.cable.mend();
    let ended = sending.finish().exited(0);
    let stats = ended.last();
    assert!(stats["reconnections"].as_u64() > Some(0), "{stats}");
    assert!(stats["link_down_ms"].as_f64() > Some(0.0), "{stats}");
    hosts.b.libvirt.check_guest("web");
}

/// Why `--pause-before-switchover` is refused: no downtime limit keeps QEMU from its switchover
/// once there is nothing to send.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn lowest_downtime_limit_does_not_hold_an_idle_guest() {
    for version in [LibvirtVersion::V9_0, LibvirtVersion::V11_3] {
        let hosts = Hosts::start(version);
        vmferry_kit::need_kvm();
        hosts.a.libvirt.create(&Domain::on_kvm("idle", "hot=8,rate=1"));
        hosts.a.libvirt.check_guest("idle");
        let lowest = ["--max-bandwidth", "1MiB/s", "--downtime-limit", "1ms"];
        send(&hosts, "idle", "host-b", &lowest).exited(0);
        hosts.b.libvirt.wait_for_state("idle", Some("running"));
    }
}
