//! `doctor --qemu` with real QEMUs: whether they can be attached, what their command line lacks,
//! and that doctor leaves nothing on them.

use serde_json::Value;
use vmferry_qemu_lab::Version;

use crate::support::scene::{Scene, Way};
use crate::support::{Ended, in_parallel, text};

/// The level of this check for each object, in order.
fn levels(ended: &Ended, check: &str) -> Vec<String> {
    let findings = ended.last()["findings"].as_array().expect("findings");
    let of_check = findings.iter().filter(|finding| finding["check"] == check);
    of_check.map(|finding| finding["level"].as_str().unwrap().to_owned()).collect()
}

fn found<'a>(ended: &'a Ended, check: &str) -> &'a Value {
    let findings = ended.last()["findings"].as_array().expect("findings");
    let found = findings.iter().find(|finding| finding["check"] == check);
    found.unwrap_or_else(|| panic!("no check {check}: {ended:?}"))
}

#[test]
fn doctor_reports_shared_memory_as_attachable_and_leaves_qemu_unchanged() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let (there, running, address) = scene.receive_tls();
    let tls = scene.world.tls();
    let qmp = text(&scene.here.qmp).to_owned();
    let ask = ["doctor", "--qemu", &qmp, "--to", &address, "--tls", &tls, "--no-load"];
    let ended = scene.a.run(&ask);
    for check in ["qemu", "admission", "room"] {
        assert_eq!(found(&ended, check)["level"], "ok", "{ended:?}");
    }
    assert!(found(&ended, "qemu")["why"].as_str().unwrap().contains("can be attached"));
    assert!(found(&ended, "room")["why"].as_str().unwrap().contains("128.0 MiB"), "{ended:?}");
    drop((running, there));
    scene.here.check_guest();
    scene.is_clean();
}

#[test]
fn doctor_says_what_the_command_line_of_a_private_memory_qemu_lacks() {
    let mut scene = Scene::new(Version::V10_0, Way::Carried);
    let qmp = text(&scene.here.qmp).to_owned();
    let ended = scene.a.run(&["doctor", "--qemu", &qmp]);
    let qemu = found(&ended, "qemu");
    assert_eq!(qemu["level"], "warning", "{qemu}");
    let why = qemu["why"].as_str().unwrap();
    assert!(why.contains("private") && why.contains("share=on"), "{why}");
    assert!(ended.code == Some(17) || ended.code == Some(18), "{ended:?}");
    scene.here.check_guest();
    scene.is_clean();
}

#[test]
fn doctor_says_which_guests_can_not_be_sent_with_post_copy() {
    let cases = [
        (Version::V7_2, Way::Carried, &[][..], "not as vmferry carries it"),
        (Version::V10_0, Way::Attached, &["-device", "virtio-balloon-pci"], "it has a balloon"),
    ];
    in_parallel(cases.into(), |(version, way, devices, reason)| {
        let scene = Scene::new(version, way);
        let qemu = scene.machine.clone().with(devices).start_booted(&scene.lab, "other");
        let ended = scene.a.run(&["doctor", "--qemu", text(&qemu.qmp)]);
        assert_eq!(levels(&ended, "post-copy"), ["ok", "note"], "{ended:?}");
        assert!(format!("{ended:?}").contains(reason), "{ended:?}");
    });
}

#[test]
fn doctor_fails_without_a_qemu() {
    let world = crate::support::World::without_certificates();
    let nowhere = world.path("none.qmp");
    let ended = world.host("a").run(&["doctor", "--qemu", text(&nowhere)]);
    assert_eq!(found(&ended, "qemu")["level"], "error", "{ended:?}");
    assert_eq!(ended.code, Some(18));
}

fn ask_of_both(scene: &Scene, address: &str) -> Ended {
    let (qmp, tls) = (text(&scene.here.qmp), scene.world.tls());
    scene.a.run(&["doctor", "--qemu", qmp, "--to", address, "--tls", &tls, "--no-load"])
}

/// The same comparison with which a migration begins, without a migration.
#[test]
fn doctor_compares_both_machines_and_leaves_the_receiver_ready() {
    in_parallel(vec![Way::Attached, Way::Carried], |way| {
        let mut scene = Scene::new(Version::V10_0, way);
        let fitting = scene.machine.clone();
        scene.machine = fitting.clone().with(&["-device", "virtio-rng-pci"]);
        let (other, _refusing, address) = scene.receive_tls();
        let ended = ask_of_both(&scene, &address);
        let machine = found(&ended, "machine");
        assert_eq!((&machine["level"], ended.code), (&"error".into(), Some(18)), "{ended:?}");
        assert!(machine["why"].as_str().unwrap().contains("virtio-rng-pci"), "{machine}");
        // A migration would be refused with the same words.
        scene.send_at_once(&address, &[]).failed(6, "virtio-rng-pci");
        other.kill();

        scene.machine = fitting;
        let (there, mut receiving, address) = scene.receive_tls();
        for _ in 0..3 {
            let ended = ask_of_both(&scene, &address);
            assert_eq!(found(&ended, "machine")["level"], "ok", "{ended:?}");
            // This host as a destination, the guest, and the other host.
            assert_eq!(levels(&ended, "post-copy"), ["ok", "ok", "ok"], "{ended:?}");
        }
        scene.runs_on_here();
        scene.send_at_once(&address, &[]).exited(0);
        receiving.event("received");
        scene.moved_to(there);
    });
}

#[test]
fn doctor_compares_the_machine_with_that_of_a_qemu_which_the_receiver_has_started() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let tls = scene.world.tls();
    let command = scene.command("there");
    let (mut receiving, address) =
        scene.b.receive(&["--exec", &command, "--once", "--listen", "127.0.0.1:0", "--tls", &tls]);
    let ended = ask_of_both(&scene, &address);
    assert_eq!(found(&ended, "machine")["level"], "ok", "{ended:?}");
    scene.runs_on_here();
    scene.send_at_once(&address, &[]).exited(0);
    let received = receiving.event("received");
    let qmp = std::path::PathBuf::from(received["qmp"].as_str().unwrap());
    vmferry_qemu::Qmp::connect(&qmp).unwrap().quit().unwrap();
    receiving.finish().exited(0);
}

#[test]
fn doctor_compares_no_machine_with_a_receiver_that_is_busy() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let tls = scene.world.tls();
    let mut other = scene.machine.start_booted(&scene.lab, "other");
    let (there, mut receiving, address) = scene.receive_tls();
    let ask = ["doctor", "--qemu", text(&other.qmp), "--to", &address, "--tls", &tls, "--no-load"];
    let unknown = |why: &str| {
        let ended = scene.a.run(&ask);
        let machine = found(&ended, "machine");
        assert_eq!(machine["level"], "note", "{ended:?}");
        assert!(machine["why"].as_str().unwrap().contains(why), "{machine}");
    };
    let mut send = scene.send_tls(&address);
    send.event_where(|event| event["event"] == "round-started");
    unknown("another guest is arriving there");
    send.finish().exited(0);
    receiving.event("received");
    unknown("a guest runs there already");
    scene.moved_to(there);
    other.check_guest();
}
