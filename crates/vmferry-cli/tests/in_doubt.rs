//! The link is cut while COMMIT is on its way: the source has promised the guest away and knows
//! nothing of what came of it.

mod support;

use serde_json::Value;
use support::proxy::Proxy;
use support::{Ended, Host, Running, World, run_ok};

struct Doubt {
    world: World,
    a: Host,
    b: Host,
    guest: Running,
    destination: Running,
    send: Running,
    proxy: Proxy,
}

impl Doubt {
    fn new() -> Self {
        Self::with(&[], &[])
    }

    /// With options for the source and for the destination.
    fn with(source: &[&str], destination: &[&str]) -> Self {
        let world = World::new();
        let (a, b) = (world.host("a"), world.host("b"));
        let guest = a.guest("web", &["--memory", "64M", "--workload", "hot=4,random ticks"]);
        let link = ["--listen", "tcp:127.0.0.1:0", "--plain", "--once"];
        let (destination, address) = b.receive(&[&link[..], destination].concat());
        let proxy = Proxy::before(&address);
        let link = ["send", "web", "--to", &proxy.address, "--plain", "--verify"];
        let mut send = a.start(&[&link[..], source].concat());
        send.event("in-doubt");
        assert!(proxy.is_cut());
        let status = a.status("web");
        assert_eq!(status["phase"], "paused", "{status}");
        assert_eq!(status["migration"]["in_doubt"], true, "{status}");
        Self { world, a, b, guest, destination, send, proxy }
    }

    /// The guest is given away: the command's end, when the old VMM has ended in order.
    fn given_away(&mut self) -> Ended {
        while self.send.line().is_some() {}
        assert_eq!(self.guest.child.wait().unwrap().code(), Some(0));
        self.send.ended()
    }
}

#[test]
fn the_link_heals_and_the_destination_gets_its_commit() {
    let mut doubt = Doubt::new();
    doubt.proxy.heal();
    doubt.destination.event("serving");
    let sent = doubt.given_away();
    assert_eq!(sent.code, Some(0), "{sent:?}");
    assert_eq!(sent.last()["digest_match"], true);
    doubt.b.check_guest("web");
}

/// The question and COMMIT go over a channel that is greeted anew.
#[test]
fn the_doubt_ends_between_two_releases_too() {
    let before = ["--protocol", "1"];
    for (source, destination) in [(&before[..], &[][..]), (&[][..], &before[..])] {
        let mut doubt = Doubt::with(source, destination);
        doubt.proxy.heal();
        doubt.destination.event("serving");
        let sent = doubt.given_away();
        assert_eq!(sent.code, Some(0), "{sent:?}");
        assert_eq!(sent.last()["protocol"], 1);
        doubt.b.check_guest("web");
    }
}

#[test]
fn the_destination_dies_and_its_successor_gives_its_word() {
    let mut doubt = Doubt::new();
    doubt.destination.kill();
    // Another process on the same host, with the same journals and at the same address.
    let address = doubt.proxy.target();
    let _successor = doubt.b.receive(&["--listen", &address, "--plain"]);
    doubt.proxy.heal();
    let sent = doubt.send.finish();
    assert_eq!(sent.code, Some(1), "{sent:?}");
    assert!(sent.last()["error"]["message"].as_str().unwrap().contains("ABORTED"), "{sent:?}");
    doubt.a.check_guest("web");
}

#[test]
fn a_host_that_does_not_know_the_session_ends_no_doubt() {
    let mut doubt = Doubt::new();
    doubt.destination.kill();
    let stranger = Host { runtime: doubt.world.path("host-stranger") };
    let address = doubt.proxy.target();
    let (mut successor, _) = stranger.receive(&["--listen", &address, "--plain"]);
    doubt.proxy.heal();
    // It has asked, and the answer was UNKNOWN: a second question proves that it goes on asking.
    let status = doubt.a.wait_for("web", |status| status["migration"]["phase"].is_string());
    assert_eq!(
        (&status["phase"], &status["migration"]["in_doubt"]),
        (&"paused".into(), &true.into())
    );
    successor.kill();
    run_ok(&doubt.a, &["resolve", "web", "--source-resumes"]);
    assert_ne!(doubt.send.finish().code, Some(0));
    doubt.a.check_guest("web");
}

#[test]
fn the_operator_says_that_the_source_resumes() {
    let mut doubt = Doubt::new();
    doubt.a.run(&["quit", "web"]).failed(14, "resolve");
    doubt.a.run(&["cancel", "web"]);
    assert_eq!(doubt.a.status("web")["phase"], "paused", "too late to cancel");
    // What the operator reads on the other host, before and after it is switched off.
    let there = |led: bool| {
        let sessions = run_ok(&doubt.b, &["status", "--sessions"]);
        let session = &sessions["sessions"][0];
        assert_eq!(session["side"], "destination", "{sessions}");
        assert_eq!((&session["verdict"], &session["led"]), (&"there".into(), &led.into()));
    };
    there(true);
    doubt.destination.kill();
    there(false);
    run_ok(&doubt.a, &["resolve", "web", "--source-resumes"]);
    assert_ne!(doubt.send.finish().code, Some(0));
    doubt.a.check_guest("web");
}

#[test]
fn the_operator_says_that_the_destination_owns() {
    let mut doubt = Doubt::new();
    run_ok(&doubt.a, &["resolve", "web", "--destination-owns"]);
    let sent = doubt.given_away();
    assert_eq!(sent.code, Some(0), "{sent:?}");
}

#[test]
fn the_vmm_dies_in_doubt_and_the_journal_remembers() {
    let mut doubt = Doubt::new();
    doubt.guest.kill();
    let status = run_ok(&doubt.a, &["status"]);
    let doubtful: &Value = &status["in_doubt"];
    assert_eq!(doubtful.as_array().map(Vec::len), Some(1), "{status}");
    assert_eq!(doubtful[0]["guest"], "web");
    run_ok(&doubt.a, &["resolve", "web", "--destination-owns"]);
    let status = run_ok(&doubt.a, &["status"]);
    assert_eq!(status["in_doubt"], Value::Array(vec![]), "{status}");
    doubt.a.run(&["resolve", "web", "--destination-owns"]).failed(8, "no guest and no session");
}
