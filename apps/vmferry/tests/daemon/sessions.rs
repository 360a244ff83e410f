//! `vmferry status --sessions` and `vmferry resolve` about guests of libvirt, on both hosts, with
//! and without a running daemon.

use rustix::process::{Signal, kill_process};
use serde_json::Value;
use vmferry_libvirt_lab::LibvirtVersion;

use crate::doubt::{Finishing, finishing, guest_runs_at_the_destination_only, source_waits_paused};
use crate::support::{Host, Hosts, linux, must_succeed};

/// What a host's journals say about the last session of a guest.
pub fn finish_of(host: &Host, guest: &str) -> Value {
    let output = host.vmferry(&["--json", "status", "--sessions"]);
    assert!(output.status.success(), "{output:?}");
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    let its = |one: &&Value| one["guest"]["name"] == guest;
    let found = shown["finishes"].as_array().unwrap().iter().rfind(its).cloned();
    found.unwrap_or_else(|| panic!("no session of {guest}: {shown:#}"))
}

/// `vmferry resolve`, which must succeed.
fn resolve(host: &Host, word: &str) -> Value {
    let output = host.vmferry(&["--json", "resolve", "web", word, "--yes"]);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// `vmferry resolve`, which must be refused.
fn refused(host: &Host, word: &str) -> String {
    let output = host.vmferry(&["resolve", "web", word, "--yes"]);
    assert_eq!(output.status.code(), Some(9), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// The destination's libvirt dies before it reads the Finish, and so does its daemon.
fn destination_dies(hosts: &mut Hosts) {
    hosts.b.daemon = None;
    hosts.b.libvirt.kill_libvirtd();
}

#[test]
fn source_without_a_daemon_resumes_a_guest_whose_destination_is_fenced() {
    let Finishing { mut hosts, libvirtd: _, moving } = finishing(LibvirtVersion::V11_3);
    let led = finish_of(&hosts.a, "web");
    assert_eq!((&led["owner"], &led["led"]), (&"undecided".into(), &true.into()), "{led}");
    assert_eq!(led["libvirt"], "paused (migrating)", "{led}");
    destination_dies(&mut hosts);
    hosts.a.daemon = None;
    let left = finish_of(&hosts.a, "web");
    assert_eq!((&left["owner"], &left["led"]), (&"undecided".into(), &false.into()), "{left}");
    assert_eq!(left["evidence"]["record"], "sent", "{left}");
    source_waits_paused(&hosts);
    let done = resolve(&hosts.a, "--source-resumes");
    assert_eq!(done["journaled_by"], "command", "{done}");
    assert!(!moving.wait_with_output().unwrap().status.success());
    hosts.a.libvirt.wait_for_state("web", Some("running"));
    hosts.a.libvirt.check_guest("web");
    let decided = finish_of(&hosts.a, "web");
    assert_eq!(decided["owner"], "source", "{decided}");
    assert_eq!(decided["evidence"]["by_operator"], true, "{decided}");
    let text = refused(&hosts.a, "--destination-owns");
    assert!(text.contains("never ran on the other host"), "{text}");
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn destination_without_the_guest_lets_the_source_resume() {
    let Finishing { mut hosts, libvirtd: _, moving } = finishing(LibvirtVersion::V9_0);
    let text = refused(&hosts.b, "--source-resumes");
    assert!(text.contains("leads the session"), "{text}");
    destination_dies(&mut hosts);
    let text = refused(&hosts.b, "--source-resumes");
    assert!(text.contains("does not answer"), "{text}");
    // Started again, libvirt removes a guest that has waited for its Finish.
    hosts.b.libvirt.start_libvirtd();
    hosts.b.libvirt.wait_for_state("web", None);
    hosts.b.start_daemon();
    let there = finish_of(&hosts.b, "web");
    assert_eq!(
        (&there["owner"], &there["libvirt"]),
        (&"undecided".into(), &"no such domain".into())
    );
    source_waits_paused(&hosts);
    // Beside the daemon, which hears of it when the source asks.
    resolve(&hosts.b, "--source-resumes");
    assert!(!moving.wait_with_output().unwrap().status.success());
    hosts.a.libvirt.wait_for_state("web", Some("running"));
    hosts.a.libvirt.check_guest("web");
    assert_eq!(finish_of(&hosts.b, "web")["owner"], "source");
    assert_eq!(finish_of(&hosts.a, "web")["owner"], "source");
    let text = refused(&hosts.b, "--destination-owns");
    assert!(text.contains("never ran here"), "{text}");
}

/// A libvirt that is killed and forgets the migration leaves the guest paused. A real one removes
/// it, so its file about the domain is changed while it is dead.
fn paused_on_both_hosts(version: LibvirtVersion) -> Finishing {
    let mut finishing = finishing(version);
    let hosts = &mut finishing.hosts;
    destination_dies(hosts);
    let status = hosts.b.libvirt.path("/run/libvirt/qemu/web.xml");
    let xml = std::fs::read_to_string(&status).unwrap();
    let begin = xml.find("<job ").expect("a job is under way");
    let end = begin + xml[begin..].find("</job>").expect("the job has an end") + "</job>".len();
    std::fs::write(&status, [&xml[..begin], &xml[end..]].concat()).unwrap();
    hosts.b.libvirt.start_libvirtd();
    hosts.b.libvirt.wait_for_state("web", Some("paused"));
    source_waits_paused(hosts);
    finishing
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn guest_that_is_paused_on_both_hosts_is_resumed_at_the_destination() {
    let Finishing { mut hosts, libvirtd: _, moving } = paused_on_both_hosts(LibvirtVersion::V11_3);
    let done = resolve(&hosts.b, "--destination-owns");
    assert_eq!(done["libvirt"], "the guest was resumed here", "{done}");
    hosts.b.libvirt.wait_for_state("web", Some("running"));
    let text = refused(&hosts.b, "--source-resumes");
    assert!(text.contains("runs here"), "{text}");
    source_waits_paused(&hosts);
    hosts.b.start_daemon();
    assert!(moving.wait_with_output().unwrap().status.success());
    guest_runs_at_the_destination_only(&hosts);
    let text = refused(&hosts.a, "--source-resumes");
    assert!(text.contains("runs on the other host"), "{text}");
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn guest_that_is_paused_on_both_hosts_is_resumed_at_the_source() {
    let Finishing { mut hosts, libvirtd: _, moving } = paused_on_both_hosts(LibvirtVersion::V9_0);
    let done = resolve(&hosts.b, "--source-resumes");
    assert_eq!(done["libvirt"], "the paused guest was removed here", "{done}");
    hosts.b.libvirt.wait_for_state("web", None);
    hosts.b.start_daemon();
    assert!(!moving.wait_with_output().unwrap().status.success());
    hosts.a.libvirt.wait_for_state("web", Some("running"));
    hosts.a.libvirt.check_guest("web");
}

/// The source's libvirt was restarted while it waited, so it leaves its guest paused.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn guest_that_the_sources_libvirt_has_left_paused_is_removed() {
    let Finishing { mut hosts, libvirtd, moving } = finishing(LibvirtVersion::V11_3);
    hosts.a.libvirt.kill_libvirtd();
    assert!(!moving.wait_with_output().unwrap().status.success());
    hosts.a.daemon = None;
    kill_process(libvirtd, Signal::CONT).unwrap();
    hosts.b.libvirt.wait_for_state("web", Some("running"));
    hosts.a.libvirt.start_libvirtd();
    source_waits_paused(&hosts);
    // It asks although no libvirt waits.
    hosts.a.start_daemon();
    hosts.a.daemon().wait_for("hears the word", |event| event["event"] == "finished");
    let left = finish_of(&hosts.a, "web");
    assert_eq!(left["owner"], "destination", "{left}");
    assert!(left["advice"].as_str().unwrap().contains("--destination-owns"), "{left}");
    source_waits_paused(&hosts);
    let text = refused(&hosts.a, "--source-resumes");
    assert!(text.contains("runs on the other host"), "{text}");
    let done = resolve(&hosts.a, "--destination-owns");
    assert_eq!(done["libvirt"], "the paused guest was removed here", "{done}");
    guest_runs_at_the_destination_only(&hosts);
}

/// What `vmferry resolve` and the daemon read from libvirt: between Prepare and Finish, the guest
/// waits, libvirt has a job for it, and nobody can pause it.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn libvirt_has_a_job_for_a_guest_that_arrives() {
    for version in [LibvirtVersion::V9_0, LibvirtVersion::V11_3] {
        let hosts = Hosts::start(version);
        hosts.a.libvirt.create(&linux("web"));
        hosts.a.libvirt.check_guest("web");
        // Slow enough that memory is still being copied.
        hosts.a.libvirt.virsh_ok(&["migrate-setspeed", "web", "1"]);
        let moving = hosts.a.migrate_command("web", "host-b", &[]).spawn().unwrap();
        hosts.a.daemon().wait_for("opens the memory's stream", |event| {
            event["event"] == "opened" && event["stream"]["target"] == "host-b/web.mig"
        });
        let there = &hosts.b.libvirt;
        let reason = there.virsh_ok(&["domstate", "--reason", "web"]);
        assert_eq!(reason.trim(), "paused (migrating)");
        let job = there.virsh(&["domjobinfo", "web"]);
        assert!(!String::from_utf8_lossy(&job.stdout).contains("None"), "{job:?}");
        assert!(!there.virsh(&["suspend", "web"]).status.success());
        assert_eq!(there.virsh_ok(&["domstate", "--reason", "web"]).trim(), reason.trim());
        hosts.a.libvirt.virsh_ok(&["migrate-setspeed", "web", "1000"]);
        must_succeed(&hosts, &moving.wait_with_output().unwrap());
        let job = hosts.b.libvirt.virsh_ok(&["domjobinfo", "web"]);
        assert!(job.contains("None"), "{job}");
    }
}
