//! Carried guests, whose QEMUs use their own post-copy.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Backend, Machine, Qemu, Version};

use super::rights::NOBODY;
use super::{Move, emulated, fetched, on_kvm};
use crate::support::proxy::{Message, Proxy};
use crate::support::scene::{Scene, Way};
use crate::support::stops::guardian;
use crate::support::{Running, all, in_parallel, run_ok, text};

pub fn private(machine: Machine) -> Machine {
    Machine { backend: Backend::Private, ..machine }
}

#[test]
fn carried_guests_fetch_their_pages() {
    let machines = [private(on_kvm(Version::V10_0)), private(emulated(Version::V10_0))];
    in_parallel(machines.into(), |machine| {
        let mut moving = Move::until_it_fetches(machine, &["--sandbox", "require"]);
        fetched(&moving.send.finish_by_ref().exited(0));
        moving.receiving.event("received");
        moving.arrives();
    });
}

/// A migration with post-copy through a proxy, whose guest is cold after the first round.
pub fn send(scene: &Scene, address: &str) -> Running {
    let mut send = vec!["send", "--qemu", text(&scene.here.qmp), "--to", address, "--plain"];
    send.extend(["--max-bandwidth", "8M", "--compress", "none", "--reconnect-timeout", "2s"]);
    send.extend(["--post-copy", "now", "--downtime-limit", "1ms"]);
    scene.a.start(&send)
}

/// The fetch lanes of a migration, as its events report them.
#[derive(Default)]
struct Lanes {
    lost: BTreeSet<String>,
}

impl Lanes {
    /// Waits until all are lost, or none is. A lane may be lost and restored again meanwhile.
    fn wait_until(&mut self, send: &mut Running, all_are_lost: bool) {
        while self.lost.len() != if all_are_lost { 2 } else { 0 } {
            let event = send.event_where(|event| {
                ["link-lost", "link-restored"].iter().any(|name| event["event"] == *name)
            });
            let lane = event["channel"].as_str().filter(|channel| channel.starts_with("lane"));
            let Some(lane) = lane else { continue };
            if event["event"] == "link-lost" {
                assert!(self.lost.insert(lane.to_owned()), "{event}");
            } else {
                assert!(self.lost.remove(lane), "{event}");
            }
        }
    }
}

#[test]
fn link_that_breaks_while_a_carried_guest_fetches_loses_nothing() {
    let machines = [private(on_kvm(Version::V10_0)), private(emulated(Version::V10_0))];
    in_parallel(machines.into(), |machine| {
        let mut scene = Scene::of(machine, Way::Carried);
        let (mut there, mut receiving, address) = scene.receive_plain();
        let proxy = Proxy::holding(&address, "127.0.0.1", None);
        let mut send = send(&scene, &proxy.address);
        send.event("serving");
        let mut lanes = Lanes::default();
        for _ in 0..3 {
            proxy.cut();
            lanes.wait_until(&mut send, true);
            // Longer than the reconnect timeout, which does not hold any more.
            std::thread::sleep(Duration::from_secs(3));
            proxy.heal();
            lanes.wait_until(&mut send, false);
        }
        fetched(&send.finish().exited(0));
        receiving.event("received");
        assert!(scene.here.child.wait().unwrap().success(), "it was quit");
        there.check_guest();
        let said = there.wait_for("has checked its memory", |said| said.get("corruptions") == 0);
        assert_eq!(said.get("corruptions"), 0, "{said:?}");
    });
}

/// What happens while the destination has loaded the guest, and READY has not arrived.
type Fault = fn(&Scene, &Proxy, &mut Running, &mut Running, &mut Qemu);

const FAULTS: [(&str, Fault); 6] = [
    ("the sender is killed", |_, _, send, _, _| send.kill()),
    ("the sender and its guardian are killed", |_, _, send, _, _| {
        let guardian = Pid::from_raw(guardian(send) as i32).unwrap();
        kill_process(guardian, Signal::KILL).unwrap();
        send.kill();
    }),
    ("the receiver is killed", |_, _, _, receiving, _| receiving.kill()),
    ("the destination's QEMU is killed", |_, _, _, _, there| there.child.kill().unwrap()),
    ("the operator cancels", |scene, _, _, _, _| {
        run_ok(&scene.a, &["cancel", "tested"]);
    }),
    ("the link is cut", |_, proxy, _, _, _| proxy.cut()),
];

/// Its memory is QEMU's alone, so the missing pages are lost, and both hosts say so. QEMU notifies
/// the sender, and its guardian notices.
#[test]
fn carried_guest_loses_its_missing_pages_with_the_qemu_that_it_has_left() {
    in_parallel(vec![false, true], |by_guardian| {
        let mut moving = Move::until_it_fetches(private(on_kvm(Version::V10_0)), &[]);
        moving.send.event("serving");
        if by_guardian {
            let guardian = guardian(&moving.send);
            moving.send.kill();
            wait_until(|| has_thread(guardian, "tunnel"));
        }
        moving.scene.here.child.kill().unwrap();
        if !by_guardian {
            moving.send.finish_by_ref().failed(13, "has lost the pages that it had not fetched");
        }
        let failed = moving.receiving.event("fetching-failed");
        assert!(failed["reason"].as_str().unwrap().contains("has lost the pages"), "{failed}");
        assert!(moving.there.child.try_wait().unwrap().is_none(), "the guest waits");
        moving.there.child.kill().unwrap();
        moving.receiving.event("guest-ended");
        moving.receiving.finish_by_ref().failed(13, "has crashed here while it lacked pages");
        let sessions = run_ok(&moving.scene.a, &["status", "--sessions"]);
        assert_eq!(
            sessions["sessions"][0]["verdict"], "there",
            "nothing is left to do: {sessions}"
        );
    });
}

/// A QEMU that is stopped sends nothing for as long as that takes.
#[test]
fn carried_guest_waits_while_the_qemu_that_it_has_left_is_stopped() {
    let mut moving = Move::until_it_fetches(private(on_kvm(Version::V10_0)), &[]);
    moving.send.event("serving");
    let qemu = Pid::from_child(&moving.scene.here.child);
    kill_process(qemu, Signal::STOP).unwrap();
    let failed = moving.send.event("serving-failed");
    assert!(failed["reason"].as_str().unwrap().contains("stopped"), "{failed}");
    kill_process(qemu, Signal::CONT).unwrap();
    fetched(&moving.send.finish_by_ref().exited(0));
    moving.receiving.event("received");
    moving.arrives();
}

/// QEMU has begun its post-copy by then, and does not go back by itself.
#[test]
fn carried_guest_runs_on_at_the_source_after_any_fault_before_commit() {
    // A sample has one of two: each process on either host, or the link, is lost.
    let every = if all() { 1 } else { 2 };
    in_parallel(FAULTS.into_iter().rev().step_by(every).collect(), |(name, strike)| {
        println!("{name}");
        let mut scene = Scene::of(private(on_kvm(Version::V10_0)), Way::Carried);
        let (mut there, mut receiving, address) = scene.receive_plain();
        let proxy = Proxy::holding(&address, "127.0.0.1", Some(Message::Ready));
        let mut sending = send(&scene, &proxy.address);
        proxy.await_held();
        strike(&scene, &proxy, &mut sending, &mut receiving, &mut there);
        if name.contains("guardian") {
            let (mut there, mut receiving, address) = scene.receive_plain();
            let mut next = send(&scene, &address);
            next.event("finishing-session");
            fetched(&next.finish().exited(0));
            receiving.event("received");
            there.check_guest();
            return;
        }
        scene.runs_on_here();
        scene.arrives();
    });
}

/// Which processes of vmferry die while a carried guest fetches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    /// The sender: its guardian takes over.
    Sender,
    Receiver,
    /// Both, and the guardian.
    All,
}

/// Both QEMUs live, and the next processes of vmferry connect them again.
#[test]
fn carried_guest_outlives_the_processes_that_carry_it() {
    let kvm = || private(on_kvm(Version::V10_0));
    let mut cases = vec![
        (kvm(), vec![Death::Sender]),
        (kvm(), vec![Death::Receiver]),
        (private(emulated(Version::V10_0)), vec![Death::All]),
        (kvm(), vec![Death::Receiver, Death::All, Death::Receiver]),
    ];
    if all() {
        cases.push((private(emulated(Version::V10_0)), vec![Death::Sender]));
        cases.push((private(emulated(Version::V10_0)), vec![Death::Receiver, Death::Receiver]));
        cases.push((kvm(), vec![Death::All, Death::All]));
    }
    in_parallel(cases, |(machine, deaths)| {
        let restricted = ["--sandbox", "require"];
        let mut moving = Move::until_it_fetches(machine, &restricted);
        moving.send.event("serving");
        let (there, tls) = (text(&moving.there.qmp).to_owned(), moving.scene.world.tls());
        let link = ["receive", "--qemu", &there, "--listen", &moving.address, "--tls", &tls];
        let receive = [&link[..], &restricted].concat();
        let mut has_guardian = true;
        for &death in &deaths {
            println!("{death:?}");
            if death != Death::Sender {
                moving.receiving.kill();
            }
            if death == Death::All && std::mem::take(&mut has_guardian) {
                let guardian = Pid::from_raw(guardian(&moving.send) as i32).unwrap();
                kill_process(guardian, Signal::KILL).unwrap();
            }
            if death != Death::Receiver {
                moving.send.kill();
            }
            if death == Death::All {
                moving.send = super::send(&moving.scene, &moving.address);
                moving.send.event("finishing-session");
                moving.send.event("post-copy-interrupted");
            }
            if death != Death::Sender {
                moving.receiving = moving.scene.b.start(&receive);
                moving.receiving.event("taking-over");
            }
        }
        if deaths.last() == Some(&Death::Sender) {
            moving.receiving.event("received");
        } else {
            moving.receiving.event("fetched");
            moving.receiving.event("found");
            moving.send.finish_by_ref().exited(0);
        }
        // The connection that QEMU has kept is free.
        Qmp::connect(&moving.there.qmp).unwrap();
        moving.arrives();
    });
}

/// Whether a process has a thread whose name begins so.
pub fn has_thread(pid: u32, name: &str) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    // A thread may end meanwhile.
    let names = threads.filter_map(|thread| std::fs::read(thread.ok()?.path().join("comm")).ok());
    names.into_iter().any(|one| one.starts_with(name.as_bytes()))
}

pub fn wait_until(mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "it does not come so far");
        // Nothing tells of a page that has arrived, or of a state of QEMU's.
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The command line of a migration over TLS that insists on `options`.
fn over_tls<'a>(
    scene: &'a Scene,
    address: &'a str,
    tls: &'a str,
    options: &[&'a str],
) -> Vec<&'a str> {
    let mut send = vec!["send", "--qemu", text(&scene.here.qmp), "--to", address, "--tls", tls];
    send.extend(["--mode", "carried", "--max-bandwidth", "32M", "--compress", "none"]);
    send.extend(options);
    send
}

/// Guests that QEMU could not move so, or not without loss. With `auto` they move in pre-copy.
#[test]
fn guests_that_qemu_can_not_move_with_post_copy_are_refused_before_anything_is_sent() {
    let without = |machine: Machine| Machine { workload: "hot=2,rate=100".into(), ..machine };
    let two_nodes = Machine { workload: "dirty=2".into(), ..emulated(Version::V10_0) };
    let two_nodes = Machine { backend: Backend::TwoNodes, mib: 256, ..two_nodes };
    let cases: [(Machine, &[&str], &str); 3] = [
        (private(without(on_kvm(Version::V7_2))), &[], "not as vmferry carries it"),
        (
            private(without(on_kvm(Version::V10_0))),
            &["--multifd", "2"],
            "no post-copy with multifd",
        ),
        (two_nodes, &["--when-stuck", "switch-over"], "loses some of its guest's writes"),
    ];
    in_parallel(cases.into(), |(machine, more, why)| {
        let mut scene = Scene::of(machine, Way::Carried);
        let tls = scene.world.tls();
        let (_there, _receiving, address) = scene.receive_tls();
        let send = over_tls(&scene, &address, &tls, &[more, &["--post-copy", "now"]].concat());
        scene.a.run(&send).failed(6, why);
        scene.runs_on_here();
        let (there, mut receiving, address) = scene.receive_tls();
        let options = [more, &["--post-copy", "auto", "--downtime-limit", "2s"]].concat();
        let sent = scene.a.run(&over_tls(&scene, &address, &tls, &options)).exited(0);
        assert_eq!(sent.last()["missing_pages"], 0);
        receiving.event("received");
        scene.moved_to(there);
    });
}

/// QEMU refuses post-copy if it may not handle the kernel's faults.
#[test]
fn destination_whose_qemu_may_not_handle_faults_says_so() {
    let machine = Machine { workload: "hot=2,rate=100".into(), ..private(on_kvm(Version::V10_0)) };
    let mut scene = Scene::of(machine, Way::Carried);
    scene.lab.give_to(NOBODY).unwrap();
    scene.machine.user = Some(NOBODY);
    let tls = scene.world.tls();
    let (_there, _receiving, address) = scene.receive_tls();
    let send = over_tls(&scene, &address, &tls, &["--post-copy", "now"]);
    scene.a.run(&send).failed(6, "the destination: ");
    scene.runs_on_here();
    let (there, mut receiving, address) = scene.receive_tls();
    let send = over_tls(&scene, &address, &tls, &["--post-copy", "auto", "--downtime-limit", "2s"]);
    scene.a.run(&send).exited(0);
    receiving.event("received");
    scene.moved_to(there);
}

/// Post-copy is permitted, and not needed. Then the guest is stuck: it moves there, and back.
#[test]
fn carried_guest_uses_post_copy_only_if_it_is_stuck() {
    let idle = Machine { workload: "hot=2,rate=100".into(), ..private(on_kvm(Version::V10_0)) };
    let stuck = private(on_kvm(Version::V10_0));
    // On a busy host a few pages may take tens of milliseconds.
    in_parallel(vec![(idle, "2s", false), (stuck, "20ms", true)], |(machine, limit, is_stuck)| {
        let mut scene = Scene::of(machine, Way::Carried);
        let tls = scene.world.tls();
        for policy in [["--post-copy", "auto"], ["--when-stuck", "post-copy"]] {
            let (there, mut receiving, address) = scene.receive_tls();
            let options = [&policy[..], &["--downtime-limit", limit]].concat();
            let sent = scene.a.run(&over_tls(&scene, &address, &tls, &options));
            if sent.code != Some(0) {
                panic!("{sent:?}, and the receiver: {:?}", receiving.finish());
            }
            let missing = sent.last()["missing_pages"].as_u64().unwrap();
            assert_eq!(missing > 0, is_stuck, "{missing} pages were missing");
            receiving.event("received");
            assert!(scene.here.child.wait().unwrap().success(), "it was quit");
            scene.moved_to(there);
            std::mem::swap(&mut scene.a, &mut scene.b);
        }
    });
}
