//! `send --qemu` over a network that drops all packets, between two network namespaces: a cable
//! that is pulled, and a black hole that drops packets silently.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::outcomes::Owner;
use crate::support::scene::{Scene, Way};
use crate::support::{BEFORE_COMMIT, Moment, Running, all, in_parallel, inside, text};
use vmferry_net_lab::{DESTINATION_ADDRESS, Namespaces};
use vmferry_qemu_lab::{Qemu, Version};

/// Longer than the 10 s after which a silent peer is given up, and shorter than the reconnect
/// timeout.
const LONG: Duration = Duration::from_secs(13);

/// Shorter than those 10 s.
const SHORT: Duration = Duration::from_secs(4);

/// How packets are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The interface is down.
    Cable,
    /// The interface is up and drops what is sent.
    BlackHole,
}

impl Fault {
    fn strike(self, network: &Namespaces, strikes: bool) {
        if self == Self::Cable {
            return network.set_cable(!strikes).unwrap();
        }
        let order = if strikes { "add" } else { "del" };
        let [nsenter, net] = inside(&network.source_path());
        let mut tc = Command::new(nsenter);
        tc.args([&net, "tc"]);
        tc.args(["qdisc", order, "dev", "source", "root", "blackhole"]);
        let done = tc.stdout(Stdio::null()).status().unwrap();
        assert!(done.success(), "tc qdisc {order} blackhole: {done}");
    }
}

fn receive(scene: &Scene, network: &Namespaces, name: &str) -> (Qemu, Running, String) {
    let there = scene.machine.incoming(&scene.lab, name);
    let tls = scene.world.tls();
    let at = format!("{DESTINATION_ADDRESS}:0");
    let arguments =
        ["receive", "--qemu", text(&there.qmp), "--once", "--listen", &at, "--tls", &tls];
    let mut receiving = scene.b.start_under(&inside(&network.destination_path()), &arguments);
    let address = receiving.event("listening")["address"].as_str().unwrap().to_owned();
    (there, receiving, address)
}

struct Case {
    way: Way,
    fault: Fault,
    moment: Moment,
    /// How long the fault lasts; `None`: until the end.
    lasts: Option<Duration>,
    /// Whether the guest has moved in the end.
    moves: bool,
}

fn run(case: &Case) {
    let network = Namespaces::make().unwrap();
    let mut scene = Scene::new(Version::V10_0, case.way);
    let (mut there, mut receiving, address) = receive(&scene, &network, "there");
    let tls = scene.world.tls();
    let reconnect = if case.lasts.is_some() { "30s" } else { "2s" };
    let link = ["--tls", &tls, "--server-name", "127.0.0.1", "--reconnect-timeout", reconnect];
    let mut send = scene
        .a
        .start_under(&inside(&network.source_path()), &scene.arguments(&address, &link, "10M"));
    send.event_where(case.moment.1);
    case.fault.strike(&network, true);
    if let Some(lasts) = case.lasts {
        // The pause is the fault itself and does not wait for an event.
        std::thread::sleep(lasts);
        case.fault.strike(&network, false);
    }
    let sent = send.finish();
    let (phase, lasts) =
        (case.moment.0, case.lasts.map(|time| format!(" for {} s", time.as_secs())));
    let what = format!("{:?} {:?} {phase} {lasts:?}", case.way, case.fault);
    let lost = sent.lines.iter().any(|event| event["event"] == "link-lost");
    assert_eq!(sent.code == Some(0), case.moves, "{what}: {sent:?}");
    let destination = if case.moves {
        assert_eq!(lost, case.lasts == Some(LONG), "{what}: {sent:?}");
        receiving.event("received");
        assert!(scene.here.child.wait().unwrap().success());
        there.check_guest();
        "has the guest".to_owned()
    } else {
        assert_eq!(sent.code, Some(12), "{what}: {sent:?}");
        scene.runs_on_here();
        if case.lasts.is_none() {
            case.fault.strike(&network, false);
        }
        receiving.finish().in_words()
    };
    let fault = match case.fault {
        Fault::Cable => "the link: down",
        Fault::BlackHole => "the link: black hole",
    };
    let fault = format!("{fault}{}", lasts.as_deref().unwrap_or(" for good"));
    let owner = if case.moves { Owner::Destination } else { Owner::Source };
    scene.note(&mut there, &fault, phase, (&sent, destination.as_str()), owner);
    if !case.moves {
        let (mut there, mut receiving, address) = receive(&scene, &network, "there-too");
        let arguments = scene.arguments(&address, &link, "30M");
        let sent = scene.a.start_under(&inside(&network.source_path()), &arguments).finish();
        assert_eq!(sent.code, Some(0), "{what}: {sent:?}");
        receiving.event("received");
        there.check_guest();
    }
}

/// A paused guest that is attached runs on until the link is back; a carried one stays at the
/// source from then on.
#[test]
fn lossy_link_leaves_exactly_one_guest() {
    if let Err(error) = Namespaces::make() {
        panic!("this test needs what is missing: {error:#}");
    }
    let [_, first, second, paused] = BEFORE_COMMIT;
    let case = |way, fault, moment, lasts, moves| Case { way, fault, moment, lasts, moves };
    let (attached, carried) = (Way::Attached, Way::Carried);
    let (cable, hole) = (Fault::Cable, Fault::BlackHole);
    let mut cases = Vec::new();
    if !all() {
        cases.push(case(carried, hole, paused, None, false));
    } else {
        for way in [attached, carried] {
            for fault in [cable, hole] {
                for moment in [first, second] {
                    cases.push(case(way, fault, moment, Some(SHORT), true));
                    cases.push(case(way, fault, moment, Some(LONG), true));
                    cases.push(case(way, fault, moment, None, false));
                }
                cases.push(case(way, fault, paused, None, false));
                cases.push(case(way, fault, paused, Some(LONG), way == attached));
                cases.push(case(way, fault, paused, Some(SHORT), true));
            }
        }
    }
    in_parallel(cases, |case| run(&case));
}
