//! `vmferry doctor --libvirt`.

use serde_json::Value;
use vmferry_libvirt_lab::{Domain, ImageFormat, LibvirtVersion};

use crate::hosts::{Hosts, linux};
use crate::processes::Ended;
use crate::sending::{create_quick, quick, run};

/// Checks a guest of `host-a`, without load on the link.
fn doctor(hosts: &Hosts, guest: &str, more: &[&str]) -> Ended {
    let file = hosts.directory.path().join("host-a.toml");
    let usual = ["doctor", "--libvirt", guest, "--daemon-config", file.to_str().unwrap()];
    run(hosts, &hosts.a, &[&usual[..], more].concat())
}

const PEER: [&str; 3] = ["--to", "host-b", "--no-load"];

/// The finding of a check whose object contains a text.
fn finding<'a>(ended: &'a Ended, check: &str, object: &str) -> &'a Value {
    let findings = ended.last()["findings"].as_array().unwrap();
    let is_it =
        |one: &&Value| one["check"] == check && one["object"].as_str().unwrap().contains(object);
    let found = findings.iter().find(is_it);
    found.unwrap_or_else(|| panic!("no finding {check} of {object}: {findings:#?}"))
}

fn has(ended: &Ended, check: &str, object: &str, level: &str, why: &str) {
    let found = finding(ended, check, object);
    let said = found["why"].as_str().unwrap();
    assert!(found["level"] == level && said.contains(why), "{found:#}");
    assert!(!matches!(level, "warning" | "error") || found["remedy"].is_string(), "{found:#}");
}

#[test]
fn guest_that_can_move_has_no_errors_on_either_host() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    create_quick(&hosts, "web");
    let ended = doctor(&hosts, "web", &PEER);
    assert_ne!(ended.last()["worst"], "error", "{:#}", ended.last());
    has(&ended, "libvirt", "this host", "ok", "libvirt 11.3.0 answers, with QEMU 10.0");
    has(&ended, "guest", "guest web", "ok", "it is running");
    has(&ended, "devices", "guest web", "ok", "none");
    has(&ended, "confinement", "this host", "ok", "no security driver");
    has(&ended, "qemu-user", "this host", "ok", "the user 0");
    has(&ended, "daemon", "host-a.toml", "ok", "valid");
    has(&ended, "daemon", "this host", "ok", "runs (process");
    has(&ended, "certificates", "host-a", "ok", "spiffe://vmferry/host/host-a");
    has(&ended, "admission", "host-b", "ok", "its policy admits web");
    has(&ended, "definition", "host-b", "ok", "permits the guest's whole definition");
    has(&ended, "libvirt", "host-b", "ok", "libvirt 11.3.0 answers, with QEMU 10.0");
    has(&ended, "processor", "host-b", "ok", "all features");
    has(&ended, "room", "host-b", "ok", "are available there");
    has(&ended, "round-trip", "host-b", "ok", "ms");
    let facts = &ended.last()["other"]["host"]["libvirt"];
    assert_eq!((&facts["qemu_user"], &facts["problem"]), (&0.into(), &Value::Null), "{facts}");
    assert_eq!(facts["directory"], "/run/vmferry-peers");

    // With the policy of an administrator who has listed nothing.
    let policy = "[[allow]]\nsource = \"spiffe://vmferry/host/host-a\"\nguests = [\"*\"]\n\
        definition.only_listed = true\n";
    std::fs::write(hosts.directory.path().join("policy.toml"), policy).unwrap();
    let ended = doctor(&hosts, "web", &PEER).exited(18);
    let why = "/domain/os/kernel = \"/var/lib/libvirt/boot/bare-metal.elf\": the policy names no";
    has(&ended, "definition", "host-b", "error", why);
    let remedy = finding(&ended, "definition", "host-b")["remedy"].as_str().unwrap();
    assert!(remedy.starts_with("directories = [\"/var/lib/libvirt/boot\"] in"), "{remedy}");
    hosts.a.libvirt.check_guest("web");
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn what_prevents_a_migration_is_an_error_with_a_remedy() {
    let mut hosts = Hosts::start(LibvirtVersion::V11_3);
    hosts.a.libvirt.define_and_start(&quick("off"));
    hosts.a.libvirt.virsh_ok(&["destroy", "off"]);
    create_quick(&hosts, "web");

    let off = doctor(&hosts, "off", &[]).exited(18);
    has(&off, "guest", "guest off", "error", "does not run (libvirt: shut off)");
    has(&off, "peers", "this host", "note", "peers: host-b");
    let absent = doctor(&hosts, "absent", &[]).exited(18);
    has(&absent, "guest", "guest absent", "error", "failed to get domain");
    let unknown = doctor(&hosts, "web", &["--to", "host-c"]).exited(18);
    has(&unknown, "other-host", "host-c", "error", "it has host-b");
    let no_file = ["doctor", "--libvirt", "web", "--daemon-config", "/nonexistent"];
    let no_file = run(&hosts, &hosts.a, &no_file).exited(18);
    has(&no_file, "daemon", "/nonexistent", "error", "can't be read");
    let nothing = ["--connect", "qemu+unix:///system?socket=/run/nothing"];
    let nothing = doctor(&hosts, "web", &nothing).exited(18);
    has(&nothing, "libvirt", "this host", "error", "/run/nothing");

    // The peer's policy, by guest and by host.
    let policy = hosts.directory.path().join("policy.toml");
    let allow = |source: &str, guests: &str| {
        let source = format!("spiffe://vmferry/host/{source}");
        let text = format!("[[allow]]\nsource = \"{source}\"\nguests = [\"{guests}\"]\n");
        std::fs::write(&policy, text).unwrap();
    };
    allow("host-*", "db-*");
    let guest = doctor(&hosts, "web", &PEER).exited(18);
    has(&guest, "admission", "host-b", "error", "other guests only");
    has(&guest, "libvirt", "host-b", "ok", "answers");
    allow("host-c", "*");
    let host = doctor(&hosts, "web", &PEER).exited(18);
    has(&host, "admission", "host-b", "error", "may not send guests here");
    // It tells nothing about itself to a host that may send nothing.
    assert!(host.last()["other"]["host"]["libvirt"].is_null(), "{:#}", host.last());
    allow("host-*", "*");

    hosts.b.libvirt.kill_libvirtd();
    let silent = doctor(&hosts, "web", &PEER).exited(18);
    has(&silent, "libvirt", "host-b", "error", "`virsh version` failed");
    hosts.b.libvirt.start_libvirtd();

    hosts.b.daemon = None;
    let unreachable = doctor(&hosts, "web", &PEER).exited(18);
    let found = finding(&unreachable, "other-host", "host-b");
    assert!(found["remedy"].as_str().unwrap().contains("start `vmferry daemon` there"), "{found}");
    hosts.a.daemon = None;
    let dead = doctor(&hosts, "web", &[]).exited(18);
    has(&dead, "daemon", "/run/vmferry-peers", "error", "no daemon serves this directory");
    hosts.a.libvirt.check_guest("web");
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn local_disks_and_snapshots_are_found() {
    let hosts = Hosts::start(LibvirtVersion::V9_0);
    let disk = hosts.a.libvirt.create_disk("own.qcow2", 16, ImageFormat::Qcow2);
    hosts.a.libvirt.create(&Domain { machine: "pc", ..linux("disks").with_disk(disk) });
    let ended = doctor(&hosts, "disks", &PEER).exited(17);
    has(&ended, "libvirt", "this host", "ok", "libvirt 9.0.0 answers, with QEMU 7.2");
    has(&ended, "disks", "disk vda", "warning", "own.qcow2 is on a file system of this host only");
    hosts.a.libvirt.virsh_ok(&["snapshot-create-as", "disks", "before", "--disk-only"]);
    let ended = doctor(&hosts, "disks", &[]).exited(18);
    has(&ended, "snapshots", "guest disks", "error", "such as before");
}
