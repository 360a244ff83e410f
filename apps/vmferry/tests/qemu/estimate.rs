//! `estimate --qemu` with real QEMUs: what it sees of a guest, attached or not, and that it leaves
//! nothing on the QEMU.

use vmferry_qemu_lab::Version;

use crate::support::scene::{Scene, Way};
use crate::support::{run_ok, text};

#[test]
fn estimate_watches_an_attachable_qemu_and_leaves_it_unchanged() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let qmp = text(&scene.here.qmp).to_owned();
    let estimate = run_ok(&scene.a, &["estimate", "--qemu", &qmp, "--time", "2s"]);
    let seen = &estimate["seen"];
    assert_eq!(seen["memory_bytes"].as_u64().unwrap() >> 20, 128, "{estimate}");
    // The guest continuously rewrites 8 MiB.
    assert!(seen["hot_bytes"].as_u64().unwrap() >= 8 << 20, "{estimate}");
    assert!(seen["dirty_bytes_per_s"].as_f64().unwrap() > 0.0, "{estimate}");
    assert!(seen["samples"].as_array().unwrap().len() >= 10, "{estimate}");
    scene.here.check_guest();
    scene.is_clean();
}

/// QEMU itself measures the guest's dirty rate, with a period in seconds or milliseconds depending
/// on its version. An emulated guest of an older QEMU would have to be paused.
fn a_carried_qemu_is_estimated(version: Version, stands_still: bool) {
    let mut scene = if stands_still {
        Scene::emulated(version, Way::Carried)
    } else {
        Scene::new(version, Way::Carried)
    };
    let qmp = text(&scene.here.qmp).to_owned();
    let estimate = run_ok(&scene.a, &["estimate", "--qemu", &qmp, "--time", "3s"]);
    assert!(estimate["carried"].as_str().unwrap().contains("private"), "{estimate}");
    assert_eq!(estimate["stands_still"], stands_still, "{estimate}");
    let seen = &estimate["seen"];
    assert!(seen["memory_bytes"].as_u64().unwrap() >> 20 >= 128, "{estimate}");
    assert!(seen["populated_pages"].as_u64().unwrap() > 2048, "{estimate}");
    assert_eq!(seen["contents"], serde_json::Value::Null, "{estimate}");
    // The guest continuously rewrites 8 MiB; QEMU samples it.
    let hot = seen["hot_bytes"].as_u64().unwrap();
    assert!((4 << 20..64 << 20).contains(&hot), "{estimate}");
    assert!(seen["dirty_bytes_per_s"].as_f64().unwrap() > 0.0, "{estimate}");
    assert_eq!(estimate["outlook"]["rounds"] == 1, stands_still, "{estimate}");
    scene.here.check_guest();
    scene.is_clean();
}

#[test]
fn estimate_asks_a_qemu_that_can_not_be_attached() {
    a_carried_qemu_is_estimated(Version::V10_0, false);
}

#[test]
fn estimate_asks_an_older_qemu() {
    a_carried_qemu_is_estimated(Version::V7_2, false);
}

#[test]
fn estimate_asks_an_older_qemu_whose_guest_would_be_paused() {
    a_carried_qemu_is_estimated(Version::V7_2, true);
}
