//! `estimate --qemu` with real QEMUs: what is seen of a guest that can be attached, and that nothing is left on it.

use vmferry_qemu_lab::Version;

use crate::support::scene::{Scene, Way};
use crate::support::{run_ok, text};

#[test]
fn a_qemu_is_watched_and_left_as_it_was() {
    let mut scene = Scene::new(Version::V10_0, Way::Attached);
    let qmp = text(&scene.here.qmp).to_owned();
    let estimate = run_ok(&scene.a, &["estimate", "--qemu", &qmp, "--time", "2s"]);
    let seen = &estimate["seen"];
    assert_eq!(seen["memory_bytes"].as_u64().unwrap() >> 20, 128, "{estimate}");
    // The guest rewrites 8 MiB without pause.
    assert!(seen["hot_bytes"].as_u64().unwrap() >= 8 << 20, "{estimate}");
    assert!(seen["dirty_bytes_per_s"].as_f64().unwrap() > 0.0, "{estimate}");
    assert!(seen["samples"].as_array().unwrap().len() >= 10, "{estimate}");
    scene.here.check_guest();
    scene.is_clean();
}

#[test]
fn a_qemu_that_can_t_be_attached_says_why() {
    let mut scene = Scene::new(Version::V10_0, Way::Carried);
    let qmp = text(&scene.here.qmp).to_owned();
    scene.a.run(&["estimate", "--qemu", &qmp, "--time", "1s"]).failed(6, "private");
    scene.here.check_guest();
}
