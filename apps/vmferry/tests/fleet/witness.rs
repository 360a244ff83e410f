//! Handovers in doubt that the witness decides, with no operator and no link between the hosts.

use rustix::process::{Pid, Signal, kill_process};

use crate::place::Place;
use crate::support::proxy::Message;

/// A guest that needs seconds to fetch the pages that it has rewritten.
const LACKING: [&str; 4] =
    ["--memory", "64M", "--workload", "fill=16,text hot=32,random,rate=2000 ticks"];

#[test]
fn guest_moves_with_a_witness() {
    let mut place = Place::new();
    let mut moved = place.send(Message::Commit);
    assert_eq!(place.registers(), ["open"]);
    moved.proxy.release();
    moved.send.finish().exited(0);
    moved.guest.finish_by_ref().exited(0);
    place.b.host.check_guest("web");
    let reported = place.b.daemon.event("reported");
    assert_eq!((&reported["word"], &reported["register"]), (&"owns".into(), &"owns".into()));
    assert_eq!(place.registers(), ["owns"]);
}

#[test]
fn source_takes_the_guest_back_when_commit_was_lost_with_the_link() {
    let place = Place::new();
    let moved = place.send(Message::Commit);
    moved.proxy.cut();
    // The receiver still waits for COMMIT, which never comes.
    moved.send.finish().failed(12, "has given the guest back to this host");
    place.a.host.check_guest("web");
    assert_eq!(place.registers(), ["taken-back"]);
}

#[test]
fn source_gives_the_guest_up_when_the_witness_says_where_it_is() {
    let mut place = Place::new();
    let mut moved = place.send(Message::Running);
    moved.proxy.cut();
    assert_eq!(moved.send.event("witness-decided")["register"], "owns");
    moved.send.finish().exited(0);
    moved.guest.finish_by_ref().exited(0);
    assert_eq!(place.b.daemon.event("reported")["word"], "owns");
    place.b.host.check_guest("web");
    assert_eq!(place.registers(), ["owns"]);
}

#[test]
fn guest_of_a_killed_receiver_is_given_back_by_the_agent() {
    let mut place = Place::new();
    let mut moved = place.send(Message::Commit);
    moved.receive.kill();
    assert_eq!(place.b.daemon.event("reported")["word"], "aborted");
    moved.proxy.cut();
    moved.send.finish().failed(1, "its host has told the witness that its journal says ABORTED");
    place.a.host.check_guest("web");
    assert_eq!(place.registers(), ["aborted"]);
}

#[test]
fn guest_stays_when_etcd_is_silent_at_the_claim() {
    let mut place = Place::new();
    let moved = place.send(Message::Commit);
    place.etcd.stop(0);
    moved.proxy.release();
    moved.send.finish().failed(12, "did not answer for");
    place.a.host.check_guest("web");
    place.etcd.resume(0);
    // It may have learned of the claim, and the guest stays all the same.
    let reported = place.b.daemon.event("reported");
    assert_eq!((&reported["word"], &reported["register"]), (&"aborted".into(), &"aborted".into()));
}

#[test]
fn doubt_ends_when_etcd_is_back() {
    let mut place = Place::new();
    let mut moved = place.send(Message::Commit);
    place.etcd.kill(0);
    moved.proxy.cut();
    moved.send.event("in-doubt");
    place.etcd.restart(0);
    moved.send.finish().failed(12, "has given the guest back to this host");
    place.a.host.check_guest("web");
}

#[test]
fn agents_that_are_killed_decide_nothing() {
    let mut place = Place::new();
    let mut moved = place.send(Message::Running);
    // Without the destination's agent nobody reports that the guest is there.
    kill_process(Pid::from_raw(place.b.agent()).unwrap(), Signal::KILL).unwrap();
    let ended = place.b.daemon.finish_by_ref();
    ended.failed(1, "the daemon's agent (`vmferry join-fleet`) has ended (signal: 9");
    moved.proxy.cut();
    moved.send.event("in-doubt");
    assert_eq!(place.registers(), ["claimed"]);
    place.a.daemon.kill();
    place.a.restart();
    place.b.restart();
    moved.send.finish().exited(0);
    moved.guest.finish_by_ref().exited(0);
    place.b.host.check_guest("web");
}

#[test]
fn guest_that_lacks_pages_belongs_to_the_destination_and_needs_both_hosts() {
    let mut place = Place::new();
    let post_copy = ["--post-copy", "now", "--max-bandwidth", "6M", "--compress", "none"];
    let mut moved = place.send_guest(&LACKING, Message::Answer, &post_copy);
    moved.proxy.cut();
    assert_eq!(place.b.daemon.event("reported")["register"], "fetching");
    assert_eq!(moved.send.event("witness-decided")["register"], "fetching");
    moved.send.event("serving");
    moved.proxy.heal();
    moved.send.finish().exited(0);
    moved.guest.finish_by_ref().exited(0);
    place.b.host.check_guest("web");
    assert_eq!(place.b.daemon.event("reported")["register"], "owns");
}
