//! `vmferry fleet watch`.

use rustix::process::Signal;

use crate::place::Place;
use crate::support::text;
use crate::support::trial::GUEST;

#[test]
fn changes_are_shown_as_they_happen() {
    let mut place = Place::new();
    let operator = place.world.host("operator");
    let mut watch = operator.start(&["fleet", "watch", "--config", text(&place.table)]);
    for host in ["a", "b"] {
        watch.event_where(|event| event["host"] == host && event["present"] == true);
    }
    let mut web = place.a.host.guest("web", &GUEST);
    let guest = watch.event_where(|event| event["event"] == "guest" && event["name"] == "web");
    assert_eq!((&guest["host"], &guest["phase"]), (&"a".into(), &"running".into()), "{guest}");
    place.etcd.kill(0);
    let silent = watch.event("etcd");
    assert_eq!(silent["answers"], false, "{silent}");
    place.etcd.restart(0);
    place.etcd.wait_for(0);
    assert_eq!(watch.event("etcd")["answers"], true);
    web.kill();
    watch.event_where(|event| event["name"] == "web" && event["gone"] == true);
    place.b.daemon.signal(Signal::TERM);
    watch.event_where(|event| event["host"] == "b" && event["present"] == false);
    watch.signal(Signal::INT);
    watch.finish().exited(0);
}
