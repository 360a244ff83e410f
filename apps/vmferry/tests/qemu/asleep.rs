//! `send --qemu` and `receive --qemu` whose processes, or whose QEMUs, are stopped (`SIGSTOP`) in each phase, and woken
//! before and after the others have given up: never two guests, in the end one, and nothing left behind.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use crate::support::faults::{exit, guardian_answers, note};
use crate::support::outcomes::Owner;
use crate::support::scene::{Scene, Way};
use crate::support::stops::{Stopped, Who, guardian};
use crate::support::traces::nothing_is_left;
use crate::support::{BEFORE_COMMIT, Moment, all, faults, in_parallel, text};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::Version;

/// A stop that nobody gives up for: what is silent for 10 s is lost.
const SHORT: Duration = Duration::from_secs(3);

const WAYS: [Way; 2] = [Way::Carried, Way::Attached];

/// Stops somebody in each of these phases, for a while.
fn woken_in_time(way: Way, who: Who, moments: &[Moment]) {
    let mut scene = Scene::new(Version::V10_0, way);
    for (phase, moment) in moments {
        println!("{way:?}: {} sleeps, {phase}", who.name());
        let (mut there, mut receiving, address) = scene.receive_tls();
        let mut send = scene.send_tls(&address);
        send.event_where(moment);
        let stopped = Stopped::now(who.pid(&scene, &there, &send, &receiving));
        // This is the fault, and not a wait for anything.
        std::thread::sleep(SHORT);
        stopped.wake();
        let sent = send.finish();
        assert_eq!(sent.code, Some(0), "{way:?} {who:?} {phase}: {sent:?}");
        receiving.event("received");
        assert!(scene.here.child.wait().unwrap().success());
        drop(receiving);
        let fault = format!("{}: SIGSTOP for 3 s", who.name());
        let ends = (exit(&sent), "has the guest".into());
        note(&mut scene, &mut there, &fault, phase, ends, Owner::Destination);
        scene.moved_to(there);
        nothing_is_left(&[&scene.a, &scene.b], &[&scene.here]);
    }
}

#[test]
fn woken_in_time_nobody_gives_up() {
    let mut cases: Vec<(Way, Who, Vec<Moment>)> = Vec::new();
    if all() {
        for way in WAYS {
            cases.extend(Who::ALL.map(|who| (way, who, BEFORE_COMMIT.to_vec())));
        }
    } else {
        cases.push((Way::Attached, Who::SourceQemu, vec![BEFORE_COMMIT[3]]));
    }
    in_parallel(cases, |(way, who, moments)| woken_in_time(way, who, &moments));
}

/// The destination gives up, and the sender wakes to find that out.
fn the_sender_sleeps(way: Way, (phase, moment): Moment) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, receiving, address) = scene.receive_tls();
    let mut send = scene.send_tls(&address);
    send.event_where(moment);
    let stopped = Stopped::now(send.child.id());
    let received = receiving.finish();
    assert_eq!(received.code, Some(12), "{phase}: {received:?}");
    assert!(stopped.is_still());
    stopped.wake();
    let sent = send.finish();
    assert_eq!(sent.code, Some(12), "{phase}: {sent:?}");
    scene.runs_on_here();
    let fault = "the sender: SIGSTOP, woken late";
    note(&mut scene, &mut there, fault, phase, (exit(&sent), exit(&received)), Owner::Source);
    scene.arrives();
}

/// The source gives up, and the receiver wakes to find that out.
fn the_receiver_sleeps(way: Way, (phase, moment): Moment) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, receiving, address) = scene.receive_tls();
    let mut send = scene.send_tls(&address);
    send.event_where(moment);
    let stopped = Stopped::now(receiving.child.id());
    let sent = send.finish();
    assert_eq!(sent.code, Some(12), "{phase}: {sent:?}");
    scene.runs_on_here();
    assert!(stopped.is_still());
    stopped.wake();
    let received = receiving.finish();
    assert_ne!(received.code, Some(0), "{phase}: {received:?}");
    nothing_is_left(&[&scene.b], &[]);
    let fault = "the receiver: SIGSTOP, woken late";
    note(&mut scene, &mut there, fault, phase, (exit(&sent), exit(&received)), Owner::Source);
    scene.arrives();
}

/// The sender gives up and says why, and its guardian stays until QEMU wakes.
fn the_source_s_qemu_sleeps(way: Way, (phase, moment): Moment) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, receiving, address) = scene.receive_tls();
    let mut send = scene.send_tls(&address);
    send.event_where(moment);
    let stopped = Stopped::now(scene.here.child.id());
    let sent = send.finish();
    let why = sent.last()["error"]["message"].as_str().unwrap_or_default();
    assert!(why.contains("is stopped"), "{phase}: {sent:?}");
    let received = receiving.finish();
    assert_ne!(received.code, Some(0), "{phase}: {received:?}");
    // Nobody has woken it, and somebody answers for it.
    assert!(stopped.is_still());
    guardian_answers(&scene.a);
    stopped.wake();
    nothing_is_left(&[&scene.a], &[&scene.here]);
    scene.runs_on_here();
    let fault = "the source's QEMU: SIGSTOP, woken late";
    note(&mut scene, &mut there, fault, phase, (exit(&sent), exit(&received)), Owner::Source);
    scene.arrives();
}

fn the_destination_s_qemu_sleeps(way: Way, (phase, moment): Moment) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, receiving, address) = scene.receive_tls();
    let mut send = scene.send_tls(&address);
    send.event_where(moment);
    let stopped = Stopped::now(there.child.id());
    let sent = send.finish();
    assert_ne!(sent.code, Some(0), "{phase}: {sent:?}");
    scene.runs_on_here();
    let received = receiving.finish();
    assert_ne!(received.code, Some(0), "{phase}: {received:?}");
    assert!(stopped.is_still());
    stopped.wake();
    nothing_is_left(&[&scene.b], &[]);
    let fault = "the destination's QEMU: SIGSTOP, woken late";
    note(&mut scene, &mut there, fault, phase, (exit(&sent), exit(&received)), Owner::Source);
    scene.arrives();
}

/// The guest is the destination's, and its QEMU does not start it: the word is given, and the guest is started when that
/// QEMU wakes.
fn promised_to_a_qemu_that_sleeps(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, mut receiving, send, proxy) = faults::in_doubt(&mut scene);
    let stopped = Stopped::now(there.child.id());
    proxy.heal();
    let said = receiving.event("not-started");
    assert!(said["reason"].as_str().unwrap().contains("is stopped"), "{said}");
    let sent = send.finish();
    assert_eq!(sent.code, Some(0), "{sent:?}");
    assert!(scene.here.child.wait().unwrap().success());
    stopped.wake();
    receiving.event("received");
    there.check_guest();
    nothing_is_left(&[&scene.a], &[]);
    let fault = "the destination's QEMU: SIGSTOP, woken late";
    let ends = (exit(&sent), "has the guest".into());
    note(&mut scene, &mut there, fault, "committed", ends, Owner::Destination);
}

/// The guest is the destination's, and the QEMU that it has left can't be ended: the guardian does that when it wakes.
fn given_away_by_a_qemu_that_sleeps(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, mut receiving, send, proxy) = faults::in_doubt(&mut scene);
    let stopped = Stopped::now(scene.here.child.id());
    proxy.heal();
    receiving.event("received");
    there.check_guest();
    let sent = send.finish();
    assert_eq!(sent.code, Some(0), "{sent:?}");
    assert!(stopped.is_still());
    stopped.wake();
    assert!(scene.here.child.wait().unwrap().success(), "it was ended in order");
    nothing_is_left(&[&scene.a], &[]);
    if way == Way::Attached {
        let file = scene.lab.path_on_tmpfs("here-ram");
        assert_eq!(std::fs::metadata(&file).unwrap().blocks(), 0, "its memory was given back");
    }
    let fault = "the source's QEMU: SIGSTOP, woken late";
    let ends = (exit(&sent), "has the guest".into());
    note(&mut scene, &mut there, fault, "committed", ends, Owner::Destination);
}

#[test]
fn woken_late_the_guest_is_where_it_was_promised() {
    let [connected, _, second, _] = BEFORE_COMMIT;
    type Case = (Way, fn(Way, Moment), Moment);
    let mut cases: Vec<Case> = Vec::new();
    if all() {
        for way in WAYS {
            for moment in BEFORE_COMMIT.into_iter().rev() {
                cases.push((way, the_source_s_qemu_sleeps, moment));
                cases.push((way, the_destination_s_qemu_sleeps, moment));
                cases.push((way, the_sender_sleeps, moment));
                cases.push((way, the_receiver_sleeps, moment));
            }
            cases.push((way, |way, _| promised_to_a_qemu_that_sleeps(way), connected));
            cases.push((way, |way, _| given_away_by_a_qemu_that_sleeps(way), connected));
        }
    } else {
        cases.push((Way::Attached, the_source_s_qemu_sleeps, second));
        cases.push((Way::Attached, |way, _| promised_to_a_qemu_that_sleeps(way), connected));
        cases.push((Way::Attached, |way, _| given_away_by_a_qemu_that_sleeps(way), connected));
    }
    in_parallel(cases, |(way, case, moment)| case(way, moment));
}

/// A guardian that was stopped when its sender was killed, and is woken when the guest was sent again and lives elsewhere:
/// the QEMU that it once was to let run on holds a guest of the past.
fn a_guardian_wakes_too_late(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (_gone, receiving, address) = scene.receive_tls();
    let mut send = scene.send_tls(&address);
    send.event_where(BEFORE_COMMIT[3].1);
    // Of a stopped process whose parent dies the kernel wakes the group, unless somebody of its session is the next parent.
    rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(1)).unwrap();
    let stopped = Stopped::now(guardian(&send));
    send.kill();
    assert!(stopped.is_still());
    receiving.finish();
    let (mut there, mut receiving, address) = scene.receive_tls();
    let tls = scene.world.tls();
    let again = scene.arguments(&address, &["--tls", &tls, "--keep-source"], "100M");
    let sent = scene.a.run(&again);
    assert_eq!(sent.code, Some(0), "{sent:?}");
    receiving.event("received");
    there.check_guest();
    assert!(stopped.is_still());
    stopped.wake();
    nothing_is_left(&[&scene.a], &[&scene.here]);
    there.check_guest();
    let fault = "the sender: SIGKILL, its guardian: SIGSTOP, woken after the next migration";
    let ends = (exit(&sent), "has the guest".into());
    note(&mut scene, &mut there, fault, "paused", ends, Owner::Destination);
}

/// A guardian that never wakes holds nobody up, and is not left behind.
fn a_guardian_sleeps_for_good(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, mut receiving, address) = scene.receive_tls();
    let mut send = scene.send_tls(&address);
    send.event_where(BEFORE_COMMIT[1].1);
    let _stopped = Stopped::now(guardian(&send));
    let sent = send.finish();
    assert_eq!(sent.code, Some(0), "{sent:?}");
    receiving.event("received");
    assert!(scene.here.child.wait().unwrap().success());
    let ends = (exit(&sent), "has the guest".into());
    let fault = "the guardian: SIGSTOP for good";
    note(&mut scene, &mut there, fault, "first round", ends, Owner::Destination);
    scene.moved_to(there);
    nothing_is_left(&[&scene.a], &[&scene.here]);
}

#[test]
fn guardians_that_sleep() {
    let mut cases: Vec<(Way, fn(Way))> = vec![(Way::Attached, a_guardian_wakes_too_late)];
    if all() {
        cases.push((Way::Carried, a_guardian_sleeps_for_good));
        cases.push((Way::Carried, a_guardian_wakes_too_late));
        cases.push((Way::Attached, a_guardian_sleeps_for_good));
    }
    in_parallel(cases, |(way, case)| case(way));
}

/// A sender in doubt asks again when it wakes, and what the destination has decided meanwhile holds.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the long matrix: make test-all")]
fn a_sender_in_doubt_sleeps() {
    in_parallel(WAYS.to_vec(), |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        let (mut there, mut receiving, send, proxy) = faults::in_doubt(&mut scene);
        let stopped = Stopped::now(send.child.id());
        proxy.heal();
        // This is the fault, and not a wait for anything.
        std::thread::sleep(SHORT);
        stopped.wake();
        receiving.event("received");
        let sent = send.finish();
        assert_eq!(sent.code, Some(0), "{sent:?}");
        assert!(scene.here.child.wait().unwrap().success());
        there.check_guest();
        nothing_is_left(&[&scene.a], &[]);
        let ends = (exit(&sent), "has the guest".into());
        note(
            &mut scene,
            &mut there,
            "the sender: SIGSTOP for 3 s",
            "in doubt",
            ends,
            Owner::Destination,
        );

        // So long that the destination has written ABORTED.
        let mut scene = Scene::new(Version::V10_0, way);
        let (mut there, receiving, send, proxy) = faults::in_doubt(&mut scene);
        let stopped = Stopped::now(send.child.id());
        proxy.heal();
        let received = receiving.finish();
        assert_ne!(received.code, Some(0), "{received:?}");
        let target = proxy.target();
        let _successor = scene.b.receive(&["--listen", &target, "--plain"]);
        stopped.wake();
        let sent = send.finish();
        assert_eq!(sent.code, Some(1), "{sent:?}");
        scene.runs_on_here();
        let ends = (exit(&sent), exit(&received));
        note(
            &mut scene,
            &mut there,
            "the sender: SIGSTOP, woken late",
            "in doubt",
            ends,
            Owner::Source,
        );
    });
}

/// A send to a QEMU that is stopped, or whose monitor somebody else holds, ends in bounded time and says which it is.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the long matrix: make test-all")]
fn a_qemu_that_does_not_answer_is_named() {
    let scene = Scene::new(Version::V10_0, Way::Attached);
    let pid = scene.here.child.id();
    let send = ["send", "--qemu", text(&scene.here.qmp), "--to", "tcp:127.0.0.1:1", "--plain"];
    let stopped = Stopped::now(pid);
    scene.a.run(&send).failed(9, &format!("it is stopped, and goes on with `kill -CONT {pid}`"));
    stopped.wake();
    let held = Qmp::connect(&scene.here.qmp).unwrap();
    scene.a.run(&send).failed(7, &format!("process {} (", std::process::id()));
    drop(held);
    scene.is_clean();
}
