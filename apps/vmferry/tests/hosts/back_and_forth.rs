//! One guest, moved back and forth between two hosts, with every dirty log and workload.

use vmferry_kit::need_kvm;

use crate::support::{World, all};
use serde_json::Value;

/// Moves a hot guest `times` times, verifies its whole memory each time, and checks the guest at
/// the end.
fn move_around(flags: &[&str], log: &str, times: usize) {
    move_workload("fill=8,text hot=24,random,rate=40000 ticks", flags, log, times);
}

/// The same with any workload.
fn move_workload(workload: &str, flags: &[&str], log: &str, times: usize) {
    let world = World::new();
    let tls = world.tls();
    let (a, b) = (world.host("a"), world.host("b"));
    let mut arguments = flags.to_vec();
    arguments.extend(["--memory", "64M", "--workload", workload]);
    arguments.extend(["--dirty-log", log]);
    let mut vmm = a.guest("web", &arguments);
    let (mut here, mut there) = (&a, &b);
    let mut made = [0; 3];
    for turn in 0..times {
        let (mut next, address) = there.receive(&[
            "--listen",
            "tls:127.0.0.1:0",
            "--tls",
            &tls,
            "--once",
            "--dirty-log",
            log,
        ]);
        let sent = here.run(&[
            "send",
            "web",
            "--to",
            &address,
            "--tls",
            &tls,
            "--verify",
            "--downtime-limit",
            "2s",
            "--when-stuck",
            "switch-over",
            "--max-rounds",
            "4",
            "--channels",
            ["1", "2", "4"][turn % 3],
        ]);
        assert_eq!(sent.code, Some(0), "turn {turn}: {sent:?}");
        let stats = sent.last();
        assert_eq!(stats["digest_match"], true, "turn {turn}: {stats}");
        assert_eq!(stats["verify_match"], true, "turn {turn}: {stats}");
        assert_eq!(vmm.finish().code, Some(0), "the old VMM exits regularly");
        next.event("serving");
        let report: Value = there.status("web")["report"].clone();
        assert_eq!(report["corruptions"], 0, "turn {turn}: {report}");
        for (before, name) in made.iter_mut().zip(["rounds", "read_rounds", "frames"]) {
            let now = report[name].as_u64().unwrap();
            assert!(now >= *before, "turn {turn}: the guest continues where it was: {report}");
            *before = now;
        }
        vmm = next;
        std::mem::swap(&mut here, &mut there);
    }
    here.check_guest("web");
}

fn times() -> usize {
    if all() { 20 } else { 4 }
}

#[test]
fn guest_moves_with_the_kvm_bitmap() {
    need_kvm();
    for vcpus in ["1", "4"] {
        move_around(&["--guest", "kvm", "--vcpus", vcpus], "bitmap", times());
    }
}

#[test]
fn guest_moves_with_the_kvm_bitmap_and_manual_clear() {
    need_kvm();
    for vcpus in ["1", "4"] {
        move_around(&["--guest", "kvm", "--vcpus", vcpus], "clear", times());
    }
}

#[test]
fn guest_moves_with_the_kvm_ring() {
    need_kvm();
    for vcpus in ["1", "4"] {
        move_around(&["--guest", "kvm", "--vcpus", vcpus], "ring", times());
    }
}

#[test]
fn guest_moves_with_userfaultfd_under_kvm() {
    need_kvm();
    for vcpus in ["1", "4"] {
        move_around(&["--guest", "kvm", "--vcpus", vcpus], "uffd", times());
    }
}

#[test]
fn guest_moves_with_userfaultfd_under_threads() {
    for vcpus in ["1", "4"] {
        move_around(&["--guest", "process", "--vcpus", vcpus], "uffd", times());
    }
}

/// The display is in its own memory slots, which every dirty log must cover.
#[test]
fn guest_moves_with_a_display_and_memory_that_is_read() {
    for workload in
        ["display", "read=24 ticks", "display fill=8,text read=8 hot=8,random,rate=40000"]
    {
        move_workload(workload, &["--guest", "process", "--vcpus", "2"], "uffd", 2);
        need_kvm();
        for log in ["bitmap", "clear", "uffd"] {
            move_workload(workload, &["--guest", "kvm", "--vcpus", "2"], log, 2);
        }
    }
}

#[test]
fn guest_moves_with_every_kind_of_memory() {
    for kind in ["memfd", "thp"] {
        let flags = ["--vcpus", "2", "--memory-kind", kind];
        move_around(&flags, "auto", 2);
    }
}
