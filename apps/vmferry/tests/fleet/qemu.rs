//! Guests of QEMU in a fleet: received by a template, sent by processes that are killed.

use std::path::PathBuf;

use serde_json::json;
use vmferry_etcd_lab::EtcdCluster;
use vmferry_qemu_lab::{Monitor, Version};

use crate::members::{is_only_on, shows};
use crate::place::{Member, host_table, init, registers};
use crate::receivers::{Arrived, command};
use crate::support::proxy::{Message, Proxy};
use crate::support::scene::{Scene, Way};
use crate::support::{Running, text};

/// A QEMU guest on the first host, and a daemon on the second one that receives it.
struct Place {
    scene: Scene,
    /// Provides the source's witness.
    _source: Member,
    destination: Member,
    proxy: Proxy,
    send: Running,
    etcd: EtcdCluster,
    table: PathBuf,
}

impl Place {
    /// Sends the guest, and holds back this message on its way.
    fn holding(message: Message) -> Self {
        let (scene, etcd) = (Scene::new(Version::V10_0, Way::Attached), EtcdCluster::start(1));
        let table = init(&scene.world, &etcd, "/vmferry");
        let template = format!("[[receive]]\nname = \"usual\"\nexec = '''{}'''\n", command(&scene));
        let plain = "plain = true\n";
        // In a directory of its own: nothing may be left in the source's.
        let of_host = |host: &str| host_table(&etcd, "/vmferry", host);
        let source = Member::start_with(&scene.world, "source", plain, &of_host("source"));
        let tables = of_host("b") + &template;
        let destination = Member::start_with(&scene.world, "b", plain, &tables);
        let proxy = Proxy::holding(&destination.address, "127.0.0.1", Some(message));
        let witness = text(&source.witness);
        let options = ["--plain", "--template", "usual", "--witness", witness];
        let send = scene.a.start(&scene.arguments(&proxy.address, &options, "30M"));
        proxy.await_held();
        Self { scene, _source: source, destination, proxy, send, etcd, table }
    }
}

#[test]
fn guardian_takes_the_guest_back() {
    let mut place = Place::holding(Message::Commit);
    place.send.kill();
    place.proxy.cut();
    place.scene.runs_on_here();
    assert_eq!(registers(&place.etcd), ["taken-back"]);
}

#[test]
fn guest_received_by_a_template_is_given_up_by_its_source() {
    let mut place = Place::holding(Message::Running);
    place.proxy.cut();
    assert_eq!(place.send.event("witness-decided")["register"], "owns");
    place.send.finish_by_ref().exited(0);
    assert!(place.scene.here.child.wait().unwrap().success());
    let received = place
        .destination
        .daemon
        .event_where(|event| event["event"] == "receiver" && event["said"]["event"] == "received");
    let arrived = Arrived::at(&place.scene, &received["said"]);
    arrived.check();
    let operator = place.scene.world.host("operator");
    let shown = shows(&operator, &place.table, "guests", |shown| is_only_on(shown, "b", "running"));
    let guest = &shown["guests"][0];
    assert_eq!((&guest["vmm"], &guest["name"]), (&"qemu".into(), &"tested".into()), "{shown}");
    assert_eq!(guest["socket"], text(&arrived.qmp), "{shown}");
    arrived.quit();
    shows(&operator, &place.table, "guests", |shown| {
        shown["guests"].as_array().unwrap().is_empty()
    });
    assert_eq!(registers(&place.etcd), ["owns"]);
}

#[test]
fn qemus_in_a_configured_directory_are_shown_until_they_end() {
    let (mut scene, etcd) = (Scene::new(Version::V10_0, Way::Attached), EtcdCluster::start(1));
    let table = init(&scene.world, &etcd, "/vmferry");
    let directory = scene.here.qmp.parent().unwrap();
    let tables = host_table(&etcd, "/vmferry", "a");
    let tables =
        tables.replace("[fleet.labels]", &format!("qemu = [{directory:?}]\n[fleet.labels]"));
    let _a = Member::start_with(&scene.world, "agent", "plain = true\n", &tables);
    let operator = scene.world.host("operator");
    let shown = shows(&operator, &table, "guests", |shown| is_only_on(shown, "a", "running"));
    let guest = &shown["guests"][0];
    assert_eq!((&guest["memory_bytes"], &guest["vcpus"]), (&(128 << 20).into(), &1.into()));
    assert_eq!(guest["socket"], text(&scene.here.qmp), "{shown}");
    // Another client uses the socket in between.
    Monitor::connect(&scene.here.qmp).execute("stop", json!({}));
    shows(&operator, &table, "guests", |shown| is_only_on(shown, "a", "paused"));
    scene.here.child.kill().unwrap();
    scene.here.child.wait().unwrap();
    shows(&operator, &table, "guests", |shown| shown["guests"].as_array().unwrap().is_empty());
}
