//! `doctor --qemu` with real QEMUs: whether they can be attached, what their command line lacks,
//! and that nothing is left on them.

use serde_json::Value;
use vmferry_qemu_lab::Version;

use crate::support::Ended;
use crate::support::scene::{Scene, Way};
use crate::support::text;

fn found<'a>(ended: &'a Ended, check: &str) -> &'a Value {
    let findings = ended.last()["findings"].as_array().expect("findings");
    let found = findings.iter().find(|finding| finding["check"] == check);
    found.unwrap_or_else(|| panic!("nothing of {check}: {ended:?}"))
}

#[test]
fn qemu_with_shared_memory_can_be_attached_and_is_left_as_it_was() {
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
fn qemu_with_private_memory_is_told_what_its_command_line_lacks() {
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
fn qemu_that_is_not_there_is_an_error() {
    let world = crate::support::World::without_certificates();
    let nowhere = world.path("none.qmp");
    let ended = world.host("a").run(&["doctor", "--qemu", text(&nowhere)]);
    assert_eq!(found(&ended, "qemu")["level"], "error", "{ended:?}");
    assert_eq!(ended.code, Some(18));
}
