//! A guest that writes faster than the link carries, and that moves only with a throttle.

use vmferry_kit::need_kvm;

use crate::support::World;

/// In each of its rounds over a page the guest writes one more incompressible word, and a page has
/// 512 words. After this many rounds compression no longer helps.
const ROUNDS_TILL_INCOMPRESSIBLE: u64 = 500;

/// A busy machine can delay the guest so much that it converges without a throttle. Then another
/// guest is moved.
const MOST_ATTEMPTS: usize = 8;

#[test]
fn throttle_moves_a_guest_that_outruns_the_link() {
    need_kvm();
    for kind in ["process", "kvm"] {
        let throttled = (0..MOST_ATTEMPTS).any(|_| move_with_a_throttle(kind));
        assert!(throttled, "{kind}: no guest outran the link");
    }
}

/// Moves a guest, and returns whether only a throttle made it converge.
fn move_with_a_throttle(kind: &str) -> bool {
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
    // At this rate a round takes half a second, in which the guest rewrites everything. On a fast
    // machine, 1 % of a guest would outrun a slower link.
    let send = |downtime: &str, rounds: &str, throttle: &str| {
        let limits = ["--downtime-limit", downtime, "--max-rounds", rounds, "--throttle", throttle];
        let send = ["send", "web", "--to", &address, "--verify", "--max-bandwidth", "64M"];
        a.run(&[&send[..], &["--compress", "none"], &limits].concat())
    };

    // No throttle is strong enough for the second limit.
    for (downtime, rounds, throttle) in [("5ms", "3", "0"), ("10us", "5", "99")] {
        let sent = send(downtime, rounds, throttle);
        if sent.code == Some(0) {
            return false;
        }
        sent.failed(10, "does not converge");
    }
    // At full speed; otherwise this would take a minute.
    a.check_guest("web");

    let sent = send("40ms", "40", "99");
    assert_eq!(sent.code, Some(0), "{kind}: {sent:?}");
    let stats = sent.last();
    assert_eq!(stats["verify_match"], true, "{kind}: {stats}");
    let rounds = stats["rounds"].as_array().unwrap();
    let throttle = |round: &serde_json::Value| round["throttle_percent"].as_u64().unwrap();
    assert_eq!(throttle(&rounds[0]), 0, "{kind}: before anything was known: {stats}");
    let throttled = throttle(rounds.last().unwrap()) > 0;
    let told = sent.lines.iter().any(|event| event["event"] == "throttled");
    assert!(told || !throttled, "{kind}: {sent:?}");
    assert_eq!(vmm.finish().code, Some(0), "{kind}: the old VMM ends in order");
    destination.event("serving");
    b.check_guest("web");
    throttled
}

#[test]
fn throttle_is_at_most_99_percent() {
    let world = World::new();
    let demo = ["demo", "--memory", "64M", "--hot", "8M", "--transport", "unix", "--throttle"];
    let ended = world.host("x").run(&[&demo[..], &["99"]].concat()).exited(0);
    assert_eq!(ended.last()["ok"], true, "{ended:?}");
    world.host("x").run(&[&demo[..], &["100"]].concat()).exited(2);
}
