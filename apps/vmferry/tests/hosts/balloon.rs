//! A guest's balloon, controlled by the command.

use vmferry_kit::need_kvm;

use crate::support::World;

#[test]
fn guest_of_threads_has_no_balloon() {
    let world = World::new();
    let host = world.host("a");
    let refused = host.run(&["run", "web", "--guest", "process", "--memory", "64M", "--balloon"]);
    refused.failed(2, "needs a guest on KVM");
    let _vmm = host.guest("web", &["--guest", "process", "--memory", "64M"]);
    host.run(&["balloon", "web"]).failed(9, "has no balloon");
    assert_eq!(host.run(&["status", "web"]).last()["balloon"], serde_json::Value::Null);
}

#[test]
fn balloon_is_set_and_shown() {
    need_kvm();
    let world = World::new();
    let host = world.host("a");
    let _vmm = host.guest("web", &["--guest", "kvm", "--memory", "64M", "--balloon"]);
    let target = |args: &[&str]| {
        let shown = host.run(args).exited(0);
        shown.last()["target_bytes"].as_u64()
    };
    assert_eq!(target(&["balloon", "web"]), Some(0));
    assert_eq!(target(&["balloon", "web", "16M"]), Some(16 << 20));
    assert_eq!(target(&["balloon", "web"]), Some(16 << 20));
    host.run(&["balloon", "web", "1G"]).failed(2, "balloon");
    assert_eq!(host.run(&["status", "web"]).last()["balloon"]["target_bytes"], 16 << 20);
    assert_eq!(target(&["balloon", "web", "0"]), Some(0));
}
