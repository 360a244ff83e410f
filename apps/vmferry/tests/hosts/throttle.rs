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

/// Moves a guest, and returns whether it was throttled.
fn move_with_a_throttle(kind: &str) -> bool {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let flags =
        ["--guest", kind, "--memory", "64M", "--workload", "ticks fill=2,text hot=8,random"];
    let vmm = a.guest("web", &flags);
    a.wait_for("web", |status| {
        status["report"]["rounds"].as_u64() >= Some(ROUNDS_TILL_INCOMPRESSIBLE)
    });
    let listen = format!("unix:{}", world.path("in.sock").display());
    let (mut destination, address) = b.receive(&["--listen", &listen]);
    // At this rate a round takes half a second, in which the guest rewrites most of its memory
    // even on a busy machine.
    let send = |downtime: &str, rounds: &str, throttle: &str| {
        let limits = ["--downtime-limit", downtime, "--max-rounds", rounds, "--throttle", throttle];
        let send = ["send", "web", "--to", &address, "--verify", "--max-bandwidth", "16M"];
        a.run(&[&send[..], &["--compress", "none"], &limits].concat())
    };

    // Few rounds and a short downtime: if a busy machine delays the guest for most of a round,
    // the guest appears to converge.
    send("5ms", "3", "0").failed(10, "does not converge");
    // No throttle is strong enough for this limit, so the guest stays.
    send("10us", "5", "99").failed(10, "does not converge");
    // At full speed; otherwise this would take a minute.
    a.check_guest("web");

    let sent = send("40ms", "16", "99");
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
