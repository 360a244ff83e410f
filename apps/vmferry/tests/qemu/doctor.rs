//! `doctor --qemu` with real QEMUs: whether they can be attached, what their command line lacks,
//! and that doctor leaves nothing on them.

use serde_json::Value;
use vmferry_qemu_lab::Version;

use crate::support::Ended;
use crate::support::scene::{Scene, Way};
use crate::support::text;

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
fn doctor_fails_without_a_qemu() {
    let world = crate::support::World::without_certificates();
    let nowhere = world.path("none.qmp");
    let ended = world.host("a").run(&["doctor", "--qemu", text(&nowhere)]);
    assert_eq!(found(&ended, "qemu")["level"], "error", "{ended:?}");
    assert_eq!(ended.code, Some(18));
}
