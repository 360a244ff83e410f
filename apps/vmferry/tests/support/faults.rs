//! Faults of a QEMU guest's migration and their expected outcomes, for both ways to move it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Qemu, Version};

use super::outcomes::{Outcome, Owner};
use super::proxy::Proxy;
use super::scene::{Scene, Way};
use super::stops::guardian;
use super::trial::claim;
use super::{BEFORE_COMMIT, Ended, Host, Moment, Running, all, run_ok};

/// All versions in the full matrix, one otherwise.
fn versions() -> &'static [Version] {
    if all() { &Version::ALL } else { &Version::ALL[1..] }
}

/// All phases in the full matrix, the last and most critical one otherwise.
fn moments() -> &'static [Moment] {
    if all() { &BEFORE_COMMIT } else { &BEFORE_COMMIT[3..] }
}

/// Checks by both QEMUs and by the journals of both hosts which host has the guest, and notes the
/// outcome. The guest itself was checked before.
pub fn note(
    scene: &mut Scene,
    there: &mut Qemu,
    fault: &str,
    phase: &str,
    ends: (String, String),
    owner: Owner,
) {
    let about = format!("{fault}, {phase}: {owner:?}");
    let runs = (runs(&mut scene.here), runs(there));
    assert_ne!(runs, (true, true), "TWO GUESTS: {about}");
    assert_eq!(runs, (owner == Owner::Source, owner == Owner::Destination), "{about}");
    let (here, there) = (claim(&scene.a).has, claim(&scene.b).has);
    assert!(!(here && there), "TWO OWNERS by the journals: {about}");
    let (source, destination) = ends;
    Outcome { guest: scene.kind(), fault, phase, source, destination, owner }.note();
}

/// Whether a QEMU is reachable and runs its guest.
fn runs(qemu: &mut Qemu) -> bool {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if qemu.child.try_wait().unwrap().is_some() {
            return false;
        }
        // The cleanup releases the QMP socket last, and an ending QEMU does not answer.
        let asked =
            Qmp::connect(&qemu.qmp).and_then(|mut qmp| qmp.execute("query-status", json!({})));
        match asked {
            Ok(status) => return status["running"] == true,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    }
}

/// How a command ended, for the table.
pub fn exit(ended: &Ended) -> String {
    ended.code.map_or_else(|| "killed".to_owned(), |code| format!("exit {code}"))
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
            let (mut there, receiving, address) = scene.receive_tls();
            let mut send = scene.send_tls(&address);
            send.event_where(moment);
            send.kill();
            let received = receiving.finish();
            assert_eq!(received.code, Some(12), "{name}: {received:?}");
            scene.runs_on_here();
            let ends = ("killed".into(), exit(&received));
            note(&mut scene, &mut there, "the sender: SIGKILL", name, ends, Owner::Source);
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
    let sent = send.finish();
    assert_eq!(sent.code, Some(0), "{sent:?}");
    receiving.event("received");
    scene.here.child.wait().unwrap();
    there.check_guest();
}

pub fn receiver_or_its_qemu_killed_in_any_phase_leaves_the_guest_running(way: Way) {
    for version in versions() {
        let mut scene = Scene::new(*version, way);
        for (name, moment) in moments() {
            println!("{version:?}: the receiver at {name}");
            let (mut there, mut receiving, address) = scene.receive_tls();
            let mut send = scene.send_tls(&address);
            send.event_where(moment);
            receiving.kill();
            let sent = send.finish();
            assert_eq!(sent.code, Some(12), "{name}: {sent:?}");
            scene.runs_on_here();
            let ends = (exit(&sent), "killed".into());
            note(&mut scene, &mut there, "the receiver: SIGKILL", name, ends, Owner::Source);

            println!("{version:?}: its QEMU at {name}");
            let (mut there, receiving, address) = scene.receive_tls();
            let mut send = scene.send_tls(&address);
            send.event_where(moment);
            there.child.kill().unwrap();
            let sent = send.finish();
            assert_ne!(sent.code, Some(0), "{name}: {sent:?}");
            let received = receiving.finish();
            assert_ne!(received.code, Some(0), "{name}: {received:?}");
            scene.runs_on_here();
            let ends = (exit(&sent), exit(&received));
            note(
                &mut scene,
                &mut there,
                "the destination's QEMU: SIGKILL",
                name,
                ends,
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
        let (mut there, mut receiving, address) = scene.receive_tls();
        let mut send = scene.send_tls(&address);
        send.event_where(moment);
        scene.here.child.kill().unwrap();
        let sent = send.finish();
        // If it is killed after its state was sent, it was no longer needed.
        if sent.lines.iter().any(|event| event["event"] == "committed") {
            receiving.event("received");
            there.check_guest();
            let ends = (exit(&sent), "has the guest".into());
            note(
                &mut scene,
                &mut there,
                "the source's QEMU: SIGKILL",
                name,
                ends,
                Owner::Destination,
            );
        } else {
            assert_ne!(sent.code, Some(0), "{name}: {sent:?}");
            let received = receiving.finish();
            assert_ne!(received.code, Some(0), "{name}: {received:?}");
            let ends = (exit(&sent), exit(&received));
            note(&mut scene, &mut there, "the source's QEMU: SIGKILL", name, ends, Owner::Crashed);
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
        let ends = (exit(&sent), exit(&received));
        note(&mut scene, &mut there, "the link: cut for good", name, ends, Owner::Source);
    }
    scene.arrives();
}

pub fn guest_runs_on_after_the_operator_cancels(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    for (name, moment) in moments() {
        let (mut there, receiving, address) = scene.receive_tls();
        let mut send = scene.send_tls(&address);
        send.event_where(moment);
        let status = scene.a.status("tested");
        assert_eq!(status["guest"], "qemu", "{status}");
        run_ok(&scene.a, &["cancel", "tested"]);
        let sent = send.finish();
        assert_eq!(sent.code, Some(11), "{name}: {sent:?}");
        let received = receiving.finish();
        assert_eq!(received.code, Some(11), "{name}: {received:?}");
        scene.runs_on_here();
        note(
            &mut scene,
            &mut there,
            "cancelled",
            name,
            (exit(&sent), exit(&received)),
            Owner::Source,
        );
    }
    scene.arrives();
}

pub fn lost_commit_is_resolved_when_the_link_returns(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, mut receiving, send, proxy) = in_doubt(&mut scene);
    proxy.heal();
    receiving.event("received");
    let sent = send.finish();
    assert_eq!(sent.code, Some(0), "{sent:?}");
    assert!(scene.here.child.wait().unwrap().success());
    there.check_guest();
    let ends = (exit(&sent), "has the guest".into());
    note(&mut scene, &mut there, "the link: cut and back", "committed", ends, Owner::Destination);
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
    let ends = ("killed".into(), exit(&received));
    let fault = "the link: cut and back, the sender: SIGKILL";
    note(&mut scene, &mut there, fault, "committed", ends, Owner::Source);
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
    let ends = ("killed".into(), "killed".into());
    let fault = "the link: cut, sender, receiver and its QEMU: SIGKILL, resolved by the operator";
    note(&mut scene, &mut there, fault, "committed", ends, Owner::Source);
    scene.arrives();
}
