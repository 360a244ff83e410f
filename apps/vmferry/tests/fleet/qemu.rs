//! Guests of QEMU in a fleet: received by a template, sent by processes that are killed.

use vmferry_etcd_lab::EtcdCluster;
use vmferry_qemu_lab::Version;

use crate::place::{Member, init, registers, table};
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
}

impl Place {
    /// Sends the guest, and holds back this message on its way.
    fn holding(message: Message) -> Self {
        let (scene, etcd) = (Scene::new(Version::V10_0, Way::Attached), EtcdCluster::start(1));
        init(&scene.world, &etcd, "/vmferry");
        let fleet = table(&etcd, "/vmferry");
        let template = format!("[[receive]]\nname = \"usual\"\nexec = '''{}'''\n", command(&scene));
        let plain = "plain = true\n";
        // In a directory of its own: nothing may be left in the source's.
        let source = Member::start_with(&scene.world, "source", plain, &fleet);
        let tables = format!("{fleet}{template}");
        let destination = Member::start_with(&scene.world, "b", plain, &tables);
        let proxy = Proxy::holding(&destination.address, "127.0.0.1", Some(message));
        let witness = text(&source.witness);
        let options = ["--plain", "--template", "usual", "--witness", witness];
        let send = scene.a.start(&scene.arguments(&proxy.address, &options, "30M"));
        proxy.await_held();
        Self { scene, _source: source, destination, proxy, send, etcd }
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
    arrived.quit();
    assert_eq!(registers(&place.etcd), ["owns"]);
}
