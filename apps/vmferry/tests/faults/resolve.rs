//! Decisions that only an operator can make, and decisions that `resolve` refuses.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::trial::{DOUBT, GUEST, RUNNING, Trial};
use crate::support::{Host, World, run_ok};
use rustix::process::Signal;
use serde_json::Value;
use vmferry_handover::journal::{FileJournal, Journal, Record, Side};
use vmferry_wire::{GuestIdentity, SessionId};

#[test]
fn unknown_answer_does_not_end_doubt() {
    let mut trial = Trial::begin("another host at the destination's address", DOUBT, "1s");
    trial.kill_destination();
    let stranger = trial.world.host("stranger");
    let address = trial.proxy.target();
    let (mut successor, _) = stranger.receive(&["--listen", &address, "--plain"]);
    trial.proxy.heal();
    // The last answer may still be on its way; the one before was received.
    trial.proxy.await_answers(3);
    assert_eq!(
        trial.a.status("web")["migration"]["in_doubt"],
        true,
        "UNKNOWN must not count as ABORTED"
    );
    successor.kill();
    run_ok(&trial.a, &["resolve", "web", "--source-resumes", "--yes"]);
    trial.stays();
}

#[test]
fn source_resumes_on_operator_decision() {
    let mut trial = Trial::begin("destination: lost for good", DOUBT, "1s");
    trial.a.run(&["quit", "web"]).failed(14, "resolve");
    trial.a.run(&["cancel", "web"]);
    // Without a terminal the operator must state that everything is done; until then nothing is
    // decided.
    let asked = trial.a.run(&["resolve", "web", "--source-resumes"]);
    asked.failed(2, "FIRST power the other host off, fence it, or end the VMM of web there");
    asked.failed(2, "--yes");
    assert_eq!(trial.a.status("web")["phase"], "paused");
    // Status of the other host, before and after it is switched off.
    let there = |led: bool| {
        let sessions = run_ok(&trial.b, &["status", "--sessions"]);
        let session = &sessions["sessions"][0];
        assert_eq!(session["side"], "destination", "{sessions}");
        assert_eq!((&session["verdict"], &session["led"]), (&"there".into(), &led.into()));
    };
    there(true);
    trial.destination.kill();
    there(false);
    trial.kill_destination();
    let decided = run_ok(&trial.a, &["resolve", "web", "--source-resumes", "--yes"]);
    assert_eq!(decided["decided"], "source-resumes", "{decided}");
    assert_eq!(decided["sessions"].as_array().map(Vec::len), Some(1), "{decided}");
    trial.stays();
}

#[test]
fn destination_owns_on_operator_decision() {
    let mut trial = Trial::begin("link: cut for good", RUNNING, "1s");
    trial.proxy.cut();
    trial.send.event("in-doubt");
    let sessions = run_ok(&trial.b, &["status", "--sessions"]);
    assert_eq!(sessions["sessions"][0]["verdict"], "here", "{sessions}");
    run_ok(&trial.a, &["resolve", "web", "--destination-owns", "--yes"]);
    trial.arrives();
}

#[test]
fn resolve_decides_nothing_while_the_vmm_is_stopped() {
    let trial = Trial::begin("source: SIGSTOP in doubt, and the operator comes", DOUBT, "1s");
    let other = trial.a.guest("other", &GUEST);
    trial.guest.signal(Signal::STOP);
    trial.a.run(&["resolve", "web", "--source-resumes", "--yes"]).failed(15, "kill -CONT");
    // The other sessions are still listed, and so is what the journal knows about this one.
    let status = run_ok(&trial.a, &["status"]);
    let find = |name: &str| -> &Value {
        status["guests"].as_array().unwrap().iter().find(|guest| guest["name"] == name).unwrap()
    };
    assert_eq!(find("other")["phase"], "running");
    assert_eq!(find("web")["phase"], "not answering");
    let journal = find("web")["journal"].as_str().unwrap();
    assert!(journal.contains("IN DOUBT"), "{journal}");
    run_ok(&trial.a, &["quit", "other"]);
    other.finish().exited(0);
    trial.guest.signal(Signal::CONT);
    trial.proxy.heal();
    trial.arrives();
}

/// A session in a host's journals whose process died after COMMIT. Locked while the journal is
/// kept.
fn left_in_doubt(host: &Host, number: u8, guest: &GuestIdentity) -> (SessionId, FileJournal) {
    let session = SessionId([number; 16]);
    let directory = host.runtime.join("journal");
    let peer = ("tls:host-b:7001", [].as_slice());
    let mut journal =
        FileJournal::begin(&directory, session, Side::Source, guest.clone(), peer).unwrap();
    journal.append(&Record::Commit).unwrap();
    (session, journal)
}

fn verdict(host: &Host, session: SessionId) -> Value {
    let sessions = run_ok(host, &["status", "--sessions"]);
    let sessions = sessions["sessions"].as_array().unwrap();
    let wanted = session.to_string();
    sessions.iter().find(|one| one["session"] == *wanted).unwrap()["verdict"].clone()
}

#[test]
fn resolve_refuses_wrong_use() {
    let world = World::without_certificates();
    let a = world.host("a");
    let guest = a.guest("web", &GUEST);
    let resolve = |name: &str, word: &str| a.run(&["resolve", name, word, "--yes"]);
    let words = ["--source-resumes", "--destination-owns"];
    for word in words {
        resolve("web", word).failed(9, "not in doubt");
        resolve("nobody", word).failed(8, "no guest or session is named nobody");
    }

    // A live process leads the session.
    let identity = |name: &str| GuestIdentity { uuid: uuid::Uuid::new_v4(), name: name.into() };
    let (session, journal) = left_in_doubt(&a, 1, &identity("ghost"));
    for word in words {
        resolve("ghost", word).failed(7, "a process still leads session");
    }
    drop(journal);
    // The same by session number, and only once.
    let decided = resolve(&session.to_string(), "--destination-owns").exited(0);
    assert_eq!(decided.last()["vmm"], "gone");
    assert_eq!(verdict(&a, session), "there");
    for word in words {
        resolve("ghost", word).failed(9, "gave the guest away");
    }

    // The guest runs here, and only its journal does not know.
    let uuid = a.status("web")["uuid"].as_str().unwrap().parse().unwrap();
    let (session, journal) = left_in_doubt(&a, 2, &GuestIdentity { uuid, name: "web".into() });
    drop(journal);
    resolve("web", "--destination-owns").failed(9, "runs here");
    assert_eq!(verdict(&a, session), "in-doubt");
    assert_eq!(resolve("web", "--source-resumes").code, Some(0));
    assert_eq!(verdict(&a, session), "here");
    a.check_guest("web");
    drop(guest);
}

#[test]
fn resolve_tells_guests_of_one_name_apart() {
    let world = World::without_certificates();
    let a = world.host("a");
    let dead = || GuestIdentity { uuid: uuid::Uuid::new_v4(), name: "web".into() };
    let resolve = |what: &str, word: &str| a.run(&["resolve", what, word, "--yes"]);
    let (first, journal) = left_in_doubt(&a, 1, &dead());
    drop(journal);
    let guest = a.guest("web", &GUEST);

    // The guest's VMM died in doubt, and the operator started another one. The old guest has no VMM
    // that could answer.
    let decided = resolve("web", "--destination-owns").exited(0);
    assert_eq!(decided.last()["vmm"], "gone");
    assert_eq!(verdict(&a, first), "there");
    resolve(&first.to_string(), "--destination-owns").failed(9, "gave the guest away");
    resolve("web", "--destination-owns").failed(9, "this host has it");

    // With several dead guests the operator must say which one; the session number says it.
    let (second, journal) = left_in_doubt(&a, 2, &dead());
    let (third, other) = left_in_doubt(&a, 3, &dead());
    drop(other);
    for word in ["--source-resumes", "--destination-owns"] {
        resolve("web", word).failed(9, &third.to_string());
    }
    resolve(&second.to_string(), "--source-resumes").failed(7, "a process still leads session");
    drop(journal);
    assert_eq!(resolve(&second.to_string(), "--source-resumes").code, Some(0));
    assert_eq!((verdict(&a, second), verdict(&a, third)), ("here".into(), "in-doubt".into()));

    // The name selects the running guest's session first, and nothing is noted for the dead guest.
    let uuid = a.status("web")["uuid"].as_str().unwrap().parse().unwrap();
    let (fourth, journal) = left_in_doubt(&a, 4, &GuestIdentity { uuid, name: "web".into() });
    drop(journal);
    resolve("web", "--destination-owns").failed(9, "runs here");
    assert_eq!(resolve("web", "--source-resumes").code, Some(0));
    assert_eq!((verdict(&a, fourth), verdict(&a, third)), ("here".into(), "in-doubt".into()));
    assert_eq!(resolve("web", "--destination-owns").code, Some(0));
    assert_eq!(verdict(&a, third), "there");
    a.check_guest("web");
    drop(guest);
}

/// `script` gives the program a terminal.
#[test]
fn resolve_asks_on_a_terminal() {
    let world = World::without_certificates();
    let a = world.host("a");
    let guest = GuestIdentity { uuid: uuid::Uuid::new_v4(), name: "ghost".into() };
    let (session, journal) = left_in_doubt(&a, 1, &guest);
    drop(journal);
    if Command::new("script").arg("--version").output().is_err() {
        panic!("this test needs script(1)");
    }
    let ask = |answer: &str| {
        let vmferry = Path::new(env!("CARGO_BIN_EXE_vmferry")).display();
        let command = format!("{vmferry} resolve ghost --source-resumes");
        let mut script = Command::new("script")
            .args(["--quiet", "--return", "--command", &command, "/dev/null"])
            .env("VMFERRY_RUNTIME_DIR", &a.runtime)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Standard input stays open until the answer was read: its end would end the terminal.
        let mut stdin = script.stdin.take().unwrap();
        writeln!(stdin, "{answer}").unwrap();
        let output = script.wait_with_output().unwrap();
        drop(stdin);
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (code, said) = ask("yes");
    assert!(said.contains("FIRST") && said.contains("host-b:7001"), "{said}");
    assert_eq!(code, Some(11), "only the name will do: {said}");
    assert_eq!(verdict(&a, session), "in-doubt");
    let (code, said) = ask("ghost");
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(verdict(&a, session), "here");
}
