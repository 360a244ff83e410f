//! Guests on KVM, moved there and back by `send --qemu` and `receive --qemu`. They write
//! continuously.

use crate::support::scene::Way;
use crate::support::{Running, World, in_parallel, text};
use vmferry_qemu_lab::{Backend, Machine, Version, World as Lab};

fn there_and_back(version: Version, way: Way) {
    let (world, lab) = (World::new(), Lab::new());
    let (hosts, tls) = ([world.host("a"), world.host("b")], world.tls());
    let backend = if way == Way::Attached { Backend::File } else { Backend::Private };
    let machine = Machine::on_kvm(version, "fill=16,incompressible hot=16,rate=40000");
    let machine = Machine { backend, vcpus: 2, ..machine };
    let mut here = machine.start_booted(&lab, "here");
    here.check_guest();
    let mut earlier: Option<Running> = None;
    for hop in 0..4 {
        let (from, to) = (&hosts[hop % 2], &hosts[(hop + 1) % 2]);
        let mut there = machine.incoming(&lab, &format!("hop-{hop}"));
        let receive = ["--qemu", text(&there.qmp), "--listen", "127.0.0.1:0", "--tls", &tls];
        let (mut receiving, address) = to.receive(&receive);
        let mut send = vec!["send", "--qemu", text(&here.qmp), "--to", &address, "--tls", &tls];
        send.extend(["--when-stuck", "switch-over"]);
        match way {
            Way::Attached => send.extend(["--mode", "attached", "--verify"]),
            Way::Carried => send.extend(["--mode", "carried"]),
        }
        let sent = from.run(&send);
        assert_eq!(sent.code, Some(0), "{version:?} {way:?} {hop}: {sent:?}");
        let stats = sent.last();
        assert_eq!(stats["digest_match"], true, "{stats}");
        assert_eq!(stats["verify_match"] == true, way == Way::Attached, "{stats}");
        receiving.event("received");
        assert!(here.child.wait().unwrap().success(), "the source's QEMU has exited regularly");
        if let Some(receiver) = earlier.replace(receiving) {
            // The receiver of this host's earlier guest ends with its QEMU.
            receiver.finish().exited(0);
        }
        there.check_guest();
        here = there;
    }
}

#[test]
fn kvm_guests_move_there_and_back() {
    let ways = [(Version::V7_2, Way::Attached), (Version::V10_0, Way::Attached)];
    let cases = ways.into_iter().chain([(Version::V10_0, Way::Carried)]);
    in_parallel(cases.collect(), |(version, way)| there_and_back(version, way));
}
