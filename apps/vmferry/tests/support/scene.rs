//! Two hosts with a QEMU guest, for the tests of `send --qemu`.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Backend, Machine, Qemu, Version, World as Lab};

use super::outcomes::{End, Outcome, Owner};
use super::proxy::Proxy;
use super::traces::{Traces, nothing_is_left};
use super::trial::claim;
use super::{Ended, Host, Running, World, text};

/// How the guest is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Attached,
    Carried,
}

fn backend(way: Way) -> Backend {
    match way {
        Way::Attached => Backend::File,
        Way::Carried => Backend::Private,
    }
}

/// Two hosts, and a QEMU guest on the first.
pub struct Scene {
    pub world: World,
    pub lab: Lab,
    pub a: Host,
    pub b: Host,
    pub machine: Machine,
    pub way: Way,
    pub here: Qemu,
    /// The state of its QEMU before the migration.
    before: Traces,
    destinations: u32,
}

impl Scene {
    /// A guest on KVM that is attached, or one that can't be and is carried. It has written 48 MiB
    /// and rewrites 8 MiB.
    pub fn new(version: Version, way: Way) -> Self {
        let machine = Machine::on_kvm(version, "freed=40 hot=8,rate=40000");
        Self::of(Machine { backend: backend(way), ..machine }, way)
    }

    /// The same with an emulated Linux guest.
    pub fn emulated(version: Version, way: Way) -> Self {
        let machine = Machine { mib: 128, ..Machine::new(version, "dirty=8") };
        Self::of(Machine { backend: backend(way), ..machine }, way)
    }

    pub fn of(machine: Machine, way: Way) -> Self {
        let (world, lab) = (World::new(), Lab::new());
        let (a, b) = (world.host("a"), world.host("b"));
        let mut here = machine.start_booted(&lab, "here");
        here.check_guest();
        let before = Traces::of(&here);
        Self { world, lab, a, b, machine, way, here, before, destinations: 0 }
    }

    /// A QEMU that waits for the guest, and its receiver.
    pub fn receive(&mut self, link: &[&str]) -> (Qemu, Running, String) {
        self.destinations += 1;
        let qemu = self.machine.incoming(&self.lab, &format!("there-{}", self.destinations));
        let mut arguments = vec!["--qemu", text(&qemu.qmp), "--once"];
        arguments.extend(link);
        let (running, address) = self.b.receive(&arguments);
        (qemu, running, address)
    }

    pub fn receive_tls(&mut self) -> (Qemu, Running, String) {
        let tls = self.world.tls();
        self.receive(&["--listen", "127.0.0.1:0", "--tls", &tls])
    }

    pub fn receive_plain(&mut self) -> (Qemu, Running, String) {
        self.receive(&["--listen", "tcp:127.0.0.1:0", "--plain"])
    }

    /// The shell command of a QEMU like the guest's, for `receive --exec`.
    pub fn command(&self, name: &str) -> String {
        let libraries = self.machine.libraries().unwrap();
        let mut command = format!("env LD_LIBRARY_PATH='{}'", libraries.display());
        for word in self.machine.command_line(&self.lab, name) {
            command += &format!(" '{}'", word.display());
        }
        command
    }

    /// A migration whose link is cut in its first round and can be restored.
    pub fn cut_in_the_first_round(&mut self) -> (Qemu, Running, Running, Proxy) {
        let (there, receiving, address) = self.receive_plain();
        let proxy = Proxy::before(&address);
        let mut send = self.send(&proxy.address, &["--plain"]);
        send.event_where(|event| event["event"] == "round-started");
        proxy.cut();
        send.event("link-lost");
        (there, receiving, send, proxy)
    }

    /// A migration over TLS at full speed, in the guest's way, with further options.
    pub fn send_at_once(&self, address: &str, options: &[&str]) -> Ended {
        let tls = self.world.tls();
        let mode = if self.way == Way::Attached { "attached" } else { "carried" };
        let link = ["--tls", &tls, "--mode", mode, "--when-stuck", "switch-over"];
        let send = ["send", "--qemu", text(&self.here.qmp), "--to", address];
        self.a.run(&[&send[..], &link, options].concat())
    }

    /// A migration with few, slow rounds.
    pub fn send(&self, address: &str, link: &[&str]) -> Running {
        self.send_capped(address, link, "30M")
    }

    pub fn send_capped(&self, address: &str, link: &[&str], cap: &str) -> Running {
        self.a.start(&self.arguments(address, link, cap))
    }

    /// The command line of a migration with few, slow rounds.
    pub fn arguments<'a>(
        &'a self,
        address: &'a str,
        link: &[&'a str],
        cap: &'a str,
    ) -> Vec<&'a str> {
        let mut arguments = vec!["send", "--qemu", text(&self.here.qmp), "--to", address];
        arguments.extend(link);
        arguments.extend(["--max-bandwidth", cap, "--max-rounds", "2", "--compress", "none"]);
        arguments.extend(["--when-stuck", "switch-over", "--downtime-limit", "50ms"]);
        match self.way {
            Way::Attached => arguments.push("--verify"),
            Way::Carried => arguments.extend(["--mode", "carried"]),
        }
        arguments
    }

    pub fn send_tls(&self, address: &str) -> Running {
        let tls = self.world.tls();
        // How long a destination waits for a source that was killed.
        self.send(address, &["--tls", &tls, "--reconnect-timeout", "2s"])
    }

    /// A migration over TLS that has reached a phase.
    pub fn migrate_until(&mut self, phase: impl Fn(&Value) -> bool) -> (Qemu, Running, Running) {
        let (there, receiving, address) = self.receive_tls();
        let mut send = self.send_tls(&address);
        send.event_where(phase);
        (there, receiving, send)
    }

    /// Checks that the guest runs on here, unharmed, and that vmferry left nothing in its QEMU.
    pub fn runs_on_here(&mut self) {
        self.here.check_guest();
        self.is_clean();
    }

    /// Waits until the cleanup is done: it releases the QMP socket last.
    pub fn is_clean(&self) {
        let status = Qmp::connect(&self.here.qmp).unwrap().execute("query-status", json!({}));
        assert_eq!(status.unwrap()["running"], true);
        assert_eq!(Traces::of(&self.here), self.before, "QEMU is as before");
        nothing_is_left(&[&self.a], &[&self.here]);
    }

    /// Checks that the guest has moved and runs on there.
    pub fn moved_to(&mut self, there: Qemu) {
        self.here = there;
        self.here.check_guest();
        self.before = Traces::of(&self.here);
    }

    /// Checks by both QEMUs and by the journals of both hosts which host has the guest, and notes
    /// the outcome. The guest itself was checked before.
    pub fn note(
        &mut self,
        there: &mut Qemu,
        fault: &str,
        phase: &str,
        (source, destination): (impl Into<End>, impl Into<End>),
        owner: Owner,
    ) {
        let about = format!("{fault}, {phase}: {owner:?}");
        let runs = (runs(&mut self.here), runs(there));
        assert_ne!(runs, (true, true), "TWO GUESTS: {about}");
        assert_eq!(runs, (owner == Owner::Source, owner == Owner::Destination), "{about}");
        let (here, there) = (claim(&self.a).has, claim(&self.b).has);
        assert!(!(here && there), "TWO OWNERS by the journals: {about}");
        let (source, destination) = (source.into().0, destination.into().0);
        Outcome { guest: self.kind(), fault, phase, source, destination, owner }.note();
    }

    /// The kind of guest, for the table of outcomes.
    fn kind(&self) -> &'static str {
        match self.way {
            Way::Attached => "qemu attached",
            Way::Carried => "qemu carried",
        }
    }

    /// Checks that a migration still works after the fault.
    pub fn arrives(mut self) {
        let (mut there, mut receiving, address) = self.receive_tls();
        self.send_tls(&address).finish().exited(0);
        receiving.event("received");
        assert!(
            self.here.child.wait().unwrap().success(),
            "the source's QEMU has exited regularly"
        );
        there.check_guest();
    }
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
