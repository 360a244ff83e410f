//! Moves by one order, with agents, senders and receivers that are killed.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vmferry_etcd_lab::EtcdCluster;
use vmferry_kit::Cable;
use vmferry_qemu_lab::Version;

use crate::members::{is_only_on, shows};
use crate::place::{Member, host_table_at, init};
use crate::receivers::{Arrived, command};
use crate::support::scene::{Scene, Way};
use crate::support::{Host, Running, run_ok, text};

/// A QEMU guest on host `a`, and host `b` with a template for it.
struct Place {
    scene: Scene,
    a: Member,
    b: Member,
    /// To the daemon of `b`.
    cable: Cable,
    operator: Host,
    table: std::path::PathBuf,
    etcd: EtcdCluster,
}

impl Place {
    fn new() -> Self {
        let (scene, etcd) = (Scene::new(Version::V10_0, Way::Attached), EtcdCluster::start(1));
        let table = init(&scene.world, &etcd, "/vmferry");
        let cable = Cable::new();
        let link = |name: &str| format!("tls = {:?}\n", text(&certificate(&scene, name)));
        let sockets = format!("qemu = [{:?}]\n", scene.here.qmp.parent().unwrap());
        let fleet = |name: &str, address: &str, more: &str| {
            host_table_at(&etcd, "/vmferry", name, address, more)
        };
        let to_b = cable.address.to_string();
        let template =
            format!("[[receive]]\nname = \"default\"\nexec = '''{}'''\n", command(&scene));
        let tables = fleet("b", &to_b, "") + &template;
        let b = Member::start_with(&scene.world, "b", &link("b"), &tables);
        cable.lead_to(b.address.split_once(':').unwrap().1.parse().unwrap());
        let tables = fleet("a", "127.0.0.1:1", &sockets);
        let a = Member::start_with(&scene.world, "a", &link("a"), &tables);
        let operator = scene.world.host("operator");
        shows(&operator, &table, "guests", |shown| is_only_on(shown, "a", "running"));
        Self { scene, a, b, cable, operator, table, etcd }
    }

    fn order(&self, arguments: &[&str]) -> Running {
        let config = ["--config", text(&self.table)];
        self.operator.start(&[&["fleet", "move", "tested"], arguments, &config].concat())
    }

    /// The process that sends the guest.
    fn sender(&self) -> Pid {
        let is_sender = |pid: &i32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words: Vec<_> = line.split(|byte| *byte == 0).collect();
            words.contains(&&b"send"[..]) && words.contains(&text(&self.scene.here.qmp).as_bytes())
        };
        let numbers = std::fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        Pid::from_raw(numbers.into_iter().find(is_sender).expect("a sender")).unwrap()
    }

    /// Waits until the guest is on `b`, and checks it there.
    fn has_arrived(&mut self) {
        let shown =
            shows(&self.operator, &self.table, "guests", |shown| is_only_on(shown, "b", "running"));
        let arrived =
            Arrived::at(&self.scene, &serde_json::json!({ "qmp": shown["guests"][0]["socket"] }));
        arrived.check();
        assert!(self.scene.here.child.wait().unwrap().success());
        arrived.quit();
    }

    /// Waits until the guest is on `a`, and checks it there.
    fn has_stayed(&mut self) {
        self.scene.here.check_guest();
        shows(&self.operator, &self.table, "guests", |shown| is_only_on(shown, "a", "running"));
    }
}

/// Hosts are known by their certificates.
fn certificate(scene: &Scene, name: &str) -> std::path::PathBuf {
    scene.world.certificate_of(name, "ca", &format!("tls-{name}"))
}

fn phase(move_: &mut Running, wanted: &str) -> Value {
    move_.event_where(|event| event["event"] == "move" && event["phase"] == wanted)
}

#[test]
fn guest_moves_by_one_order() {
    let mut place = Place::new();
    let mut order = place.order(&[]);
    let ordered = phase(&mut order, "ordered");
    assert_eq!((&ordered["source"], &ordered["destination"]), (&"a".into(), &"b".into()));
    assert!(ordered["why"].as_str().unwrap().contains("largest part"), "{ordered}");
    let done = order.finish().exited(0);
    assert_eq!(done.last()["phase"], "done", "{done:?}");
    assert!(done.last()["downtime_ms"].as_f64() > Some(0.0), "{done:?}");
    place.has_arrived();
}

#[test]
fn agents_at_both_ends_are_killed_in_the_middle() {
    let mut place = Place::new();
    // The host counts as present until its agent's lease ends.
    kill_process(Pid::from_raw(place.b.agent()).unwrap(), Signal::KILL).unwrap();
    place.b.daemon.finish_by_ref().exited(1);
    let mut order = place.order(&["--to", "b", "--max-bandwidth", "30M"]);
    phase(&mut order, "ordered");
    place.b.restart();
    place.cable.lead_to(place.b.address.split_once(':').unwrap().1.parse().unwrap());
    let sending = phase(&mut order, "sending");
    assert!(sending["session"].is_string(), "{sending}");
    place.a.daemon.kill();
    place.a.restart();
    order.finish().exited(0);
    place.has_arrived();
}

#[test]
fn cancelled_move_leaves_the_guest_where_it_is() {
    let mut place = Place::new();
    let mut order = place.order(&["--max-bandwidth", "4M"]);
    phase(&mut order, "sending");
    let table = place.table.clone();
    let cancel = ["fleet", "cancel", "tested", "--config", text(&table)];
    run_ok(&place.operator, &cancel);
    order.finish().failed(11, "cancelled: tested stays on a");
    place.has_stayed();
    place.operator.run(&cancel).failed(9, "no migration of tested is under way");
}

#[test]
fn killed_sender_leaves_the_guest_and_the_move_says_so() {
    let mut place = Place::new();
    let mut order = place.order(&["--max-bandwidth", "4M"]);
    phase(&mut order, "sending");
    let sender = place.sender();
    kill_process(sender, Signal::KILL).unwrap();
    order.finish().failed(1, "the process that sent it was killed; the guest stays here");
    place.has_stayed();
    // The next order is a new one.
    place.order(&[]).finish().exited(0);
    place.has_arrived();
}

#[test]
fn orders_that_cannot_be_followed_move_nothing() {
    let mut place = Place::new();
    let table = place.table.clone();
    let config = ["--config", text(&table)];
    let refused = |place: &Place, order: &[&str], code: i32, why: &str| {
        place.operator.run(&[&["fleet", "move"], order, &config].concat()).failed(code, why);
    };
    refused(&place, &["other"], 8, "no host of the fleet has a guest other");
    refused(&place, &["tested", "--to", "c"], 2, "the fleet at /vmferry has no host c");
    refused(&place, &["tested", "--to", "a"], 6, "a has it already");
    refused(&place, &["tested", "--template", "large"], 6, "b has no template large");
    refused(&place, &["tested", "--label", "rack=r9"], 6, "b lacks the label rack=r9");
    run_ok(&place.operator, &[&["fleet", "cordon", "b"][..], &config].concat());
    refused(&place, &["tested"], 6, "b is cordoned");
    run_ok(&place.operator, &[&["fleet", "uncordon", "b"][..], &config].concat());
    let key = "/vmferry/migrations/6b1f7a4c-0000-4000-8000-000000000007";
    for (object, why) in [("edited", "was it edited"), ("{\"version\":2}", "upgrade vmferry")] {
        place.etcd.etcdctl_ok(&["put", key, object]);
        refused(&place, &["tested"], 9, why);
    }
    place.etcd.etcdctl_ok(&["del", key]);
    // A source that nobody has ordered to send is not admitted.
    let (tls, witness) = (certificate(&place.scene, "a2"), text(&place.a.witness).to_owned());
    let to = format!("tls:{}", place.cable.address);
    let send = ["send", "--qemu", text(&place.scene.here.qmp), "--to", &to, "--tls", text(&tls)];
    let more = ["--template", "default", "--witness", &witness];
    let id = ["--destination-id", "spiffe://vmferry/host/b"];
    place.scene.a.run(&[&send[..], &more, &id].concat()).failed(4, "has no policy");
    place.has_stayed();
}
