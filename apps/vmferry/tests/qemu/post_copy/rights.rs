//! Who may receive a guest with post-copy, and what refuses it.

use std::path::Path;

use vmferry_qemu_lab::{HugePages, Machine, Mounted, Qemu, Version, World as Lab};

use super::carried::private;
use super::{emulated, fetched, lacks_pages, on_kvm};
use crate::support::scene::{Scene, Way};
use crate::support::{Ended, Host, Running, World, in_parallel, text};

/// The user `nobody`.
pub const NOBODY: u32 = 65534;

/// Two QEMUs of `nobody`, whose files are that user's.
struct Theirs {
    lab: Lab,
    here: Qemu,
    there: Qemu,
}

impl Theirs {
    fn new() -> Self {
        let lab = Lab::new();
        lab.give_to(NOBODY).unwrap();
        let machine = Machine { user: Some(NOBODY), ..on_kvm(Version::V10_0) };
        let mut here = machine.start(&lab, "here");
        here.check_guest();
        let there = machine.incoming(&lab, "there");
        Self { lab, here, there }
    }

    /// A receiver, whose command `start` starts.
    fn receive(&self, start: impl Fn(&[&str]) -> Running) -> Running {
        let link = format!("unix:{}", self.lab.path("link").display());
        let receive = ["receive", "--qemu", text(&self.there.qmp), "--listen", &link, "--once"];
        let mut receiving = start(&receive);
        receiving.event("listening");
        receiving
    }

    fn send(&self, start: impl Fn(&[&str]) -> Running) -> Ended {
        let link = format!("unix:{}", self.lab.path("link").display());
        let mut send = vec!["send", "--qemu", text(&self.here.qmp), "--to", &link];
        send.extend(["--max-bandwidth", "32M", "--compress", "none"]);
        send.extend(["--post-copy", "now", "--downtime-limit", "1ms"]);
        start(&send).finish()
    }

    fn arrives(mut self, sent: &Ended, mut receiving: Running) {
        fetched(sent);
        receiving.event("received");
        self.there.check_guest();
        assert!(!lacks_pages(self.there.child.id()), "no page is missing any more");
    }
}

/// As a service of root's does it for the QEMUs of other users, such as libvirt's.
#[test]
fn root_moves_the_guest_of_another_user() {
    let (world, theirs) = (World::new(), Theirs::new());
    let receiving = theirs.receive(|receive| world.host("b").start(receive));
    let sent = theirs.send(|send| world.host("a").start(send)).exited(0);
    theirs.arrives(&sent, receiving);
}

/// KVM's faults are the kernel's, and an ordinary user may not handle those by default.
#[test]
fn ordinary_user_needs_the_device() {
    let mut theirs = Theirs::new();
    let host = |name: &str| Host { runtime: theirs.lab.path(&format!("host-{name}")) };
    let (a, b) = (host("a"), host("b"));
    let receiving = theirs.receive(|receive| b.start_as(NOBODY, receive));
    let refused = theirs.send(|send| a.start_as(NOBODY, send));
    refused.failed(6, "open /dev/userfaultfd: Permission denied");
    theirs.here.check_guest();
    drop(receiving);

    let permitted = with_another_node(&theirs.lab.node("/dev/userfaultfd"));
    let receiving = theirs.receive(|receive| b.start_under(&permitted, receive));
    let sent = theirs.send(|send| a.start_as(NOBODY, send)).exited(0);
    theirs.arrives(&sent, receiving);
}

/// Runs a program as `nobody`, with a node of its own in the place of /dev/userfaultfd.
fn with_another_node(node: &Path) -> Vec<String> {
    let script = "mount --bind \"$0\" /dev/userfaultfd && \
                  exec setpriv --reuid 65534 --regid 65534 --clear-groups \"$@\"";
    ["unshare", "--mount", "sh", "-c", script, text(node)].map(str::to_owned).into()
}

/// QEMU's own sandbox forbids the system call, and permits `ioctl` on the device.
#[test]
fn sandboxed_qemu_fetches_its_pages() {
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    let machines = [on_kvm(Version::V10_0), emulated(Version::V7_2)];
    in_parallel(machines.into(), |machine| {
        let machine = machine.with(&["-sandbox", sandbox]);
        let mut moving = super::Move::until_it_fetches(machine, &[]);
        fetched(&moving.send.finish_by_ref().exited(0));
        moving.arrives();
    });
}

/// Shows a process in /proc only those that it may trace, as systemd's `ProtectProc=invisible`
/// does. A sandboxed receiver may trace none.
fn with_a_hidden_proc() -> Vec<String> {
    let script = "mount -t proc -o hidepid=invisible proc /proc && exec \"$@\"";
    ["unshare", "--mount", "sh", "-c", script, "sh"].map(str::to_owned).into()
}

#[test]
fn sandboxed_receiver_that_sees_no_process_finds_its_guest_again() {
    let machines = [on_kvm(Version::V10_0), private(on_kvm(Version::V10_0))];
    in_parallel(machines.into(), |machine| {
        let mut moving = super::Move::until_it_fetches(machine, &["--sandbox", "require"]);
        let tls = moving.scene.world.tls();
        let qmp = ["receive", "--qemu", text(&moving.there.qmp), "--sandbox", "require"];
        let link = ["--listen", &moving.address, "--tls", &tls];
        let again =
            || moving.scene.b.start_under(&with_a_hidden_proc(), &[&qmp[..], &link].concat());
        moving.receiving.kill();
        let mut next = again();
        next.event("taking-over");
        next.event("fetched");
        next.event("found");
        next.kill();
        next = again();
        next.event("found");
        fetched(&moving.send.finish_by_ref().exited(0));
        moving.arrives();
    });
}

#[test]
fn qemu_with_a_balloon_is_refused_by_name_before_anything_is_sent() {
    let balloon = ["-device", "virtio-balloon-pci"];
    let mut scene = Scene::of(on_kvm(Version::V10_0).with(&balloon), Way::Attached);
    let tls = scene.world.tls();
    for relied_on in [["--post-copy", "now"], ["--when-stuck", "post-copy"]] {
        let (_there, _receiving, address) = scene.receive_tls();
        let send = ["send", "--qemu", text(&scene.here.qmp), "--to", &address, "--tls", &tls];
        let refused = scene.a.run(&[&send[..], &relied_on].concat());
        refused.failed(6, "the destination: it has a balloon");
        scene.runs_on_here();
    }
}

/// Only the destination's memory matters. With `auto` the guest moves without post-copy.
#[test]
fn qemu_on_huge_pages_is_refused_by_name_before_anything_is_sent() {
    let mut scene = Scene::of(on_kvm(Version::V10_0), Way::Attached);
    let tls = scene.world.tls();
    let directory = scene.lab.path("huge");
    // A guest of 128 MiB, and one more page because QEMU rounds up; two destinations.
    let mounted = Mounted::new(&directory, HugePages::Hugetlb, 2 * (128 + 2)).unwrap();
    scene.machine.memory_directory = Some(directory);
    for post_copy in ["now", "auto"] {
        let (_there, mut receiving, address) = scene.receive_tls();
        let send = ["send", "--qemu", text(&scene.here.qmp), "--to", &address, "--tls", &tls];
        let sent = scene.a.run(&[&send[..], &["--post-copy", post_copy]].concat());
        if post_copy == "now" {
            sent.failed(6, "the destination: its memory is on hugetlbfs");
            scene.runs_on_here();
        } else {
            assert_eq!(sent.exited(0).last()["missing_pages"], 0);
            receiving.event("received");
        }
    }
    drop((scene, mounted));
}

/// The guest is stuck in pre-copy and moves with post-copy: there, and then back.
#[test]
fn stuck_guest_moves_there_and_back() {
    let mut scene = Scene::of(on_kvm(Version::V10_0), Way::Attached);
    let tls = scene.world.tls();
    for _ in 0..2 {
        let (there, mut receiving, address) = scene.receive_tls();
        let mut send = vec!["send", "--qemu", text(&scene.here.qmp), "--to", &address];
        send.extend(["--tls", &tls, "--max-bandwidth", "32M", "--compress", "none"]);
        send.extend(["--when-stuck", "post-copy", "--downtime-limit", "20ms"]);
        fetched(&scene.a.run(&send).exited(0));
        receiving.event("received");
        scene.moved_to(there);
        std::mem::swap(&mut scene.a, &mut scene.b);
    }
}
