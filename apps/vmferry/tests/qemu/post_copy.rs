//! Attached guests that run before all their pages have arrived, and processes that die meanwhile.

mod carried;
mod crashed;
mod last_pages;
mod lost;
mod pages;
mod recovery;
mod rights;

use std::time::{Duration, Instant};

use serde_json::Value;
use vmferry_qemu_lab::{Backend, Machine, Qemu, Version};

use self::pages::Pages;
use crate::support::inject::{self, Argument};
use crate::support::scene::{Scene, Way};
use crate::support::{Ended, Running, all, in_parallel, text};

/// A guest on KVM that rewrites 24 MiB at random as fast as it can. It checks its memory all the
/// time.
fn on_kvm(version: Version) -> Machine {
    let workload = "fill=16,incompressible hot=24,random,rate=40000";
    Machine { backend: Backend::File, vcpus: 2, ..Machine::on_kvm(version, workload) }
}

/// An emulated Linux guest.
fn emulated(version: Version) -> Machine {
    let machine = Machine::new(version, "dirty=24");
    Machine { backend: Backend::File, mib: 128, ..machine }
}

/// QEMU 10.0 would send a memfd itself, so its guest is carried.
fn memfd(machine: Machine) -> Machine {
    Machine { backend: Backend::Memfd, ..machine }
}

/// Both nodes have pages that are missing.
fn two_nodes(machine: Machine) -> Machine {
    let workload = machine.workload.replace("fill=16", "fill=48");
    Machine { backend: Backend::TwoNodes, workload, ..machine }
}

/// A guest that is being moved with post-copy.
struct Move {
    scene: Scene,
    there: Qemu,
    receiving: Running,
    address: String,
    send: Running,
}

impl Move {
    /// Waits until the guest runs at the destination. The cap makes the rest take some seconds.
    fn until_it_fetches(machine: Machine, link: &[&str]) -> Self {
        let way = match machine.backend {
            Backend::Private => Way::Carried,
            _ => Way::Attached,
        };
        let mut scene = Scene::of(machine, way);
        let tls = scene.world.tls();
        let listen = ["--listen", "127.0.0.1:0", "--tls", &tls];
        let (there, mut receiving, address) = scene.receive(&[&listen[..], link].concat());
        let send = send(&scene, &address);
        receiving.event("fetching");
        Self { scene, there, receiving, address, send }
    }

    /// Starts the receiver again with the same command.
    fn receive_again(&self) -> Running {
        let tls = self.scene.world.tls();
        let qmp = ["--qemu", text(&self.there.qmp), "--once"];
        let link = ["--listen", &self.address, "--tls", &tls];
        self.scene.b.receive(&[&qmp[..], &link].concat()).0
    }

    /// The guest is at the destination and has every page, and the source's QEMU has ended.
    fn arrives(mut self) {
        assert!(self.scene.here.child.wait().unwrap().success(), "it was quit");
        self.there.check_guest();
        let there = &mut self.there;
        let said = there.wait_for("has checked its memory", |said| said.get("corruptions") == 0);
        assert_eq!(said.get("corruptions"), 0, "{said:?}");
        assert!(!lacks_pages(there.child.id()), "no page is missing any more");
    }
}

fn send(scene: &Scene, address: &str) -> Running {
    let tls = scene.world.tls();
    let mut arguments = vec!["send", "--qemu", text(&scene.here.qmp), "--to", address];
    arguments.extend(["--tls", &tls, "--max-bandwidth", "8M", "--compress", "none"]);
    arguments.extend(["--post-copy", "now", "--downtime-limit", "1ms"]);
    scene.a.start(&arguments)
}

/// Whether missing pages of a process are reported.
fn lacks_pages(pid: u32) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let flags = maps.lines().filter(|line| line.starts_with("VmFlags:"));
    flags.flat_map(str::split_whitespace).any(|flag| flag == "um")
}

fn fetched(sent: &Ended) -> Value {
    let stats = sent.last().clone();
    assert!(stats["missing_pages"].as_u64() > Some(1000), "{stats}");
    stats
}

#[test]
fn attached_guests_fetch_their_pages() {
    let (old, new) = (Version::V7_2, Version::V10_0);
    let mut machines = vec![on_kvm(old), emulated(new), memfd(on_kvm(old)), two_nodes(on_kvm(new))];
    if all() {
        machines.extend([
            on_kvm(new),
            emulated(old),
            memfd(emulated(old)),
            two_nodes(emulated(new)),
        ]);
    }
    in_parallel(machines, |machine| {
        let mut moving = Move::until_it_fetches(machine, &["--sandbox", "require"]);
        assert!(lacks_pages(moving.there.child.id()));
        let sent = moving.send.finish_by_ref().exited(0);
        fetched(&sent);
        let fetch = moving.receiving.event("received")["stats"]["fetch"].clone();
        assert!(fetch["faults"].as_u64() > Some(0), "{fetch}");
        moving.arrives();
    });
}

#[test]
fn restarted_receiver_fetches_the_rest() {
    let (old, new) = (Version::V7_2, Version::V10_0);
    let machines = [on_kvm(new), emulated(new), memfd(emulated(old)), two_nodes(on_kvm(new))];
    in_parallel(machines.into(), |machine| {
        let mut moving = Move::until_it_fetches(machine, &[]);
        moving.receiving.kill();
        assert!(lacks_pages(moving.there.child.id()), "QEMU has kept its userfaultfd");
        let mut next = moving.receive_again();
        next.event("taking-over");
        next.event("fetched");
        next.event("found");
        fetched(&moving.send.finish_by_ref().exited(0));
        moving.arrives();
    });
}

#[test]
fn guardian_serves_the_pages_of_a_killed_sender() {
    in_parallel(vec![on_kvm(Version::V10_0), emulated(Version::V10_0)], |machine| {
        let mut moving = Move::until_it_fetches(machine, &[]);
        moving.send.kill();
        moving.receiving.event("fetched");
        moving.receiving.event("received");
        moving.arrives();
    });
}

#[test]
fn both_processes_may_die_again_and_again() {
    let mut moving = Move::until_it_fetches(on_kvm(Version::V10_0), &[]);
    moving.send.kill();
    for _ in 0..3 {
        moving.receiving.kill();
        moving.receiving = moving.receive_again();
        moving.receiving.event("taking-over");
    }
    moving.receiving.event("fetched");
    moving.receiving.event("found");
    moving.arrives();
}

/// Closes every userfaultfd of a process.
fn close_userfaultfds(pid: u32) {
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten() {
        let is_one = std::fs::read_link(entry.path())
            .is_ok_and(|link| link.as_os_str() == "anon_inode:[userfaultfd]");
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(number) = number.filter(|_| is_one) {
            assert_eq!(inject::call(pid, libc::SYS_close, &[Argument::Number(number)]), 0);
        }
    }
}

/// The control of all tests above: without the userfaultfd in QEMU, a missing page reads as zeros.
#[test]
fn page_is_lost_if_the_userfaultfd_is_closed_and_the_next_receiver_says_so() {
    let mut moving = Move::until_it_fetches(on_kvm(Version::V10_0), &[]);
    moving.receiving.kill();
    let [here, there] =
        [&moving.scene.here, &moving.there].map(|qemu| Pages::of(qemu, &moving.scene.machine));
    let missing = there.missing();
    close_userfaultfds(moving.there.child.id());
    let is_lost = |page: &u64| there.is_there(*page) && there.content(*page) != here.content(*page);
    // The guest touches a missing page sooner or later. Nothing tells when.
    let deadline = Instant::now() + Duration::from_secs(60);
    while !missing.iter().any(is_lost) {
        assert!(Instant::now() < deadline, "no page of {} was lost", missing.len());
        std::thread::sleep(Duration::from_millis(10));
    }
    let tls = moving.scene.world.tls();
    let qmp = ["receive", "--qemu", text(&moving.there.qmp)];
    let link = ["--listen", &moving.address, "--tls", &tls];
    let next = moving.scene.b.run(&[&qmp[..], &link].concat());
    next.failed(13, "no longer reports missing pages");
    assert!(moving.scene.here.child.try_wait().unwrap().is_none(), "the source keeps the memory");
}

/// A guest that lacks pages is not sent on, with its receiver or without it.
#[test]
fn guest_that_lacks_pages_is_not_sent_on() {
    let mut moving = Move::until_it_fetches(on_kvm(Version::V10_0), &[]);
    let sends = |moving: &Move| {
        let qmp = text(&moving.there.qmp);
        moving.scene.b.run(&["send", "--qemu", qmp, "--to", "tcp:127.0.0.1:1", "--plain"])
    };
    sends(&moving).failed(9, "has not all its pages yet (it needs ");
    moving.receiving.kill();
    sends(&moving).failed(9, "has not all its pages yet: it was received in session");
    assert!(lacks_pages(moving.there.child.id()), "nothing was closed");
    let mut next = moving.receive_again();
    next.event("fetched");
    next.event("found");
    moving.send.finish_by_ref().exited(0);
    moving.arrives();
}

/// A receiver that dies after it has noted that no page is missing, and before it says so to QEMU.
/// Threads that touch a page which was never populated would wait forever.
#[test]
fn registration_that_a_killed_receiver_has_left_is_ended() {
    let mut moving = Move::until_it_fetches(on_kvm(Version::V10_0), &[]);
    // The source asks in vain if the receiver is killed before it has said that the guest runs.
    let session = moving.send.event("serving")["run"].clone();
    moving.receiving.kill();
    let pid = moving.there.child.id();
    assert!(lacks_pages(pid));
    let session = serde_json::from_value(session).unwrap();
    let journals = moving.scene.b.runtime.join("journal");
    vmferry::destination::record_fetched(&journals, session).unwrap();
    let mut next = moving.receive_again();
    next.event("found");
    assert!(!lacks_pages(pid), "nothing is registered any more");
    moving.send.kill();
}
