//! The output of a QEMU that vmferry has started: both sides' errors quote it, it is printed at
//! once while that QEMU lives, and QEMU never blocks on a reader.

use std::fs::{File, read_to_string};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Backend, Machine, Version};

use crate::sandbox::child;
use crate::support::scene::{Scene, Way};
use crate::support::stops::Stopped;
use crate::support::{Host, Running, World, all, in_parallel};

/// Bounds the time of a line through the relay: reaching it is a failure.
const PATIENCE: Duration = Duration::from_secs(30);

/// A guest on KVM whose machine has a virtio-rng with this number of vectors. No description names
/// the vectors, but QEMU's state has them.
fn with_vectors(version: Version, way: Way, vectors: u32) -> Machine {
    let backend = match way {
        Way::Attached => Backend::File,
        Way::Carried => Backend::Private,
    };
    let machine = Machine::on_kvm(version, "freed=40 hot=8,rate=40000");
    let device = format!("virtio-rng-pci,vectors={vectors}");
    Machine { backend, ..machine }.with(&["-device", &device])
}

/// A receiver whose standard error goes into this file.
fn receive(host: &Host, arguments: &[&str], errors: &Path) -> (Running, String) {
    let mut command = host.command(&[&["receive"], arguments].concat());
    command.stderr(File::options().create(true).append(true).open(errors).unwrap());
    let mut running = Host::spawn(command);
    let address = running.event("listening")["address"].as_str().unwrap().to_owned();
    (running, address)
}

#[test]
fn qemu_output_of_a_failed_load_is_in_the_errors_of_both_sides() {
    let versions = if all() { &Version::ALL[..] } else { &Version::ALL[1..] };
    let ways = [Way::Attached, Way::Carried];
    let cases = versions.iter().flat_map(|&version| ways.map(|way| (version, way))).collect();
    in_parallel(cases, |(version, way): (Version, Way)| {
        let mut scene = Scene::of(with_vectors(version, way, 2), way);
        let same = std::mem::replace(&mut scene.machine, with_vectors(version, way, 4));
        let command = scene.command("started");
        scene.machine = same;
        let errors = scene.world.path("errors");
        let tls = scene.world.tls();
        let arguments = ["--listen", "127.0.0.1:0", "--tls", &tls, "--exec", &command];
        let (mut receiving, address) = receive(&scene.b, &arguments, &errors);
        let reason = "Failed to load virtio-rng:virtio";
        // The next QEMU has output of its own.
        for _ in 0..2 {
            let sent = scene.send_tls(&address).finish();
            let failed = receiving.event("attempt-failed");
            let why = failed["reason"].as_str().unwrap();
            assert!(why.contains("QEMU has printed: ") && why.contains(reason), "{why}");
            println!("{version:?} {way:?}: {why}\n{}", sent.last()["error"]["message"]);
            sent.failed(1, "the VMM could not load the guest's state: QEMU has printed: ");
            sent.failed(1, reason);
            assert!(read_to_string(&errors).unwrap().contains(reason));
            scene.runs_on_here();
        }
    });
}

/// A guest that has arrived in a QEMU of `--exec`.
struct Received {
    receiving: Running,
    starter: u32,
    qemu: u32,
    monitor: Qmp,
    /// The output of the receiver and its starter.
    errors: PathBuf,
}

impl Received {
    fn new(scene: &Scene) -> Self {
        let errors = scene.world.path("errors");
        let command = scene.command("started");
        let arguments = ["--listen", "tcp:127.0.0.1:0", "--plain", "--exec", &command];
        let (mut receiving, address) = receive(&scene.b, &arguments, &errors);
        scene.send(&address, &["--plain"]).finish().exited(0);
        let qmp = PathBuf::from(receiving.event("received")["qmp"].as_str().unwrap());
        let starter = child(receiving.child.id());
        let monitor = Qmp::connect(&qmp).unwrap();
        Self { receiving, starter, qemu: child(starter), monitor, errors }
    }

    /// Makes QEMU print a line for each command from now on.
    fn chatter(&mut self) {
        let every = json!({ "name": "handle_qmp_command", "enable": true });
        self.monitor.execute("trace-event-set-state", every).unwrap();
    }

    /// Sends commands that together make QEMU print more than a pipe holds.
    fn give_many_orders(&mut self) {
        for _ in 0..4000 {
            let status = self.monitor.execute("query-status", json!({})).unwrap();
            assert_eq!(status["running"], true);
        }
    }

    fn printed(&self) -> String {
        read_to_string(&self.errors).unwrap()
    }

    /// Waits for a line with this word. Lines are lost while the pipe is full, so the test makes
    /// QEMU print it again.
    fn prints(&mut self, word: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.printed().contains(word) {
            assert!(Instant::now() < deadline, "{word} is never printed");
            self.monitor.human(&format!("info {word}")).unwrap();
            // A growing file notifies no reader.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        // QEMU outlives all other processes, and may have ended by itself.
        let _ = kill_process(Pid::from_raw(self.qemu as i32).unwrap(), Signal::KILL);
    }
}

#[test]
fn qemu_output_is_printed_after_the_receiver_ended() {
    let scene = Scene::new(Version::V10_0, Way::Attached);
    let mut received = Received::new(&scene);
    received.chatter();
    received.prints("first-word");
    received.receiving.kill();
    received.prints("second-word");
    received.monitor.quit().unwrap();
    // Neither is a child of this process, so the test waits for them by number.
    let _ = vmferry_qemu::wait_for_end(received.starter);
    let _ = vmferry_qemu::wait_for_end(received.qemu);
}

#[test]
fn qemu_continues_when_nobody_reads_its_output() {
    let scene = Scene::new(Version::V10_0, Way::Attached);
    let mut received = Received::new(&scene);
    received.chatter();
    let stopped = Stopped::now(received.starter);
    received.give_many_orders();
    stopped.wake();
    received.prints("after-the-flood");
    let starter = Pid::from_raw(received.starter as i32).unwrap();
    kill_process(starter, Signal::KILL).unwrap();
    let _ = vmferry_qemu::wait_for_end(received.starter);
    received.give_many_orders();
}

#[test]
fn qemu_output_at_its_failure_is_in_the_receivers_error() {
    let scene = Scene::new(Version::V10_0, Way::Attached);
    let mut received = Received::new(&scene);
    received.chatter();
    received.prints("last-word");
    kill_process(Pid::from_raw(received.qemu as i32).unwrap(), Signal::KILL).unwrap();
    let ended = received.receiving.finish_by_ref();
    ended.failed(1, "the guest's QEMU has ended: signal: 9");
    ended.failed(1, "QEMU has printed: ");
    ended.failed(1, "last-word");
}

#[test]
fn qemu_output_of_a_failed_start_is_in_the_receivers_error() {
    let world = World::without_certificates();
    let command = "sh -c 'echo a wrong option >&2; exit 3' --";
    let arguments = ["receive", "--listen", "tcp:127.0.0.1:0", "--plain", "--exec", command];
    let ended = world.host("b").run(&arguments);
    ended.failed(1, "QEMU has ended (exit status: 3): QEMU has printed: a wrong option");
}
