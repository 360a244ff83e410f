//! What is refused before anything moves.

use vmferry_etcd_lab::EtcdCluster;

use crate::place::{Member, Place, init, table};
use crate::support::trial::GUEST;
use crate::support::{World, text};

#[test]
fn hosts_must_have_the_same_witness() {
    let place = Place::new();
    init(&place.world, &place.etcd, "/other");
    let other = Member::start(&place.world, "c", &place.etcd, "/other");
    let guest = place.a.host.guest("web", &GUEST);
    let (ours, theirs) = (text(&place.b.witness), text(&other.witness));
    let source = text(&place.a.witness);
    for (there, here, why) in [
        (None, Some(source), "witness is"),
        (Some(ours), None, "witness is"),
        (Some(theirs), Some(source), "witness is"),
    ] {
        let options = |witness: Option<&str>| {
            let both = witness.map(|path| vec!["--witness".to_owned(), path.to_owned()]);
            both.unwrap_or_default()
        };
        let (there, here) = (options(there), options(here));
        let mut receive = vec!["--listen", "tcp:127.0.0.1:0", "--plain", "--once"];
        receive.extend(there.iter().map(String::as_str));
        let (receive, address) = place.b.host.receive(&receive);
        let mut send = vec!["send", "web", "--to", &address, "--plain"];
        send.extend(here.iter().map(String::as_str));
        place.a.host.run(&send).failed(6, why);
        drop(receive);
        place.a.host.check_guest("web");
    }
    assert!(place.registers().is_empty());
    drop(guest);
}

#[test]
fn host_without_an_agent_moves_nothing_with_a_witness() {
    let world = World::without_certificates();
    let (a, b) = (world.host("a"), world.host("b"));
    let _guest = a.guest("web", &GUEST);
    let nowhere = world.path("nowhere");
    let why = "no process provides a witness at";
    let receive = ["receive", "--listen", "tcp:127.0.0.1:0", "--plain"];
    b.run(&[&receive[..], &["--witness", text(&nowhere)]].concat()).failed(3, why);
    let send = ["send", "web", "--to", "tcp:127.0.0.1:9", "--plain"];
    a.run(&[&send[..], &["--witness", text(&nowhere)]].concat()).failed(3, why);
    a.check_guest("web");
}

#[test]
fn configurations_that_are_wrong_say_why() {
    let world = World::new();
    let etcd = EtcdCluster::start(1);
    let host = world.host("a");
    let config = world.path("fleet.toml");
    let refuse = |written: &str, code: i32, why: &str| {
        std::fs::write(&config, written).unwrap();
        host.run(&["fleet", "init", "--config", text(&config)]).failed(code, why);
    };
    let right = table(&etcd, "/vmferry");
    refuse("listen = \"127.0.0.1:0\"\n", 2, "has no table [fleet]");
    refuse(&right.replace("/vmferry", "vmferry"), 2, "can't be the prefix of a fleet");
    refuse("[fleet]\netcd = [\"https://127.0.0.1:1\"]\n", 2, "names no certificates");
    refuse("[fleet]\netcd = [\"127.0.0.1:1\"]\nplain = true\n", 2, "must begin with http://");
    refuse("[fleet]\netcd = []\nplain = true\n", 2, "no address of etcd");
    refuse("[fleet]\netcd = [\"http://127.0.0.1:1\"]\nplain = true\n", 3, "no member of etcd");
    refuse(&format!("{right}colour = 1\n"), 2, "is wrong at line 5: unknown field `colour`");
    let foreign = EtcdCluster::start(1);
    let wrong = right.replace(text(&etcd.client("host")), text(&foreign.client("host")));
    refuse(&wrong, 3, "certificate");
    let missing = right.replace(text(&etcd.client("host")), "/nonexistent");
    refuse(&missing, 2, "/nonexistent/ca.pem can't be read");
    // The daemon says it without being started.
    let daemon = world.path("daemon.toml");
    for (table, why) in [
        (&missing, "does not say which host this is"),
        (&format!("{missing}host = \"a/b\"\n"), "can't be the name of a host"),
        (&format!("{missing}host = \"a\"\n"), "does not say where other hosts reach this one"),
        (&format!("{missing}host = \"a\"\naddress = \"a:7002\"\n"), "can't be read"),
        (
            &format!("{missing}host = \"a\"\naddress = \"a:1\"\nlabels = {{ rack = \"a b\" }}\n"),
            "can't be a label of a host",
        ),
        (
            &format!(
                "{missing}host = \"a\"\naddress = \"a:1\"\n[[fleet.network]]\nname = \"n\"\n\
                 address = \"a:1\"\nbandwidth = \"fast\"\n"
            ),
            "`bandwidth` of network n is wrong",
        ),
    ] {
        let written = format!("listen = \"127.0.0.1:0\"\nplain = true\n{table}");
        std::fs::write(&daemon, written).unwrap();
        host.run(&["daemon", "--check", "--config", text(&daemon)]).failed(2, why);
    }
    std::fs::write(&config, &right).unwrap();
    let restored = ["fleet", "init", "--restored", "--config", text(&config)];
    host.run(&restored).failed(9, "etcd has no fleet at /vmferry");
    etcd.etcdctl_ok(&["put", "/vmferry/fleet", r#"{"version":2}"#]);
    let init = ["fleet", "init", "--config", text(&config)];
    host.run(&init).failed(9, "upgrade vmferry on this host");
}
