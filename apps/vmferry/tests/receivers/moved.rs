//! Guests that arrive.

use rustix::process::Signal;
use vmferry_handover::journal::{Verdict, sessions};

use crate::place::{Arrived, Place};
use crate::support::scene::Way;
use crate::support::{all, in_parallel};

fn ways() -> Vec<Way> {
    if all() { vec![Way::Attached, Way::Carried] } else { vec![Way::Attached] }
}

#[test]
fn guest_arrives_and_outlives_daemons() {
    in_parallel(ways(), |way| {
        let mut place = Place::new(way);
        let sent = place.send("usual").finish().exited(0);
        assert_eq!(sent.last()["digest_match"], true, "{sent:?}");
        assert!(place.scene.here.child.wait().unwrap().success());
        let arrived = place.received();
        arrived.check();
        let [session] = &sessions(&place.scene.b.runtime.join("journal")).unwrap()[..] else {
            panic!("one session")
        };
        assert_eq!(session.verdict, Verdict::Here);
        place.restart();
        arrived.check();
        // An orderly end of the daemon leaves it, too.
        place.daemon.signal(Signal::TERM);
        place.daemon.finish_by_ref().exited(0);
        arrived.check();
        place.restart();
        arrived.quit();
        place.no_receiver_is_left();
    });
}

#[test]
fn migration_goes_on_through_the_next_daemon() {
    in_parallel(ways(), |way| {
        let mut place = Place::new(way);
        let mut send = place.send("usual");
        send.event_where(|event| event["event"] == "round-started");
        place.daemon.kill();
        place.cable.cut();
        send.event("link-lost");
        place.restart();
        place.cable.mend();
        send.event("link-restored");
        let sent = send.finish().exited(0);
        assert_eq!(sent.last()["digest_match"], true, "{sent:?}");
        assert!(place.scene.here.child.wait().unwrap().success());
        // The receiver's daemon has gone, and nobody hears its events.
        let arrived = place.left_by_receivers().remove(0);
        arrived.check();
        arrived.quit();
        place.no_receiver_is_left();
    });
}

#[test]
fn two_guests_arrive_at_once() {
    let mut place = Place::new(Way::Attached);
    let mut other = place.scene.machine.start_booted(&place.scene.lab, "other");
    let first = place.send("usual");
    // The guests have the same name, so they are on different hosts.
    let (host, address) = (place.scene.world.host("c"), place.address());
    let here = std::mem::replace(&mut place.scene.here, other);
    let second = place.send_from(&host, &address, "usual");
    other = std::mem::replace(&mut place.scene.here, here);
    second.finish().exited(0);
    first.finish().exited(0);
    assert!(other.child.wait().unwrap().success());
    let arrived: [Arrived; 2] = [place.received(), place.received()];
    assert_ne!(arrived[0].qmp, arrived[1].qmp);
    for arrived in arrived {
        arrived.check();
        arrived.quit();
    }
    place.no_receiver_is_left();
}
