//! Guests that outlive their receiver: the receiver is killed or terminated and started again with
//! the same command.

use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vmferry_handover::journal::{FileJournal, Journal, Record, Side, sessions};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Qemu, Version};

use crate::sandbox::child;
use crate::support::outcomes::Owner;
use crate::support::proxy::{Message, Proxy};
use crate::support::scene::{Scene, Way};
use crate::support::{Running, all, in_parallel, run_ok, text};

fn ways() -> Vec<Way> {
    if all() { vec![Way::Attached, Way::Carried] } else { vec![Way::Attached] }
}

/// A migration into a running QEMU, in which the proxy holds back this message.
fn held_at(scene: &mut Scene, message: Message) -> (Qemu, Running, Running, Proxy) {
    let (there, receiving, address) = scene.receive_plain();
    let proxy = Proxy::holding(&address, "127.0.0.1", Some(message));
    let send = scene.send(&proxy.address, &["--plain"]);
    proxy.await_held();
    (there, receiving, send, proxy)
}

/// Starts the receiver again with the same command.
fn restarted(scene: &Scene, there: &Qemu, proxy: &Proxy) -> Running {
    let address = proxy.target();
    let arguments = ["--qemu", text(&there.qmp), "--once", "--listen", &address, "--plain"];
    scene.b.receive(&arguments).0
}

/// Writes what a receiver leaves that dies after RUN-INTENT is on disk and before it sends anything
/// to its QEMU.
pub fn write_run_intent(scene: &Scene) {
    let journals = scene.b.runtime.join("journal");
    let [session] = &sessions(&journals).unwrap()[..] else { panic!("one session") };
    let (mut journal, _) =
        FileJournal::reopen(&journals, session.session, Side::Destination).unwrap();
    journal.append(&Record::RunIntent).unwrap();
}

#[test]
fn next_receiver_finishes_after_a_kill_between_run_intent_and_cont() {
    in_parallel(ways(), |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        let (mut there, mut receiving, send, proxy) = held_at(&mut scene, Message::Commit);
        receiving.kill();
        write_run_intent(&scene);
        let mut next = restarted(&scene, &there, &proxy);
        let found = next.event("found");
        assert_eq!((&found["continued"], &found["running"]), (&json!(true), &json!(true)));
        proxy.lose();
        let sent = send.finish().exited(0);
        assert!(scene.here.child.wait().unwrap().success());
        there.check_guest();
        let fault = "the receiver: SIGKILL, started again";
        scene.note(
            &mut there,
            fault,
            "RUN-INTENT written",
            (&sent, "has the guest"),
            Owner::Destination,
        );
    });
}

#[test]
fn next_receiver_answers_after_a_kill_while_running_is_in_flight() {
    in_parallel(ways(), |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        let (mut there, mut receiving, send, proxy) = held_at(&mut scene, Message::Running);
        receiving.kill();
        let mut next = restarted(&scene, &there, &proxy);
        let found = next.event("found");
        assert_eq!((&found["continued"], &found["running"]), (&json!(false), &json!(true)));
        proxy.lose();
        let sent = send.finish().exited(0);
        there.check_guest();
        let fault = "the receiver: SIGKILL, started again";
        scene.note(
            &mut there,
            fault,
            "running at the destination",
            (&sent, "has the guest"),
            Owner::Destination,
        );
        // The next receiver must not end an operator's pause.
        next.kill();
        Qmp::connect(&there.qmp).unwrap().execute("stop", json!({})).unwrap();
        let mut next = restarted(&scene, &there, &proxy);
        assert_eq!(next.event("found")["running"], false);
        assert_eq!(status(&there.qmp)["status"], "paused");
    });
}

#[test]
fn next_receiver_gives_the_guest_back_after_a_kill_at_ready() {
    in_parallel(ways(), |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        let (mut there, mut receiving, send, proxy) = held_at(&mut scene, Message::Commit);
        receiving.kill();
        let next = restarted(&scene, &there, &proxy);
        assert!(there.child.wait().unwrap().success(), "the guest can't be run by mistake");
        proxy.lose();
        let sent = send.finish().exited(1);
        scene.runs_on_here();
        next.signal(Signal::TERM);
        next.finish().failed(9, "start another QEMU");
        let fault = "the receiver: SIGKILL, started again";
        scene.note(&mut there, fault, "COMMIT on its way", (&sent, "killed"), Owner::Source);
    });
}

/// A session of one QEMU says nothing about a guest in another.
#[test]
fn guest_that_never_ran_here_is_not_sent_on() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let (there, mut receiving, send, proxy) = held_at(&mut scene, Message::Ready);
    receiving.kill();
    let sends = |qmp: &Path| {
        scene.b.run(&["send", "--qemu", text(qmp), "--to", "tcp:127.0.0.1:1", "--plain"])
    };
    sends(&there.qmp).failed(9, "never ran here: its source has it");
    assert_eq!(status(&there.qmp)["status"], "paused");
    // Nothing was promised.
    proxy.cut();
    run_ok(&scene.a, &["cancel", "tested"]);
    send.finish().exited(11);
    Qmp::connect(&scene.here.qmp).unwrap().execute("stop", json!({})).unwrap();
    let tried = sends(&scene.here.qmp);
    let said = tried.last()["error"]["message"].as_str().unwrap().to_owned();
    assert!(said.contains("127.0.0.1:1"), "nothing listens there: {said}");
    assert_eq!(status(&scene.here.qmp)["status"], "paused");
}

fn status(qmp: &Path) -> Value {
    Qmp::connect(qmp).unwrap().execute("query-status", json!({})).unwrap()
}

/// A QEMU that a receiver has started. It outlives the receiver and is ended with the test.
struct Started(Pid);

impl Started {
    fn new(pid: u32) -> Self {
        Self(Pid::from_raw(pid.try_into().unwrap()).unwrap())
    }

    fn lives(&self) -> bool {
        let stat = format!("/proc/{}/stat", self.0.as_raw_nonzero());
        let stat = std::fs::read_to_string(stat).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // A QEMU that has ended needs no signal.
        let _ = kill_process(self.0, Signal::KILL);
    }
}

/// A guest that has arrived in a QEMU of `--exec`: the receiver's command line, the receiver, the
/// QEMU, and its monitor.
fn received(scene: &Scene) -> (Vec<String>, Running, Started, PathBuf) {
    // A fixed address, at which the next process listens too.
    let link = format!("unix:{}", scene.world.path("link").display());
    let arguments = ["--listen", &link, "--exec", &scene.command("started")].map(str::to_owned);
    let arguments = arguments.to_vec();
    let mut receiving = receive(scene, &arguments);
    scene.send(&link, &[]).finish().exited(0);
    let qmp = PathBuf::from(receiving.event("received")["qmp"].as_str().unwrap());
    let pid = Qmp::connect(&qmp).unwrap().pid().unwrap();
    (arguments, receiving, Started::new(pid), qmp)
}

fn receive(scene: &Scene, arguments: &[String]) -> Running {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    scene.b.receive(&arguments).0
}

#[test]
fn exec_receiver_leaves_its_guest_to_the_next_on_sigterm() {
    in_parallel(ways(), |way| {
        let scene = Scene::new(Version::V10_0, way);
        let (arguments, receiving, qemu, qmp) = received(&scene);
        receiving.signal(Signal::TERM);
        let ended = receiving.finish().exited(0);
        assert!(ended.last()["why"].as_str().unwrap().contains("which goes on"), "{ended:?}");
        assert!(qemu.lives());
        assert_eq!(status(&qmp)["status"], "running");

        let mut next = receive(&scene, &arguments);
        let found = next.event("found");
        assert_eq!((&found["continued"], &found["running"]), (&json!(false), &json!(true)));
        assert_eq!(found["qmp"], text(&qmp), "{found}");
        // Killed, too, and with the process that started the QEMU.
        next.kill();
        assert!(qemu.lives());
        let mut next = receive(&scene, &arguments);
        next.event("found");
        // Another receiver has its own QEMU.
        let other = format!("unix:{}", scene.world.path("other").display());
        let others = ["--listen", &other, "--exec", &scene.command("other")].map(str::to_owned);
        let other = receive(&scene, &others);
        other.signal(Signal::TERM);
        other.finish().exited(11);
        // The guest ends, and so does the wait.
        Qmp::connect(&qmp).unwrap().quit().unwrap();
        next.finish().exited(0);
    });
}

#[test]
fn next_exec_receiver_finishes_after_a_kill_while_running_is_in_flight() {
    let scene = Scene::new(Version::V10_0, Way::Attached);
    let command = scene.command("started");
    let (mut receiving, address) =
        scene.b.receive(&["--listen", "tcp:127.0.0.1:0", "--plain", "--exec", &command]);
    let proxy = Proxy::holding(&address, "127.0.0.1", Some(Message::Commit));
    let send = scene.send(&proxy.address, &["--plain"]);
    proxy.await_held();
    receiving.kill();
    write_run_intent(&scene);
    let target = proxy.target();
    // A port that the system chose differs in the next command line: the guest is not found by it.
    let arguments = ["--listen", "tcp:127.0.0.1:0", "--plain", "--exec", &command];
    let (mut next, address) = scene.b.receive(&arguments);
    assert_ne!(address, target);
    let found = next.event("found");
    assert_eq!(found["continued"], true, "{found}");
    let _qemu = Started::new(found["pid"].as_u64().unwrap().try_into().unwrap());
    // It answers at another port, so the source stays in doubt.
    drop(send);
    let qmp = PathBuf::from(found["qmp"].as_str().unwrap());
    assert_eq!(status(&qmp)["running"], true);
}

#[test]
fn exec_receiver_killed_without_a_guest_leaves_no_qemu() {
    let scene = Scene::new(Version::V10_0, Way::Attached);
    let command = scene.command("started");
    let (mut receiving, _) =
        scene.b.receive(&["--listen", "tcp:127.0.0.1:0", "--plain", "--exec", &command]);
    let pid = child(child(receiving.child.id()));
    receiving.kill();
    // It is not a child of this process, so the test waits for it by its number.
    let _ = vmferry_qemu::wait_for_end(pid);
    assert!(!Started::new(pid).lives());
}
