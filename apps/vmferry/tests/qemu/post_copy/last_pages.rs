//! The last pages of carried guests. QEMU does not pause a post-copy whose last page it has
//! written, and can't be connected again: it would even continue the guest, which runs at the
//! destination.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Machine, Qemu, Version, World as Lab};

use super::carried::{private, send, wait_until};
use super::on_kvm;
use super::pages::Pages;
use crate::support::proxy::Proxy;
use crate::support::scene::{Scene, Way};
use crate::support::stops::guardian;
use crate::support::{Running, in_parallel, text};

/// A guest whose last pages the source's QEMU has written, and which have not arrived.
struct OnTheWay {
    scene: Scene,
    there: Qemu,
    receiving: Running,
    /// The receiver's own address.
    address: String,
    proxy: Proxy,
    sending: Running,
    /// Another client of the source's QEMU.
    operator: Qmp,
    /// The destination's memory, and what is missing there.
    memory: Pages,
    missing: Vec<u64>,
    _operators: Lab,
}

/// How many guests are moved to have one whose last pages QEMU has written. On a busy host so much
/// may be on the way when the link is cut that QEMU can't write the rest. Then its post-copy is
/// paused by the next failure, and can be connected again: other tests have that.
const ATTEMPTS: usize = 5;

impl OnTheWay {
    fn begin() -> Self {
        let written = (0..ATTEMPTS).find_map(|_| Self::attempt());
        written.expect("QEMU writes the last pages of a guest")
    }

    /// `None` if QEMU can't write the last pages, or all of them have arrived.
    fn attempt() -> Option<Self> {
        let operators = Lab::new();
        let operator = operators.path("operator.qmp");
        let listening = format!("unix:{},server=on,wait=off", text(&operator));
        let machine = private(on_kvm(Version::V10_0));
        // A faster guest touches all of the last pages at once.
        let workload = machine.workload.replace("rate=40000", "rate=500");
        let machine = Machine { workload, ..machine };
        let mut scene = Scene::of(machine.clone().with(&["-qmp", &listening]), Way::Carried);
        scene.machine = machine;
        let (there, receiving, address) = scene.receive_plain();
        let proxy = Proxy::holding(&address, "127.0.0.1", None);
        let mut sending = send(&scene, &proxy.address);
        sending.event("serving");
        let [source, memory] = [&scene.here, &there].map(|qemu| Pages::of(qemu, &scene.machine));
        let mut missing = memory.missing_of(&source);
        let mut operator = Qmp::connect(&operator).unwrap();
        // QEMU can write this many pages although none arrives.
        wait_until(|| {
            missing.retain(|page| !memory.is_there(*page));
            missing.len() <= 80
        });
        proxy.cut();
        let mut answers = true;
        wait_until(|| match operator.execute("query-migrate", json!({})) {
            Ok(migration) => migration["ram"]["remaining"] == 0,
            // QEMU's main loop waits for the thread that can't write.
            Err(_) => {
                answers = false;
                true
            }
        });
        missing.retain(|page| !memory.is_there(*page));
        (answers && !missing.is_empty()).then_some(Self {
            scene,
            there,
            receiving,
            address,
            proxy,
            sending,
            operator,
            memory,
            missing,
            _operators: operators,
        })
    }

    /// The sender and its guardian are killed, and the pages with them that they had read. Returns
    /// whether QEMU's post-copy has failed, and is not paused.
    fn kill_sender(&mut self) -> bool {
        let guardian = Pid::from_raw(guardian(&self.sending) as i32).unwrap();
        kill_process(guardian, Signal::KILL).unwrap();
        self.sending.kill();
        let mut status = Value::Null;
        wait_until(|| {
            status = ask(&mut self.operator, "query-migrate")["status"].take();
            status == "failed" || status == "postcopy-paused"
        });
        if status == "postcopy-paused" {
            return false;
        }
        wait_until(|| ask(&mut self.operator, "query-status")["status"] == "paused");
        true
    }

    fn send_again(&mut self) {
        self.sending = send(&self.scene, &self.proxy.address);
        self.sending.event("finishing-session");
        self.sending.event("post-copy-interrupted");
    }

    /// The link is back: the guest gets the pages, which only the source's memory has.
    fn arrives(mut self) {
        assert!(self.missing.iter().all(|page| !self.memory.is_there(*page)), "the link is cut");
        self.proxy.heal();
        self.sending.finish_by_ref().exited(0);
        assert!(self.scene.here.child.wait().unwrap().success(), "it was quit");
        self.there.check_guest();
    }
}

fn ask(operator: &mut Qmp, command: &str) -> Value {
    operator.execute(command, json!({})).unwrap()
}

#[test]
fn last_pages_arrive_although_the_processes_that_carried_them_were_killed() {
    // Each returns whether QEMU's post-copy has failed before its pages have arrived.
    let deaths: [fn(&mut OnTheWay) -> bool; 3] = [
        |moving| {
            let has_failed = moving.kill_sender();
            if has_failed {
                moving.send_again();
            }
            has_failed
        },
        |moving| {
            let has_failed = moving.kill_sender();
            if has_failed {
                moving.send_again();
                moving.sending.kill();
                moving.send_again();
            }
            has_failed
        },
        |moving| {
            moving.receiving.kill();
            let there = ["receive", "--qemu", text(&moving.there.qmp), "--plain"];
            let listen = ["--listen", &moving.address];
            moving.receiving = moving.scene.b.start(&[&there[..], &listen].concat());
            moving.receiving.event("taking-over");
            true
        },
    ];
    in_parallel(deaths.into(), |dies| {
        let failed = (0..ATTEMPTS).find_map(|_| {
            let mut moving = OnTheWay::begin();
            dies(&mut moving).then_some(moving)
        });
        failed.expect("QEMU's post-copy fails").arrives();
    });
}

/// The guest would run on both hosts.
#[test]
fn last_pages_are_not_sent_for_a_guest_that_an_operator_has_continued_at_the_source() {
    let failed = (0..ATTEMPTS).find_map(|_| {
        let mut moving = OnTheWay::begin();
        moving.kill_sender().then_some(moving)
    });
    let mut moving = failed.expect("QEMU's post-copy fails");
    ask(&mut moving.operator, "cont");
    moving.proxy.heal();
    moving.sending = send(&moving.scene, &moving.proxy.address);
    let failed = moving.sending.event("serving-failed");
    let reason = failed["reason"].as_str().unwrap();
    assert!(reason.contains("which belongs to another host: end this QEMU"), "{failed}");
    assert!(moving.missing.iter().all(|page| !moving.memory.is_there(*page)));
    moving.scene.here.child.kill().unwrap();
    moving.sending.finish_by_ref().failed(13, "has lost the pages that it had not fetched yet");
}
