//! A daemon or a libvirtd is killed and started again, at either end, in each phase.

use serde_json::Value;
use vmferry_libvirt_lab::LibvirtVersion;

use crate::phases::{Ended, Moving, Phase, wait_until};
use crate::sessions::finish_of;
use crate::support::{Hosts, must_succeed};

/// What is killed, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    DaemonAtTheSource,
    DaemonAtTheDestination,
    /// The daemon ends with it, and is started again.
    HelperAtTheSource,
    HelperAtTheDestination,
    LibvirtdAtTheSource,
    LibvirtdAtTheDestination,
}

/// Kills the victim in a phase, starts it again, and checks where the guest is.
fn kill(phase: Phase, victim: Victim, version: LibvirtVersion) {
    // The destination notices after this time that the source's daemon has gone.
    let hosts = Hosts::with(version, "reconnect_timeout = \"3s\"");
    let mut moving = Moving::until(phase, hosts);
    match victim {
        Victim::DaemonAtTheSource => {
            moving.hosts.a.daemon = None;
            moving.hosts.a.start_daemon();
        }
        Victim::DaemonAtTheDestination => {
            moving.hosts.b.daemon = None;
            moving.hosts.b.start_daemon();
        }
        Victim::HelperAtTheSource => {
            moving.hosts.a.end_daemon_by_its_helper();
            moving.hosts.a.start_daemon();
        }
        Victim::HelperAtTheDestination => {
            moving.hosts.b.end_daemon_by_its_helper();
            moving.hosts.b.start_daemon();
        }
        Victim::LibvirtdAtTheSource => {
            moving.hosts.a.libvirt.kill_libvirtd();
            moving.hosts.a.libvirt.start_libvirtd();
        }
        Victim::LibvirtdAtTheDestination => {
            moving.kill_libvirtd_of_b();
            moving.hosts.b.libvirt.start_libvirtd();
        }
    }
    match (phase, victim) {
        (Phase::Prepare | Phase::Disks | Phase::Memory, _) => {
            let ended = moving.end();
            assert!(!ended.virsh.status.success());
            ended.has_stayed();
            ended.moves_now();
        }
        (
            Phase::Finish,
            Victim::DaemonAtTheSource
            | Victim::DaemonAtTheDestination
            | Victim::HelperAtTheSource
            | Victim::HelperAtTheDestination,
        )
        | (Phase::PostCopy, Victim::LibvirtdAtTheDestination) => {
            let ended = moving.end();
            must_succeed(&ended.hosts, &ended.virsh);
            ended.has_moved();
        }
        (Phase::Finish, Victim::LibvirtdAtTheDestination) => doubt_is_resolved(moving),
        (Phase::Finish, Victim::LibvirtdAtTheSource) => copy_at_the_source_is_named(moving.end()),
        (Phase::PostCopy, Victim::LibvirtdAtTheSource) => moving.end().has_moved(),
        (Phase::PostCopy, _) => post_copy_is_recovered(moving.end()),
    }
}

/// The destination's libvirt has lost the Finish and the guest. The guest waits at the source
/// until an operator decides.
fn doubt_is_resolved(moving: Moving) {
    let Hosts { a, b, .. } = &moving.hosts;
    a.daemon().wait_for("is in doubt", |event| event["event"] == "in-doubt");
    b.libvirt.wait_for_state("web", None);
    assert_eq!(a.libvirt.domain_state("web").as_deref(), Some("paused"));
    let status = a.vmferry(&["--json", "status", "web"]);
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(status["migration"]["in_doubt"], true, "{status}");
    let resolved = a.vmferry(&["resolve", "web", "--source-resumes", "--yes"]);
    // The daemon may be waiting for the other one, and writes the word afterwards.
    let said = String::from_utf8_lossy(&resolved.stderr).into_owned();
    assert!(resolved.status.success() || said.contains("It goes on trying"), "{resolved:?}");
    a.daemon().wait_for("takes the word", |event| event["event"] == "finished");
    let ended = moving.end();
    assert!(!ended.virsh.status.success());
    ended.has_stayed();
    ended.moves_now();
}

/// The guest runs at the destination. The source's libvirt, which was started again, keeps its
/// paused copy.
fn copy_at_the_source_is_named(ended: Ended) {
    let Hosts { a, b, .. } = &ended.hosts;
    b.libvirt.wait_for_state("web", Some("running"));
    b.libvirt.check_guest("web");
    assert_eq!(a.libvirt.domain_state("web").as_deref(), Some("paused"));
    // The guest runs there before the answer is in the journal here.
    wait_until("knows the owner", || finish_of(a, "web")["owner"] == "destination");
    let resolved = a.vmferry(&["resolve", "web", "--destination-owns", "--yes"]);
    assert!(resolved.status.success(), "{resolved:?}");
    ended.has_moved();
}

/// Each host has a part of the guest's memory. The daemons that run now carry the rest.
fn post_copy_is_recovered(ended: Ended) {
    let Hosts { a, b, .. } = &ended.hosts;
    assert!(!ended.virsh.status.success());
    let reason = |libvirt: &vmferry_libvirt_lab::LibvirtHost| {
        let said = libvirt.virsh(&["domstate", "--reason", "web"]).stdout;
        String::from_utf8_lossy(&said).trim().to_owned()
    };
    wait_until("fails", || {
        reason(&a.libvirt) == "paused (post-copy failed)"
            && reason(&b.libvirt) == "running (post-copy failed)"
    });
    let left = finish_of(a, "web");
    let advice = left["advice"].as_str().unwrap();
    assert!(advice.contains("each host has a part of its memory"), "{left}");
    // The guest's QEMU still listens on the first socket.
    let options = ["--postcopy", "--postcopy-resume"];
    let resumed = a.migrate_over("again.mig", "web", "host-b", &options).output().unwrap();
    if a.libvirt.version() == LibvirtVersion::V9_0 {
        must_succeed(&ended.hosts, &resumed);
        return ended.has_moved();
    }
    // libvirtd 11.3 of the destination crashes. Neither QEMU is lost.
    let said = String::from_utf8_lossy(&resumed.stderr).into_owned();
    assert!(said.contains("client socket is closed"), "{said}");
    b.libvirt.kill_libvirtd();
    b.libvirt.start_libvirtd();
    assert_eq!(reason(&a.libvirt), "paused (post-copy failed)");
    assert_eq!(reason(&b.libvirt), "running (post-copy failed)");
}

/// Tests of one death each.
macro_rules! deaths {
    ($($name:ident: $phase:ident, $victim:ident, $version:ident;)+) => {$(
        #[test]
        #[cfg_attr(
            not(feature = "long-tests"),
            ignore = "a part of the full matrix: make test-all"
        )]
        fn $name() {
            kill(Phase::$phase, Victim::$victim, LibvirtVersion::$version);
        }
    )+};
}

deaths! {
    daemon_at_the_source_in_prepare: Prepare, DaemonAtTheSource, V11_3;
    daemon_at_the_source_while_disks_are_copied: Disks, DaemonAtTheSource, V11_3;
    daemon_at_the_source_while_memory_is_copied: Memory, DaemonAtTheSource, V9_0;
    daemon_at_the_source_in_finish: Finish, DaemonAtTheSource, V9_0;
    daemon_at_the_source_in_post_copy: PostCopy, DaemonAtTheSource, V11_3;
    daemon_at_the_source_in_post_copy_of_9_0: PostCopy, DaemonAtTheSource, V9_0;
    daemon_at_the_destination_in_prepare: Prepare, DaemonAtTheDestination, V9_0;
    daemon_at_the_destination_while_disks_are_copied: Disks, DaemonAtTheDestination, V9_0;
    daemon_at_the_destination_while_memory_is_copied: Memory, DaemonAtTheDestination, V11_3;
    daemon_at_the_destination_in_finish: Finish, DaemonAtTheDestination, V11_3;
    daemon_at_the_destination_in_post_copy: PostCopy, DaemonAtTheDestination, V11_3;
    daemon_at_the_destination_in_post_copy_of_9_0: PostCopy, DaemonAtTheDestination, V9_0;
    helper_at_the_source_while_memory_is_copied: Memory, HelperAtTheSource, V11_3;
    helper_at_the_source_in_finish: Finish, HelperAtTheSource, V11_3;
    helper_at_the_destination_in_finish: Finish, HelperAtTheDestination, V9_0;
    libvirtd_at_the_source_in_prepare: Prepare, LibvirtdAtTheSource, V9_0;
    libvirtd_at_the_source_while_disks_are_copied: Disks, LibvirtdAtTheSource, V11_3;
    libvirtd_at_the_source_while_memory_is_copied: Memory, LibvirtdAtTheSource, V9_0;
    libvirtd_at_the_source_in_finish: Finish, LibvirtdAtTheSource, V11_3;
    libvirtd_at_the_source_in_post_copy: PostCopy, LibvirtdAtTheSource, V11_3;
    libvirtd_at_the_destination_in_prepare: Prepare, LibvirtdAtTheDestination, V11_3;
    libvirtd_at_the_destination_while_disks_are_copied: Disks, LibvirtdAtTheDestination, V9_0;
    libvirtd_at_the_destination_while_memory_is_copied: Memory, LibvirtdAtTheDestination, V11_3;
    libvirtd_at_the_destination_in_finish: Finish, LibvirtdAtTheDestination, V9_0;
    libvirtd_at_the_destination_in_post_copy: PostCopy, LibvirtdAtTheDestination, V11_3;
    libvirtd_at_the_destination_in_post_copy_of_9_0: PostCopy, LibvirtdAtTheDestination, V9_0;
}
