//! A source that is lost for good before an attached guest has all its pages: what the destination
//! says, and how its operator gives the guest up.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vmferry_qemu::wait_for_end;
use vmferry_qemu_lab::Version;

use super::carried::{has_thread, private, wait_until};
use super::pages::{Content, PAGE, Pages};
use super::{Move, emulated, on_kvm};
use crate::support::stops::{Stopped, guardian_of};
use crate::support::{Ended, in_parallel, run_ok, text};

impl Move {
    /// The source's host loses power.
    fn lose_source(&mut self) {
        let guardian = guardian_of(self.send.child.id());
        self.send.kill();
        kill_process(Pid::from_raw(guardian as i32).unwrap(), Signal::KILL).unwrap();
        let _ = wait_for_end(guardian);
        self.scene.here.child.kill().unwrap();
        self.scene.here.child.wait().unwrap();
    }

    fn give_up(&self, more: &[&str]) -> Ended {
        self.scene.b.run(&[&["resolve", "tested", "--give-up", "--yes"], more].concat())
    }

    /// The guest has ended, and nothing is left to decide.
    fn is_given_up(&mut self) {
        self.there.child.wait().unwrap();
        let sessions = run_ok(&self.scene.b, &["status", "--sessions"]);
        assert_eq!(sessions["sessions"][0]["verdict"], "here", "{sessions}");
        self.give_up(&[]).failed(9, "lacks no pages of another host here");
        assert_eq!(run_ok(&self.scene.b, &["status"])["unattended"], serde_json::json!([]));
    }
}

fn content(saved: &File, page: u64) -> Content {
    let mut bytes = [0; PAGE as usize];
    saved.read_exact_at(&mut bytes, page * PAGE).unwrap();
    bytes
}

/// Checks what was saved of the memory: every page that was there, and no other.
fn check_dump(directory: &Path, ended: &Ended, memory: &[Option<Content>]) {
    let list = std::fs::read(directory.join("memory.json")).unwrap();
    let list: Value = serde_json::from_slice(&list).unwrap();
    assert_eq!(list["about"]["guest"]["name"], "tested", "{list}");
    let [region] = &list["regions"].as_array().unwrap()[..] else { panic!("{list}") };
    let saved = File::open(directory.join(region["file"].as_str().unwrap())).unwrap();
    assert_eq!(region["bytes"], memory.len() as u64 * PAGE);
    let runs = region["absent_pages"].as_array().unwrap().iter().map(|run| {
        let number = |at: usize| run[at].as_u64().unwrap();
        number(0)..number(0) + number(1)
    });
    let absent: Vec<u64> = runs.flatten().collect();
    assert_eq!(ended.last()["absent_pages"], absent.len());
    assert!(absent.len() > 1000, "{} pages were missing", absent.len());
    let mut next = absent.iter().peekable();
    for (number, page) in (0..).zip(memory) {
        let is_absent = next.next_if_eq(&&number).is_some();
        let here = (!is_absent).then(|| content(&saved, number));
        assert!(here == *page, "page {number}");
    }
}

/// The process that serves an attached guest's pages has them, whatever becomes of the QEMU.
#[test]
fn attached_guest_arrives_although_the_qemu_that_it_has_left_is_killed() {
    in_parallel(vec![false, true], |by_guardian| {
        let mut moving = Move::until_it_fetches(on_kvm(Version::V10_0), &[]);
        moving.send.event("serving");
        if by_guardian {
            let guardian = guardian_of(moving.send.child.id());
            moving.send.kill();
            wait_until(|| has_thread(guardian, "lane"));
        }
        moving.scene.here.child.kill().unwrap();
        moving.scene.here.child.wait().unwrap();
        moving.receiving.event("received");
        moving.there.check_guest();
    });
}

#[test]
fn guest_whose_source_is_lost_is_seen_and_given_up() {
    in_parallel(vec![on_kvm(Version::V10_0), emulated(Version::V7_2)], |machine| {
        let mut moving = Move::until_it_fetches(machine, &["--sandbox", "require"]);
        let status = run_ok(&moving.scene.b, &["status", "tested"]);
        assert_eq!(status["pid"], moving.there.child.id(), "{status}");
        assert!(status["fetch"]["remaining_pages"].as_u64() > Some(1000), "{status}");
        assert_eq!(status["fetch"]["link_lost_ms"], Value::Null, "{status}");
        moving.lose_source();
        moving.receiving.event("link-lost");
        let status = run_ok(&moving.scene.b, &["status", "tested"]);
        assert!(status["fetch"]["link_lost_ms"].as_f64() > Some(0.0), "{status}");
        let all = run_ok(&moving.scene.b, &["status"]);
        assert_eq!(all["guests"][0]["name"], "tested", "{all}");

        let directory = moving.scene.world.path("dump");
        // It must be new, and nothing is ended otherwise.
        std::fs::create_dir(&directory).unwrap();
        moving.give_up(&["--dump", text(&directory)]).failed(2, "needs a new directory");
        std::fs::remove_dir(&directory).unwrap();
        assert!(moving.there.child.try_wait().unwrap().is_none());

        let ended = moving.give_up(&["--dump", text(&directory)]).exited(0);
        moving.receiving.event("guest-ended");
        assert!(ended.last()["dumped_bytes"].as_u64() > Some(16 << 20), "{ended:?}");
        moving.receiving.finish_by_ref().exited(0);
        moving.is_given_up();
    });
}

#[test]
fn guest_without_a_receiver_is_seen_and_given_up() {
    let mut moving = Move::until_it_fetches(on_kvm(Version::V10_0), &[]);
    // Until then the source is in doubt.
    moving.send.event("serving");
    moving.receiving.kill();
    moving.lose_source();
    let status = run_ok(&moving.scene.b, &["status", "tested"]);
    assert_eq!(status["pid"], moving.there.child.id(), "{status}");
    assert_eq!((&status["phase"], &status["side"]), (&"running".into(), &"destination".into()));
    let all = run_ok(&moving.scene.a, &["status"]);
    assert_eq!(all["guests"], serde_json::json!([]), "the socket of its killed process is left");
    let left = &all["unattended"];
    assert_eq!((&left[0]["phase"], &left[0]["side"]), (&"moved".into(), &"source".into()));
    moving.scene.b.run(&["resolve", "tested", "--give-up"]).failed(2, "FIRST make sure");
    assert!(moving.there.child.try_wait().unwrap().is_none(), "nobody has confirmed it");
    let stopped = Stopped::now(moving.there.child.id());
    let memory = Pages::of(&moving.there, &moving.scene.machine).all();
    let directory = moving.scene.world.path("dump");
    let ended = moving.give_up(&["--dump", text(&directory)]).exited(0);
    drop(stopped);
    check_dump(&directory, &ended, &memory);
    moving.is_given_up();
    moving.scene.a.run(&["resolve", "tested", "--give-up", "--yes"]).exited(0);
}

/// Its memory is QEMU's alone, and QEMU itself waits for its pages.
#[test]
fn carried_guest_is_given_up_and_its_memory_saved() {
    let mut moving = Move::until_it_fetches(private(on_kvm(Version::V10_0)), &[]);
    moving.send.event("serving");
    moving.receiving.kill();
    moving.lose_source();
    let directory = moving.scene.world.path("dump");
    let ended = moving.give_up(&["--dump", text(&directory)]).exited(0);
    assert!(ended.last()["dumped_bytes"].as_u64() > Some(16 << 20), "{ended:?}");
    assert!(ended.last()["absent_pages"].as_u64() > Some(1000), "{ended:?}");
    moving.is_given_up();
}
