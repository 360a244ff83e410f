//! Receivers that are killed, and sources in doubt.

use rustix::process::{Pid, Signal, kill_process};
use vmferry_handover::journal::{FileJournal, Journal, Record, Side, sessions};

use crate::place::{Arrived, Place};
use crate::support::proxy::{Message, Proxy};
use crate::support::scene::Way;

/// A migration whose COMMIT is held back, and the receiver's PID.
fn held_at_commit(place: &mut Place) -> (crate::support::Running, Proxy, Pid) {
    let proxy = Proxy::holding(&place.address(), "127.0.0.1", Some(Message::Commit));
    let send = place.send_from(&place.scene.a, &proxy.address, "usual");
    let listening = place.receiver_says("listening");
    let pid = Pid::from_raw(listening["pid"].as_i64().unwrap() as i32).unwrap();
    proxy.await_held();
    (send, proxy, pid)
}

#[test]
fn guest_of_a_killed_receiver_is_continued_and_its_source_is_answered() {
    let mut place = Place::plain(Way::Attached);
    let (send, proxy, receiver) = held_at_commit(&mut place);
    // With its daemon, so that the next one finds what is left.
    place.daemon.kill();
    kill_process(receiver, Signal::KILL).unwrap();
    let journals = place.scene.b.runtime.join("journal");
    // What a receiver leaves that dies after this record and before it runs the guest.
    let session = sessions(&journals).unwrap()[0].session;
    let written = loop {
        // The kernel releases the journal of the killed process when it has ended.
        match FileJournal::reopen(&journals, session, Side::Destination) {
            Ok((mut journal, _)) => break journal.append(&Record::RunIntent),
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(5)),
        }
    };
    written.unwrap();
    place.restart();
    let found = place.receiver_says("found");
    assert_eq!(found["continued"], true, "{found}");
    let arrived = Arrived::at(&place.scene, &found);
    proxy.lose();
    send.finish().exited(0);
    arrived.check();
    arrived.quit();
    place.no_receiver_is_left();
}

#[test]
fn daemon_answers_for_a_receiver_that_has_gone_and_gives_the_guest_back() {
    let mut place = Place::plain(Way::Attached);
    let (send, proxy, receiver) = held_at_commit(&mut place);
    kill_process(receiver, Signal::KILL).unwrap();
    proxy.lose();
    send.finish().exited(1);
    place.scene.runs_on_here();
    place.no_receiver_is_left();
}
