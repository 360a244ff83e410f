//! What the daemons refuse.

use vmferry_libvirt_lab::{Domain, LibvirtVersion};

use crate::raw_link::RawLink;
use crate::support::{Hosts, linux};

/// What `virsh` says through the door to `host-b`.
fn virsh_at_the_door(hosts: &Hosts, arguments: &[&str]) -> (bool, String) {
    let uri = "qemu+unix:///system?socket=/run/vmferry-peers/host-b/libvirt";
    let output = hosts.a.libvirt.virsh(&[&["--connect", uri], arguments].concat());
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn door_is_for_migrations_only() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    hosts.b.libvirt.create(&linux("victim"));
    let file = hosts.directory.path().join("evil.xml");
    std::fs::write(&file, "<domain type='qemu'><name>evil</name></domain>").unwrap();
    for arguments in [
        &["destroy", "victim"][..],
        &["create", file.to_str().unwrap()],
        &["nodeinfo"],
        &["list"],
        &["qemu-monitor-command", "victim", "--hmp", "info status"],
        &["vol-upload", "--pool", "default", "image", file.to_str().unwrap()],
    ] {
        let refused = |event: &serde_json::Value| event["event"] == "refused";
        let before = hosts.a.daemon().events().into_iter().filter(refused).count();
        let (succeeded, said) = virsh_at_the_door(&hosts, arguments);
        assert!(!succeeded, "{arguments:?}");
        // virsh looks a domain up in three ways, and then says only that it has not found it.
        let is_clear = said.contains("vmferry") || said.contains("failed to get domain");
        assert!(is_clear, "{arguments:?}: {said}");
        hosts.a.daemon().wait_for_more(before, "logs a refusal", refused);
    }
    assert_eq!(hosts.b.libvirt.domain_state("victim").as_deref(), Some("running"));
}

/// A host with a valid certificate whose daemon lets everything through.
#[test]
fn destination_does_not_rely_on_the_sources_gate() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    hosts.b.libvirt.create(&linux("victim"));
    let mut link = RawLink::open(&hosts);
    // Auth list, open, and then what an intruder would like: list domains, destroy, a new domain.
    link.call(66, &[]);
    let open = [&[0, 0, 0, 1, 0, 0, 0, 14][..], b"qemu:///system\0\0", &[0; 4]].concat();
    link.call(1, &open);
    for procedure in [273, 12, 8, 10, 212] {
        let reply = link.call(procedure, &[0; 16]);
        let said = String::from_utf8_lossy(&reply).into_owned();
        assert!(said.contains("vmferry refused: procedure"), "{procedure}: {said}");
    }
    let wanted = |event: &serde_json::Value| event["wanted"] == "call procedure 12 of libvirt";
    hosts.b.daemon().wait_for("logs a refusal", wanted);
    assert_eq!(hosts.b.libvirt.domain_state("victim").as_deref(), Some("running"));
}

#[test]
fn guest_that_the_policy_does_not_name_is_refused_at_both_hosts() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    let policy = "[[allow]]\nsource = \"spiffe://vmferry/host/host-a\"\nguests = [\"db-*\"]\n";
    std::fs::write(hosts.directory.path().join("policy.toml"), policy).unwrap();
    hosts.a.libvirt.create(&linux("web"));
    let moved = hosts.a.migrate("web", "host-b", &[]);
    let said = String::from_utf8_lossy(&moved.stderr).into_owned();
    assert!(!moved.status.success() && said.contains("web"), "{said}");
    hosts.b.daemon().wait_for("refuses", |event| event["event"] == "refused");
    hosts.a.libvirt.check_guest("web");
}

/// The source's libvirt sends any definition that has the same devices.
fn definition_is_judged(version: LibvirtVersion) {
    let hosts = Hosts::start(version);
    hosts.a.libvirt.create(&Domain::on_kvm("web", "hot=8"));
    let xml = hosts.a.libvirt.virsh_ok(&["dumpxml", "--migratable", "web"]);
    let (console, other) = ("/var/log/libvirt/qemu/web.console", "/etc/web.console");
    let (file, stays) = (hosts.directory.path().join("other.xml"), || {
        assert_eq!(hosts.a.libvirt.domain_state("web").as_deref(), Some("running"));
        assert!(!hosts.b.libvirt.path(other).exists());
    });
    let file_name = file.to_str().unwrap();
    let migrate = |text: &str, option: &str| {
        std::fs::write(&file, text).unwrap();
        hosts.a.migrate("web", "host-b", &[option, file_name, "--persistent"])
    };
    assert!(xml.contains(console), "{xml}");
    let hostile = xml.replace(console, other);
    for option in ["--xml", "--persistent-xml"] {
        let moved = migrate(&hostile, option);
        let said = String::from_utf8_lossy(&moved.stderr).into_owned();
        assert!(!moved.status.success() && said.contains("/devices/serial/source/@path"), "{said}");
        assert!(said.contains("directories = [\"/etc\"]"), "{said}");
        stays();
    }
    let said = migrate(&xml, "--xml");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    hosts.b.libvirt.check_guest("web");
}

#[test]
fn definition_that_the_policy_does_not_permit_is_refused() {
    definition_is_judged(LibvirtVersion::V11_3);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn definition_that_the_policy_does_not_permit_is_refused_with_libvirt_9() {
    definition_is_judged(LibvirtVersion::V9_0);
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn socket_outside_the_directory_is_refused() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    hosts.a.libvirt.create(&linux("web"));
    let elsewhere = ["--disks-uri", "unix:///run/libvirt/other", "--copy-storage-all"];
    let moved = hosts.a.migrate("web", "host-b", &elsewhere);
    let said = String::from_utf8_lossy(&moved.stderr).into_owned();
    let expected = "is not a socket of a migration in /run/vmferry-peers/host-b";
    assert!(!moved.status.success() && said.contains(expected), "{said}");
    hosts.a.libvirt.check_guest("web");
}

#[test]
fn squatted_socket_is_refused() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    hosts.a.libvirt.create(&linux("web"));
    let directory = hosts.b.libvirt.path("/run/vmferry-peers/host-b");
    std::fs::create_dir(&directory).unwrap();
    let squatter = std::os::unix::net::UnixListener::bind(directory.join("web.mig")).unwrap();
    let moved = hosts.a.migrate("web", "host-b", &[]);
    let said = String::from_utf8_lossy(&moved.stderr).into_owned();
    assert!(!moved.status.success() && said.contains("web.mig"), "{said}");
    drop(squatter);
    hosts.a.libvirt.check_guest("web");
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn migration_without_unix_sockets_is_refused_with_advice() {
    let hosts = Hosts::start(LibvirtVersion::V11_3);
    hosts.a.libvirt.create(&linux("web"));
    let uri = "qemu+unix:///system?socket=/run/vmferry-peers/host-b/libvirt";
    let moved = hosts.a.libvirt.virsh(&["migrate", "--live", "--p2p", "web", uri]);
    let said = String::from_utf8_lossy(&moved.stderr).into_owned();
    assert!(!moved.status.success() && said.contains("`migrate_uri`"), "{said}");
    hosts.a.libvirt.check_guest("web");
}
