//! Faults of a QEMU guest's migration and their expected outcomes, for both ways to move it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Qemu, Version};

use super::outcomes::Owner;
use super::proxy::Proxy;
use super::scene::{Scene, Way};
use super::stops::guardian;
use super::{BEFORE_COMMIT, Host, Moment, Running, all, run_ok};

/// All versions in the full matrix, one otherwise.
fn versions() -> &'static [Version] {
    if all() { &Version::ALL } else { &Version::ALL[1..] }
}

/// All phases in the full matrix, the last and most critical one otherwise.
fn moments() -> &'static [Moment] {
    if all() { &BEFORE_COMMIT } else { &BEFORE_COMMIT[3..] }
}

/// A migration whose COMMIT does not arrive.
pub fn in_doubt(scene: &mut Scene) -> (Qemu, Running, Running, Proxy) {
    let (there, receiving, address) = scene.receive_plain();
    let proxy = Proxy::before(&address);
    let mut send = scene.send(&proxy.address, &["--plain"]);
    send.event("in-doubt");
    (there, receiving, send, proxy)
}

/// Waits until the guardian has taken over and answers for the guest.
pub fn guardian_answers(host: &Host) {
    guardian_says(host, |_| true);
}

fn guardian_is_in_doubt(host: &Host) {
    guardian_says(host, |status| status["migration"]["in_doubt"] == true);
}

fn guardian_says(host: &Host, wanted: impl Fn(&Value) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let asked = host.run(&["status", "tested"]);
        if asked.code == Some(0) && wanted(asked.last()) {
            assert_eq!(asked.last()["guest"], "qemu", "{asked:?}");
            return;
        }
        assert!(Instant::now() < deadline, "no guardian: {asked:?}");
        // A new socket file notifies no one that waits for it.
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn sender_killed_in_any_phase_leaves_the_guest_running(way: Way) {
    for version in versions() {
        let mut scene = Scene::new(*version, way);
        for (name, moment) in moments() {
            println!("{version:?}: {name}");
            let (mut there, receiving, mut send) = scene.migrate_until(moment);
            send.kill();
            let received = receiving.finish();
            assert_eq!(received.code, Some(12), "{name}: {received:?}");
            scene.runs_on_here();
            scene.note(
                &mut there,
                "the sender: SIGKILL",
                name,
                ("killed", &received),
                Owner::Source,
            );
        }
        scene.arrives();
    }
}

pub fn next_sender_tidies_up_after_a_killed_sender_and_guardian(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (_gone, receiving, address) = scene.receive_tls();
    let tls = scene.world.tls();
    let mut send =
        scene.send_capped(&address, &["--tls", &tls, "--reconnect-timeout", "2s"], "10M");
    send.event_where(BEFORE_COMMIT[3].1);
    // Five times a second: by the second phase the state is saved. Before that QEMU itself would
    // resume a guest whose migration breaks, and the pages take longer.
    send.event("progress");
    send.event("progress");
    let guardian = rustix::process::Pid::from_raw(guardian(&send) as i32).unwrap();
    rustix::process::kill_process(guardian, rustix::process::Signal::KILL).unwrap();
    send.kill();
    receiving.finish();
    let status = |scene: &Scene| {
        Qmp::connect(&scene.here.qmp).unwrap().execute("query-status", json!({})).unwrap()
    };
    // No vmferry process is left to resume it. But QEMU may resume it if its own migration breaks.
    if way == Way::Attached {
        assert_eq!(status(&scene)["running"], false);
    }
    let (mut there, mut receiving, address) = scene.receive_tls();
    let mut send = scene.send_tls(&address);
    send.event("finishing-session");
    send.finish().exited(0);
    receiving.event("received");
    scene.here.child.wait().unwrap();
    there.check_guest();
}

pub fn receiver_or_its_qemu_killed_in_any_phase_leaves_the_guest_running(way: Way) {
    for version in versions() {
        let mut scene = Scene::new(*version, way);
        for (name, moment) in moments() {
            println!("{version:?}: the receiver at {name}");
            let (mut there, mut receiving, send) = scene.migrate_until(moment);
            receiving.kill();
            let sent = send.finish();
            assert_eq!(sent.code, Some(12), "{name}: {sent:?}");
            scene.runs_on_here();
            scene.note(&mut there, "the receiver: SIGKILL", name, (&sent, "killed"), Owner::Source);

            println!("{version:?}: its QEMU at {name}");
            let (mut there, receiving, send) = scene.migrate_until(moment);
            there.child.kill().unwrap();
            let sent = send.finish();
            assert_ne!(sent.code, Some(0), "{name}: {sent:?}");
            let received = receiving.finish();
            assert_ne!(received.code, Some(0), "{name}: {received:?}");
            scene.runs_on_here();
            scene.note(
                &mut there,
                "the destination's QEMU: SIGKILL",
                name,
                (&sent, &received),
                Owner::Source,
            );
        }
        scene.arrives();
    }
}

pub fn source_qemu_killed_in_any_phase_never_runs_half_a_guest(way: Way) {
    for (name, moment) in moments() {
        println!("{name}");
        let mut scene = Scene::new(Version::V10_0, way);
        let (mut there, mut receiving, send) = scene.migrate_until(moment);
        scene.here.child.kill().unwrap();
        let sent = send.finish();
        // If it is killed after its state was sent, it was no longer needed.
        if sent.lines.iter().any(|event| event["event"] == "committed") {
            receiving.event("received");
            there.check_guest();
            scene.note(
                &mut there,
                "the source's QEMU: SIGKILL",
                name,
                (&sent, "has the guest"),
                Owner::Destination,
            );
        } else {
            assert_ne!(sent.code, Some(0), "{name}: {sent:?}");
            let received = receiving.finish();
            assert_ne!(received.code, Some(0), "{name}: {received:?}");
            scene.note(
                &mut there,
                "the source's QEMU: SIGKILL",
                name,
                (&sent, &received),
                Owner::Crashed,
            );
        }
    }
}

pub fn link_cut_in_any_phase_leaves_the_guest_running(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    for (name, moment) in moments() {
        let (mut there, receiving, address) = scene.receive_plain();
        let proxy = Proxy::before(&address);
        let mut send = scene.send(&proxy.address, &["--plain", "--reconnect-timeout", "1s"]);
        send.event_where(moment);
        proxy.cut();
        let sent = send.finish();
        assert_eq!(sent.code, Some(12), "{name}: {sent:?}");
        let received = receiving.finish();
        assert_eq!(received.code, Some(12), "{name}: {received:?}");
        scene.runs_on_here();
        scene.note(&mut there, "the link: cut for good", name, (&sent, &received), Owner::Source);
    }
    scene.arrives();
}

pub fn guest_runs_on_after_the_operator_cancels(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    for (name, moment) in moments() {
        let (mut there, receiving, send) = scene.migrate_until(moment);
        let status = scene.a.status("tested");
        assert_eq!(status["guest"], "qemu", "{status}");
        run_ok(&scene.a, &["cancel", "tested"]);
        let sent = send.finish();
        assert_eq!(sent.code, Some(11), "{name}: {sent:?}");
        let received = receiving.finish();
        assert_eq!(received.code, Some(11), "{name}: {received:?}");
        scene.runs_on_here();
        scene.note(&mut there, "cancelled", name, (&sent, &received), Owner::Source);
    }
    scene.arrives();
}

pub fn lost_commit_is_resolved_when_the_link_returns(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, mut receiving, send, proxy) = in_doubt(&mut scene);
    proxy.heal();
    receiving.event("received");
    let sent = send.finish().exited(0);
    assert!(scene.here.child.wait().unwrap().success());
    there.check_guest();
    scene.note(
        &mut there,
        "the link: cut and back",
        "committed",
        (&sent, "has the guest"),
        Owner::Destination,
    );
}

/// A guardian never sends COMMIT: the destination, which has not run the guest, gives it back.
pub fn lost_commit_is_resolved_by_the_guardian(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, receiving, mut send, proxy) = in_doubt(&mut scene);
    send.kill();
    // A guardian in doubt must not resume the guest.
    guardian_is_in_doubt(&scene.a);
    proxy.heal();
    let received = receiving.finish();
    assert_ne!(received.code, Some(0), "{received:?}");
    scene.runs_on_here();
    let fault = "the link: cut and back, the sender: SIGKILL";
    scene.note(&mut there, fault, "committed", ("killed", &received), Owner::Source);
    scene.arrives();
}

pub fn lost_commit_is_resolved_by_the_operator(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, mut receiving, mut send, _proxy) = in_doubt(&mut scene);
    send.kill();
    receiving.kill();
    there.child.kill().unwrap();
    guardian_is_in_doubt(&scene.a);
    run_ok(&scene.a, &["resolve", "tested", "--source-resumes", "--yes"]);
    scene.runs_on_here();
    let fault = "the link: cut, sender, receiver and its QEMU: SIGKILL, resolved by the operator";
    scene.note(&mut there, fault, "committed", ("killed", "killed"), Owner::Source);
    scene.arrives();
}
