//! A guest that writes faster than the link carries, which takes a throttle to move.

use vmferry_kit::need_kvm;

use crate::support::World;

/// A page gets another word that can't be compressed in each of the guest's rounds over it, and has 512:
/// by then compression is no way out.
const ROUNDS_TILL_INCOMPRESSIBLE: u64 = 500;

#[test]
fn a_guest_that_outruns_the_link_arrives_throttled() {
    need_kvm();
    let kinds = ["process", "kvm"];
    for kind in kinds {
        let world = World::new();
        let (a, b) = (world.host("a"), world.host("b"));
        let flags =
            ["--guest", kind, "--memory", "64M", "--workload", "ticks fill=4,text hot=32,random"];
        let vmm = a.guest("web", &flags);
        a.wait_for("web", |status| {
            status["report"]["rounds"].as_u64() >= Some(ROUNDS_TILL_INCOMPRESSIBLE)
        });
        let listen = format!("unix:{}", world.path("in.sock").display());
        let (mut destination, address) = b.receive(&["--listen", &listen]);
        // At this rate a round takes half a second, in which the guest rewrites all.
        let send = |downtime: &str, rounds: &str, throttle: &str| {
            let limits =
                ["--downtime-limit", downtime, "--max-rounds", rounds, "--throttle", throttle];
            let send = ["send", "web", "--to", &address, "--verify", "--max-bandwidth", "64M"];
            a.run(&[&send[..], &["--compress", "none"], &limits].concat())
        };

        // Few rounds and a short downtime: a guest that the machine holds up for most of a round, as a
        // busy one may, looks as if it converged.
        send("40ms", "3", "0").failed(10, "does not converge");
        // No throttle helps to keep to this one, so the guest stays.
        send("10us", "5", "99").failed(10, "does not converge");
        // With its full speed, or this would take a minute.
        a.check_guest("web");

        let sent = send("40ms", "16", "99");
        assert_eq!(sent.code, Some(0), "{kind}: {sent:?}");
        let stats = sent.last();
        assert_eq!(stats["verify_match"], true, "{kind}: {stats}");
        let rounds = stats["rounds"].as_array().unwrap();
        let throttle = |round: &serde_json::Value| round["throttle_percent"].as_u64().unwrap();
        assert_eq!(throttle(&rounds[0]), 0, "{kind}: before anything was known: {stats}");
        assert!(throttle(rounds.last().unwrap()) > 0, "{kind}: {stats}");
        assert!(sent.lines.iter().any(|event| event["event"] == "throttled"), "{kind}: {sent:?}");
        assert_eq!(vmm.finish().code, Some(0), "{kind}: the old VMM ends in order");
        destination.event("serving");
        b.check_guest("web");
    }
}

#[test]
fn a_throttle_takes_up_to_99_per_cent() {
    let world = World::new();
    let demo = ["demo", "--memory", "64M", "--hot", "8M", "--transport", "unix", "--throttle"];
    let ended = world.host("x").run(&[&demo[..], &["99"]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(ended.last()["ok"], true, "{ended:?}");
    assert_eq!(world.host("x").run(&[&demo[..], &["100"]].concat()).code, Some(2));
}
