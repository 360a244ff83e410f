//! The link breaks and returns while a microvm guest migrates.

use vmferry_kit::need_kvm;

use crate::support::outcomes::{Outcome, Owner};
use crate::support::proxy::Proxy;
use crate::support::{World, all};
use serde_json::Value;

/// Cuts the link in the middle of a round and restores it. A bandwidth cap makes the round long
/// enough. Each dirty log write-protects pages at a different time.
fn cut_and_heal(log: &str, flags: &[&str], paused: bool) {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let workload = ["--memory", "64M", "--workload", "hot=2,random ticks", "--dirty-log", log];
    let guest = a.guest("web", &[&workload, flags].concat());
    let (mut destination, address) =
        b.receive(&["--listen", "tcp:127.0.0.1:0", "--plain", "--once", "--dirty-log", log]);
    let proxy = Proxy::before(&address);
    let mut send = a.start(&[
        "send",
        "web",
        "--to",
        &proxy.address,
        "--plain",
        "--verify",
        "--compress",
        "none",
        "--max-bandwidth",
        "1M",
        "--downtime-limit",
        "5s",
        "--max-rounds",
        "2",
        "--when-stuck",
        "switch-over",
    ]);
    send.event_where(|event| event["event"] == "round-started" && event["paused"] == paused);
    let sent_before = send.event("progress")["sent_bytes"].as_u64();
    proxy.cut();
    send.event("link-lost");
    if paused {
        send.event("recalled");
        assert_eq!(a.status("web")["phase"], "running", "the guest does not wait");
    }
    proxy.heal();
    let restored = send.event("link-restored");
    assert!(restored["after_ms"].as_f64().unwrap() > 0.0, "{restored}");
    let sent = send.finish();
    assert_eq!(sent.code, Some(0), "{log}: {sent:?}");
    let stats: &Value = sent.last();
    assert_eq!((&stats["digest_match"], &stats["verify_match"]), (&true.into(), &true.into()));
    assert!(stats["reconnections"].as_u64() > Some(0), "{stats}");
    assert!(stats["sent_bytes"].as_u64() > sent_before, "{stats}");
    assert_eq!(stats["recalls"], u64::from(paused), "{stats}");
    guest.finish().exited(0);
    destination.event("link-lost");
    destination.event("serving");
    b.check_guest("web");
    Outcome {
        guest: "microvm",
        fault: &format!("link: cut, and back, with the dirty log {log}"),
        phase: if paused { "paused" } else { "first round" },
        source: "exit 0".into(),
        destination: "runs the guest".into(),
        owner: Owner::Destination,
    }
    .note();
}

#[test]
fn link_cut_with_manual_clear_loses_no_write() {
    need_kvm();
    // Pages are write-protected just before they are read; those of the last round are not
    // protected.
    cut_and_heal("clear", &["--guest", "kvm"], true);
    cut_and_heal("clear", &["--guest", "kvm"], false);
}

#[test]
fn link_cut_with_other_dirty_logs_loses_no_write() {
    need_kvm();
    if all() {
        for log in ["bitmap", "ring", "uffd"] {
            cut_and_heal(log, &["--guest", "kvm"], true);
        }
    }
    cut_and_heal("uffd", &["--guest", "process"], true);
}
