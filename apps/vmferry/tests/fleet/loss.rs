//! Hosts that are fenced and declared lost.

use std::path::PathBuf;

use serde_json::Value;

use crate::members::{is_only_on, shows};
use crate::place::{Place, table};
use crate::support::proxy::Message;
use crate::support::{Ended, Running, text};

impl Place {
    /// Declares `a` lost, with this command as the one that fences it.
    fn declare_lost(&self, fence: &[&str], options: &[&str]) -> Ended {
        let file: PathBuf = self.world.path("operator.toml");
        let table = table(&self.etcd, "/vmferry");
        std::fs::write(&file, format!("{table}fence = {fence:?}\n")).unwrap();
        let declare = ["fleet", "declare-lost", "a", "--config", text(&file)];
        self.world.host("operator").run(&[&declare[..], options].concat())
    }

    fn fleet(&self, command: &[&str]) -> Ended {
        let config = ["--config", text(&self.table)];
        self.world.host("operator").run(&[&["fleet"], command, &config].concat())
    }
}

fn pid(process: &Running) -> String {
    process.child.id().to_string()
}

#[test]
fn fencing_that_has_not_succeeded_changes_nothing() {
    let place = Place::new();
    let mut moved = place.send(Message::Commit);
    let heard = ["--although-heard"];
    place.declare_lost(&["true"], &[]).failed(9, "host a is heard: it is not lost");
    place.declare_lost(&[], &heard).failed(2, "no command fences hosts");
    place.declare_lost(&["fence", "{label:bmc}"], &heard).failed(2, "needs the label bmc");
    place.declare_lost(&["false"], &heard).failed(1, "has failed (exit status: 1): nothing was");
    let hangs = place.declare_lost(&["sleep", "1000"], &["--although-heard", "--fence-timeout=1s"]);
    hangs.failed(1, "has not ended within 1s, and was killed: nothing was changed");
    place.fleet(&["declare-lost", "c"]).failed(2, "the fleet at /vmferry has no host c");
    assert_eq!(place.registers(), ["open"]);
    moved.proxy.release();
    moved.send.finish().exited(0);
    moved.guest.finish_by_ref().exited(0);
    place.b.host.check_guest("web");
}

#[test]
fn commit_of_a_fenced_host_is_not_claimed_any_more() {
    let mut place = Place::new();
    let mut moved = place.send(Message::Commit);
    // Only guests that the host has published are freed.
    let operator = place.world.host("operator");
    shows(&operator, &place.table, "guests", |shown| is_only_on(shown, "a", "sending"));
    // The command ends all that runs on the host, as switching it off does.
    let agent = place.a.agent().to_string();
    let all = [pid(&moved.send), pid(&moved.guest), pid(&place.a.daemon), agent];
    let fence: Vec<&str> =
        ["kill", "-KILL"].into_iter().chain(all.iter().map(String::as_str)).collect();
    let lost = place.declare_lost(&fence, &["--although-heard"]).exited(0);
    for process in [&mut moved.send, &mut moved.guest, &mut place.a.daemon] {
        process.finish_by_ref();
    }
    let guest = &lost.last()["guests"][0];
    assert_eq!((&guest["name"], &guest["fate"]), (&"web".into(), &"free".into()), "{lost:?}");
    // COMMIT arrives only now.
    moved.proxy.release();
    moved.receive.finish().failed(12, "was fenced, and its guests were freed");
    assert_eq!(place.registers(), ["freed"]);
    shows(&operator, &place.table, "guests", |shown| is_only_on(shown, "a", "lost"));
    // The host comes back.
    place.a.start_again();
    let absent = place.a.daemon.event("fleet-absent");
    assert!(absent["message"].as_str().unwrap().contains("was fenced and declared lost"));
    let lost = |shown: &Value| shown["hosts"][0]["lost"].is_object();
    shows(&operator, &place.table, "hosts", lost);
    place.fleet(&["readmit", "a"]).exited(0);
    place.a.daemon.event("fleet-joined");
}
