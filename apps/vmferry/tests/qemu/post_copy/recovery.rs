//! Processes that die and links that break while guests of QEMU fetch their pages, at seeded
//! moments.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use vmferry_qemu::wait_for_end;
use vmferry_qemu_lab::{Backend, Machine, Qemu, Version};

use super::carried::private;
use super::pages::Pages;
use super::{emulated, lacks_pages, on_kvm};
use crate::support::proxy::Proxy;
use crate::support::scene::{Scene, Way};
use crate::support::stops::guardian_of;
use crate::support::strikes::{Plan, Strike, Tally};
use crate::support::trial::claim;
use crate::support::{Running, several_at_once, text};

/// How long a guest may take to fetch any part of its pages.
const PATIENCE: Duration = Duration::from_secs(180);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The sender is killed, or what serves the pages in its place.
    Source,
    Guardian,
    Receiver,
    SourceAndReceiver,
    Link,
    LinkAndReceiver,
}

const FAULTS: [Fault; 6] = [
    Fault::Source,
    Fault::Guardian,
    Fault::Receiver,
    Fault::SourceAndReceiver,
    Fault::Link,
    Fault::LinkAndReceiver,
];

/// A guest that fetches its pages, and the processes that may die.
struct Fetching {
    scene: Scene,
    there: Qemu,
    /// The receiver's own address.
    address: String,
    proxy: Proxy,
    receiving: Running,
    send: Option<Child>,
    guardian: Option<u32>,
    /// The guest's memory at the destination.
    memory: Pages,
    /// The pages that were missing when the guest had started.
    missing: Vec<u64>,
}

impl Fetching {
    fn begin(machine: Machine) -> Self {
        let is_carried = machine.backend == Backend::Private;
        let mut scene = Scene::of(machine, if is_carried { Way::Carried } else { Way::Attached });
        let (there, mut receiving, address) = scene.receive_plain();
        let proxy = Proxy::holding(&address, "127.0.0.1", None);
        let send = Some(send(&scene, &proxy.address));
        receiving.event("fetching");
        let guardian = send.as_ref().map(|send| guardian_of(send.id()));
        let [source, memory] = [&scene.here, &there].map(|qemu| Pages::of(qemu, &scene.machine));
        let missing = memory.missing_of(&source);
        assert!(missing.len() > 2000, "{} pages are missing", missing.len());
        Self { scene, there, address, proxy, receiving, send, guardian, memory, missing }
    }

    /// Waits until this share of the missing pages has arrived. Returns how many are missing.
    fn await_share(&self, share: f64) -> usize {
        let most = (self.missing.len() as f64 * (1.0 - share)) as usize;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let are_missing = self.missing.iter().filter(|page| !self.memory.is_there(**page));
            let missing = are_missing.count();
            if missing <= most {
                return missing;
            }
            assert!(Instant::now() < deadline, "{missing} pages do not arrive");
            // Nothing tells of a page that has arrived.
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns false if the fault has nothing to strike, because it struck before.
    fn strike(&mut self, strike: &Strike<Fault>) -> bool {
        match strike.fault {
            Fault::Source => self.kill_source(),
            Fault::Guardian => return self.kill_guardian(),
            Fault::Receiver => self.kill_receiver(),
            Fault::SourceAndReceiver => {
                self.receiving.kill();
                self.kill_source();
                self.receive_again();
            }
            Fault::Link => self.cut_for(strike.lasts),
            Fault::LinkAndReceiver => {
                self.proxy.cut();
                self.kill_receiver();
                self.cut_for(strike.lasts);
            }
        }
        true
    }

    fn kill_receiver(&mut self) {
        self.receiving.kill();
        self.receive_again();
    }

    fn receive_again(&mut self) {
        let qmp = ["--qemu", text(&self.there.qmp), "--once"];
        let link = ["--listen", &self.address, "--plain"];
        self.receiving = self.scene.b.receive(&[&qmp[..], &link].concat()).0;
    }

    /// The guardian serves in the place of a killed sender, and the operator's next command in that
    /// of a killed guardian.
    fn kill_source(&mut self) {
        let Some(mut send) = self.send.take() else {
            self.kill_guardian();
            return;
        };
        send.kill().unwrap();
        send.wait().unwrap();
        if self.guardian.is_none() {
            self.send_again();
        }
    }

    fn kill_guardian(&mut self) -> bool {
        let Some(guardian) = self.guardian.take() else { return false };
        kill_process(Pid::from_raw(guardian as i32).unwrap(), Signal::KILL).unwrap();
        if self.send.is_none() {
            // While the sender lives it is the parent of a zombie.
            let _ = wait_for_end(guardian);
            self.send_again();
        }
        true
    }

    fn send_again(&mut self) {
        self.send = Some(send(&self.scene, &self.proxy.address));
    }

    fn cut_for(&self, lasts: Duration) {
        self.proxy.cut();
        // The fault is a link that is cut for so long.
        std::thread::sleep(lasts);
        self.proxy.heal();
    }

    /// The guest has every page and runs at one host only.
    fn arrives(mut self) {
        self.await_share(1.0);
        // The latter if it took the guest over.
        self.receiving
            .event_where(|event| ["received", "found"].iter().any(|it| event["event"] == *it));
        if let Some(mut send) = self.send.take() {
            assert!(send.wait().unwrap().success(), "the sender has seen the end");
        }
        assert!(self.scene.here.child.wait().unwrap().success(), "the source's QEMU was quit");
        assert!(!claim(&self.scene.a).has && claim(&self.scene.b).has, "the journals say so");
        assert!(!lacks_pages(self.there.child.id()), "no page is missing any more");
        self.there.check_guest();
    }
}

/// A sender whose output nobody needs to read. The cap makes the fetch last for some seconds.
fn send(scene: &Scene, address: &str) -> Child {
    let mut arguments = vec!["send", "--qemu", text(&scene.here.qmp), "--to", address, "--plain"];
    arguments.extend(["--max-bandwidth", "6M", "--compress", "none"]);
    arguments.extend(["--post-copy", "now", "--downtime-limit", "1ms"]);
    let mut command = scene.a.command_under(&[], &arguments);
    command.stdout(Stdio::null()).spawn().unwrap()
}

type MakeMachine = fn() -> Machine;

/// The guests of the migrations, in turn.
const GUESTS: [(&str, MakeMachine); 5] = [
    ("attached, KVM", || on_kvm(Version::V10_0)),
    ("carried, KVM", || private(on_kvm(Version::V10_0))),
    ("attached, emulated", || emulated(Version::V10_0)),
    ("attached, KVM", || on_kvm(Version::V10_0)),
    ("carried, emulated", || private(emulated(Version::V10_0))),
];

/// Each migration has three faults.
#[test]
fn faults_lose_no_guest_that_fetches_and_no_page() {
    let plans = Plan::all(3, 16, &FAULTS);
    let (migrations, tally) = (plans.len(), Mutex::new(Tally::default()));
    several_at_once(4, plans, |plan| {
        let (guest, machine) = GUESTS[plan.seed as usize % GUESTS.len()];
        println!("{guest}: {plan:?}");
        let mut fetching = Fetching::begin(machine());
        for strike in &plan.strikes {
            // What strikes after the last page is no fault of a fetch.
            if fetching.await_share(strike.arrived) > 0 && fetching.strike(strike) {
                tally.lock().add(guest, &format!("{:?}", strike.fault));
            }
        }
        fetching.arrives();
    });
    tally.into_inner().print(migrations);
}
