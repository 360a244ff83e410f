//! `send --qemu` and `receive --qemu` whose processes or QEMUs are stopped (`SIGSTOP`) in each
//! phase and continued before or after the other side has given up. There are never two guests,
//! there is one in the end, and nothing is left over.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use crate::support::faults::guardian_answers;
use crate::support::outcomes::Owner;
use crate::support::scene::{Scene, Way};
use crate::support::stops::{Stopped, Who, guardian};
use crate::support::traces::nothing_is_left;
use crate::support::{BEFORE_COMMIT, Moment, all, faults, in_parallel, text};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::Version;

/// A stop short enough that no side gives up: a connection counts as lost after 10 s of silence.
const SHORT: Duration = Duration::from_secs(3);

const WAYS: [Way; 2] = [Way::Carried, Way::Attached];

/// Stops one process in each of these phases for a short time.
fn woken_in_time(way: Way, who: Who, moments: &[Moment]) {
    let mut scene = Scene::new(Version::V10_0, way);
    for (phase, moment) in moments {
        println!("{way:?}: {} sleeps, {phase}", who.name());
        let (mut there, mut receiving, send) = scene.migrate_until(moment);
        let stopped = Stopped::now(who.pid(&scene, &there, &send, &receiving));
        // The pause is the fault itself and does not wait for an event.
        std::thread::sleep(SHORT);
        stopped.wake();
        let sent = send.finish();
        assert_eq!(sent.code, Some(0), "{way:?} {who:?} {phase}: {sent:?}");
        receiving.event("received");
        assert!(scene.here.child.wait().unwrap().success());
        drop(receiving);
        let fault = format!("{}: SIGSTOP for 3 s", who.name());
        scene.note(&mut there, &fault, phase, (&sent, "has the guest"), Owner::Destination);
        scene.moved_to(there);
        nothing_is_left(&[&scene.a, &scene.b], &[&scene.here]);
    }
}

#[test]
fn migration_survives_a_process_that_is_stopped_briefly() {
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

/// The destination gives up, and the sender notices when it is continued.
fn the_sender_sleeps(way: Way, (phase, moment): Moment) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, receiving, send) = scene.migrate_until(moment);
    let stopped = Stopped::now(send.child.id());
    let received = receiving.finish();
    assert_eq!(received.code, Some(12), "{phase}: {received:?}");
    assert!(stopped.is_still());
    stopped.wake();
    let sent = send.finish();
    assert_eq!(sent.code, Some(12), "{phase}: {sent:?}");
    scene.runs_on_here();
    let fault = "the sender: SIGSTOP, woken late";
    scene.note(&mut there, fault, phase, (&sent, &received), Owner::Source);
    scene.arrives();
}

/// The source gives up, and the receiver is continued afterward.
fn the_receiver_sleeps(way: Way, (phase, moment): Moment) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, receiving, send) = scene.migrate_until(moment);
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
    scene.note(&mut there, fault, phase, (&sent, &received), Owner::Source);
    scene.arrives();
}

/// The sender gives up and says why, and its guardian stays until QEMU is continued.
fn the_source_s_qemu_sleeps(way: Way, (phase, moment): Moment) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, receiving, send) = scene.migrate_until(moment);
    let stopped = Stopped::now(scene.here.child.id());
    let sent = send.finish();
    let why = sent.last()["error"]["message"].as_str().unwrap_or_default();
    assert!(why.contains("is stopped"), "{phase}: {sent:?}");
    let received = receiving.finish();
    assert_ne!(received.code, Some(0), "{phase}: {received:?}");
    // QEMU is still stopped, and the guardian answers for it.
    assert!(stopped.is_still());
    guardian_answers(&scene.a);
    stopped.wake();
    nothing_is_left(&[&scene.a], &[&scene.here]);
    scene.runs_on_here();
    let fault = "the source's QEMU: SIGSTOP, woken late";
    scene.note(&mut there, fault, phase, (&sent, &received), Owner::Source);
    scene.arrives();
}

fn the_destination_s_qemu_sleeps(way: Way, (phase, moment): Moment) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, receiving, send) = scene.migrate_until(moment);
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
    scene.note(&mut there, fault, phase, (&sent, &received), Owner::Source);
    scene.arrives();
}

/// The guest belongs to the destination, and its QEMU does not start it. The receiver answers, and
/// the guest starts when that QEMU is continued.
fn destination_qemu_sleeps_after_commit(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, mut receiving, send, proxy) = faults::in_doubt(&mut scene);
    let stopped = Stopped::now(there.child.id());
    proxy.heal();
    let said = receiving.event("not-started");
    assert!(said["reason"].as_str().unwrap().contains("is stopped"), "{said}");
    let sent = send.finish().exited(0);
    assert!(scene.here.child.wait().unwrap().success());
    stopped.wake();
    receiving.event("received");
    there.check_guest();
    nothing_is_left(&[&scene.a], &[]);
    let fault = "the destination's QEMU: SIGSTOP, woken late";
    scene.note(&mut there, fault, "committed", (&sent, "has the guest"), Owner::Destination);
}

/// The guest belongs to the destination, and the source's QEMU can't be ended. The guardian ends it
/// when it is continued.
fn source_qemu_sleeps_after_commit(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, mut receiving, send, proxy) = faults::in_doubt(&mut scene);
    let stopped = Stopped::now(scene.here.child.id());
    proxy.heal();
    receiving.event("received");
    there.check_guest();
    let sent = send.finish().exited(0);
    assert!(stopped.is_still());
    stopped.wake();
    assert!(scene.here.child.wait().unwrap().success(), "it exited regularly");
    nothing_is_left(&[&scene.a], &[]);
    if way == Way::Attached {
        let file = scene.lab.path_on_tmpfs("here-ram");
        assert_eq!(std::fs::metadata(&file).unwrap().blocks(), 0, "its memory was given back");
    }
    let fault = "the source's QEMU: SIGSTOP, woken late";
    scene.note(&mut there, fault, "committed", (&sent, "has the guest"), Owner::Destination);
}

#[test]
fn guest_is_on_the_promised_host_after_a_long_stop() {
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
            cases.push((way, |way, _| destination_qemu_sleeps_after_commit(way), connected));
            cases.push((way, |way, _| source_qemu_sleeps_after_commit(way), connected));
        }
    } else {
        cases.push((Way::Attached, the_source_s_qemu_sleeps, second));
        cases.push((Way::Attached, |way, _| destination_qemu_sleeps_after_commit(way), connected));
        cases.push((Way::Attached, |way, _| source_qemu_sleeps_after_commit(way), connected));
    }
    in_parallel(cases, |(way, case, moment)| case(way, moment));
}

/// A guardian is stopped when its sender is killed, and continued after the guest was sent again
/// and lives elsewhere. The QEMU that the guardian was to resume holds an outdated copy of the
/// guest.
fn a_guardian_wakes_too_late(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (_gone, receiving, mut send) = scene.migrate_until(BEFORE_COMMIT[3].1);
    // When the parent of a stopped process dies, the kernel continues its process group, unless the
    // new parent is of the same session.
    rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(1)).unwrap();
    let stopped = Stopped::now(guardian(&send));
    send.kill();
    assert!(stopped.is_still());
    receiving.finish();
    let (mut there, mut receiving, address) = scene.receive_tls();
    let tls = scene.world.tls();
    let again = scene.arguments(&address, &["--tls", &tls, "--keep-source"], "100M");
    let sent = scene.a.run(&again).exited(0);
    receiving.event("received");
    there.check_guest();
    assert!(stopped.is_still());
    stopped.wake();
    nothing_is_left(&[&scene.a], &[&scene.here]);
    there.check_guest();
    let fault = "the sender: SIGKILL, its guardian: SIGSTOP, woken after the next migration";
    scene.note(&mut there, fault, "paused", (&sent, "has the guest"), Owner::Destination);
}

/// A guardian that is never continued blocks no process and is not left over.
fn a_guardian_sleeps_for_good(way: Way) {
    let mut scene = Scene::new(Version::V10_0, way);
    let (mut there, mut receiving, send) = scene.migrate_until(BEFORE_COMMIT[1].1);
    let _stopped = Stopped::now(guardian(&send));
    let sent = send.finish().exited(0);
    receiving.event("received");
    assert!(scene.here.child.wait().unwrap().success());
    let fault = "the guardian: SIGSTOP for good";
    scene.note(&mut there, fault, "first round", (&sent, "has the guest"), Owner::Destination);
    scene.moved_to(there);
    nothing_is_left(&[&scene.a], &[&scene.here]);
}

#[test]
fn stopped_guardian_harms_no_later_migration() {
    let mut cases: Vec<(Way, fn(Way))> = vec![(Way::Attached, a_guardian_wakes_too_late)];
    if all() {
        cases.push((Way::Carried, a_guardian_sleeps_for_good));
        cases.push((Way::Carried, a_guardian_wakes_too_late));
        cases.push((Way::Attached, a_guardian_sleeps_for_good));
    }
    in_parallel(cases, |(way, case)| case(way));
}

/// A sender in doubt asks again when it is continued, and the destination's decision in the
/// meantime holds.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn sender_in_doubt_asks_again_after_a_stop() {
    in_parallel(WAYS.to_vec(), |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        let (mut there, mut receiving, send, proxy) = faults::in_doubt(&mut scene);
        let stopped = Stopped::now(send.child.id());
        proxy.heal();
        // The pause is the fault itself and does not wait for an event.
        std::thread::sleep(SHORT);
        stopped.wake();
        receiving.event("received");
        let sent = send.finish().exited(0);
        assert!(scene.here.child.wait().unwrap().success());
        there.check_guest();
        nothing_is_left(&[&scene.a], &[]);
        scene.note(
            &mut there,
            "the sender: SIGSTOP for 3 s",
            "in doubt",
            (&sent, "has the guest"),
            Owner::Destination,
        );

        // Long enough for the destination to write ABORTED.
        let mut scene = Scene::new(Version::V10_0, way);
        let (mut there, receiving, send, proxy) = faults::in_doubt(&mut scene);
        let stopped = Stopped::now(send.child.id());
        proxy.heal();
        let received = receiving.finish();
        assert_ne!(received.code, Some(0), "{received:?}");
        let target = proxy.target();
        let _successor = scene.b.receive(&["--listen", &target, "--plain"]);
        stopped.wake();
        let sent = send.finish().exited(1);
        scene.runs_on_here();
        scene.note(
            &mut there,
            "the sender: SIGSTOP, woken late",
            "in doubt",
            (&sent, &received),
            Owner::Source,
        );
    });
}

/// A send to a QEMU that is stopped, or whose monitor another process holds, ends in bounded time
/// and says which it is.
#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn unresponsive_qemu_is_named() {
    let scene = Scene::new(Version::V10_0, Way::Attached);
    let pid = scene.here.child.id();
    let send = ["send", "--qemu", text(&scene.here.qmp), "--to", "tcp:127.0.0.1:1", "--plain"];
    let stopped = Stopped::now(pid);
    scene.a.run(&send).failed(9, &format!("it is stopped: continue it with `kill -CONT {pid}`"));
    stopped.wake();
    let held = Qmp::connect(&scene.here.qmp).unwrap();
    scene.a.run(&send).failed(7, &format!("process {} (", std::process::id()));
    drop(held);
    scene.is_clean();
}
