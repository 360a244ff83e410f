//! A sample of the ways in which guests move; the others are in [`versions`](crate::versions).

use vmferry_libvirt_lab::{Domain, ImageFormat, LibvirtVersion};

use crate::phases::wait_until;
use crate::support::{Hosts, linux, must_succeed};

#[test]
fn linux_guest_moves_there_and_back_with_libvirt_9_0() {
    let hosts = Hosts::start(LibvirtVersion::V9_0);
    hosts.a.libvirt.create(&linux("web"));
    hosts.a.libvirt.check_guest("web");
    must_succeed(&hosts, &hosts.a.migrate("web", "host-b", &[]));
    assert_eq!(hosts.a.libvirt.domain_state("web"), None);
    hosts.b.libvirt.check_guest("web");
    must_succeed(&hosts, &hosts.b.migrate("web", "host-a", &[]));
    hosts.a.libvirt.check_guest("web");
    let finished = |event: &serde_json::Value| event["event"] == "finished";
    let event = hosts.b.daemon().wait_for("finishes", finished);
    assert_eq!((&event["guest"], &event["error"]), (&"web".into(), &serde_json::Value::Null));
    // QEMU has removed its socket, and no connection uses the directory any more.
    for (host, name) in [(&hosts.a, "host-a"), (&hosts.b, "host-b")] {
        let directory = host.libvirt.path("/run/vmferry-peers").join(name);
        wait_until("removes the directory of arrivals", || !directory.exists());
    }
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn memory_is_recognized_and_packed() {
    let hosts = Hosts::with(LibvirtVersion::V11_3, "max_bandwidth = \"20MiB/s\"");
    hosts.a.libvirt.create(&linux("web"));
    hosts.a.libvirt.check_guest("web");
    must_succeed(&hosts, &hosts.a.migrate("web", "host-b", &[]));
    hosts.b.libvirt.check_guest("web");
    let memory = hosts.a.daemon().wait_for("ends the memory's stream", |event| {
        event["event"] == "ended" && event["stream"]["target"] == "host-b/web.mig"
    });
    let bytes = |name: &str| memory[name].as_u64().unwrap();
    // Half of this guest's memory is random.
    assert!(bytes("sent") * 4 < bytes("read") * 3, "{memory}");
}

#[test]
fn disk_of_one_host_is_copied() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    let disk = hosts.a.libvirt.create_disk("own.qcow2", 16, ImageFormat::Qcow2);
    hosts.b.libvirt.create_disk("own.qcow2", 16, ImageFormat::Qcow2);
    hosts.a.libvirt.create(&Domain { machine: "pc", ..linux("disks").with_disk(disk) });
    hosts.a.libvirt.check_guest("disks");
    let uri = "unix:///run/vmferry-peers/host-b/disks.nbd";
    let copied = hosts.a.migrate("disks", "host-b", &["--copy-storage-all", "--disks-uri", uri]);
    must_succeed(&hosts, &copied);
    hosts.b.libvirt.check_guest("disks");
}

#[test]
fn several_streams_carry_memory() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    hosts.a.libvirt.create(&linux("wide"));
    hosts.a.libvirt.check_guest("wide");
    let several = ["--parallel", "--parallel-connections", "2"];
    must_succeed(&hosts, &hosts.a.migrate("wide", "host-b", &several));
    hosts.b.libvirt.check_guest("wide");
}

#[test]
fn memory_follows_the_guest_in_post_copy() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    hosts.a.libvirt.create(&linux("early"));
    hosts.a.libvirt.check_guest("early");
    let late = ["--postcopy", "--postcopy-after-precopy"];
    must_succeed(&hosts, &hosts.a.migrate("early", "host-b", &late));
    hosts.b.libvirt.check_guest("early");
}
