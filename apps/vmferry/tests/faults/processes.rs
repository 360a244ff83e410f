//! Kills and stops every process of a migration, and cuts its link, phase by phase. After each
//! fault the tests check which host has the guest by both hosts' status, the guest's memory, and
//! that nothing is left over.
//!
//! `make test` runs a sample, and VMFERRY_TEST_ALL=1 runs all cases.

use std::time::Duration;

use vmferry_kit::need_kvm;

use crate::support::trial::{
    COMMIT, CONNECTED, DOUBT, FIRST_ROUND, PAUSED, Phase, READY, ROUNDS, RUNNING, SECOND_ROUND,
    STATE, Trial, side_by_side,
};
use crate::support::{all, run_ok};
use rustix::process::Signal;
use serde_json::Value;

/// How long a process is stopped or a link is cut so that the other side still waits: less than any
/// timeout.
const SHORT: Duration = Duration::from_secs(2);

/// A fault, its name for selecting it, and its phases: a sample, and the others.
struct Fault {
    name: &'static str,
    strike: fn(Phase),
    sample: &'static [Phase],
    others: &'static [Phase],
}

macro_rules! faults {
    ($($strike:ident: $sample:expr, $others:expr;)*) => {
        [$(Fault {
            name: stringify!($strike),
            strike: $strike,
            sample: &$sample,
            others: &$others,
        },)*]
    };
}

const FAULTS: &[Fault] = &faults! {
    source_killed:
        [SECOND_ROUND, COMMIT],
        [CONNECTED, FIRST_ROUND, PAUSED, STATE, READY, DOUBT, RUNNING];
    source_stopped:
        [PAUSED],
        [CONNECTED, FIRST_ROUND, SECOND_ROUND, STATE, READY, COMMIT, DOUBT, RUNNING];
    source_stopped_until_it_is_given_up:
        [STATE],
        [CONNECTED, FIRST_ROUND, SECOND_ROUND, PAUSED, READY];
    client_killed:
        [CONNECTED, READY],
        [FIRST_ROUND, SECOND_ROUND, PAUSED, STATE, COMMIT, DOUBT, RUNNING];
    client_stopped:
        [FIRST_ROUND],
        [CONNECTED, SECOND_ROUND, PAUSED, STATE, READY, COMMIT, DOUBT, RUNNING];
    cancelled:
        [PAUSED],
        [CONNECTED, FIRST_ROUND, SECOND_ROUND, STATE, READY, COMMIT];
    destination_killed:
        [PAUSED, READY, RUNNING],
        [CONNECTED, FIRST_ROUND, SECOND_ROUND, STATE, COMMIT, DOUBT];
    destination_stopped:
        [COMMIT],
        [CONNECTED, FIRST_ROUND, SECOND_ROUND, PAUSED, STATE, READY, DOUBT, RUNNING];
    destination_stopped_until_it_is_given_up:
        [FIRST_ROUND, COMMIT],
        [CONNECTED, SECOND_ROUND, PAUSED, STATE, READY, DOUBT, RUNNING];
    link_cut:
        [STATE, DOUBT],
        [CONNECTED, FIRST_ROUND, SECOND_ROUND, PAUSED, READY, COMMIT, RUNNING];
    link_cut_for_longer_than_it_is_tried:
        [SECOND_ROUND],
        [CONNECTED, FIRST_ROUND, PAUSED, STATE, READY];
    link_cut_for_longer_than_the_destination_waits: [], [DOUBT];
};

/// A fault at one phase.
struct Case(&'static Fault, Phase);

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}", self.0.name, self.1.name)
    }
}

#[test]
fn fault_in_any_phase_leaves_one_owner_and_no_leftovers() {
    need_kvm();
    let mut cases = Vec::new();
    for fault in FAULTS {
        let others = if all() { fault.others } else { &[] };
        cases.extend(fault.sample.iter().chain(others).map(|phase| Case(fault, *phase)));
    }
    // Selects single cases when a failure is investigated.
    if let Ok(only) = std::env::var("VMFERRY_TEST_ONLY") {
        cases.retain(|case| format!("{case:?}").contains(&only));
    }
    // The cases that wait longest begin first.
    cases.sort_by_key(|Case(_, phase)| !(phase.is(&READY) || phase.is(&DOUBT)));
    side_by_side(6, cases, |Case(fault, phase)| (fault.strike)(*phase));
}

fn source_killed(phase: Phase) {
    let mut trial = Trial::begin("source: SIGKILL", phase, "1s");
    trial.kill_source();
    if phase.is(&COMMIT) || phase.is(&RUNNING) {
        trial.release();
        trial.serving();
        // The VMM's journal has COMMIT and nothing later; the operator has looked at the other
        // host.
        resolve(&trial, "--destination-owns");
        return trial.arrives();
    }
    if phase.is(&STATE) {
        trial.proxy.lose();
    }
    trial.release();
    if phase.is(&DOUBT) {
        trial.proxy.heal();
        // The destination waits a minute for COMMIT and then never runs the guest.
        while trial.destination.line().is_some() {}
        let sessions = run_ok(&trial.b, &["status", "--sessions"]);
        assert_eq!(sessions["sessions"][0]["verdict"], "there", "{sessions}");
        resolve(&trial, "--source-resumes");
    }
    trial.crashes();
}

/// The VMM died in doubt, and its journal still has the session.
fn resolve(trial: &Trial, word: &str) {
    let status = run_ok(&trial.a, &["status"]);
    assert_eq!(status["in_doubt"][0]["guest"], "web", "{status}");
    run_ok(&trial.a, &["resolve", "web", word, "--yes"]);
    let status = run_ok(&trial.a, &["status"]);
    assert_eq!(status["in_doubt"], Value::Array(vec![]), "{status}");
    trial.a.run(&["resolve", "web", word, "--yes"]).failed(9, "nothing to decide");
}

fn source_stopped(phase: Phase) {
    let trial = Trial::begin("source: SIGSTOP for 2 s", phase, "20s");
    trial.guest.signal(Signal::STOP);
    trial.release();
    // The pause is the fault itself and does not wait for an event.
    std::thread::sleep(SHORT);
    trial.guest.signal(Signal::CONT);
    trial.proxy.heal();
    trial.arrives();
}

fn source_stopped_until_it_is_given_up(phase: Phase) {
    let mut trial = Trial::begin("source: SIGSTOP until it is given up", phase, "1s");
    trial.guest.signal(Signal::STOP);
    if phase.is(&STATE) {
        trial.proxy.lose();
    }
    trial.release();
    // Its last message says that ABORTED was written, and why.
    trial.destination.finish_by_ref().exited(12);
    let asking = trial.a.run(&["status", "web"]);
    asking.failed(15, "it is stopped or stuck");
    if phase.is(&READY) {
        trial.restart_destination();
    }
    trial.guest.signal(Signal::CONT);
    // The command has stopped waiting. The VMM asks the destination's new process, which must run
    // until then.
    trial.a.wait_for("web", |status| status["migration"].is_null());
    trial.stays();
}

fn client_killed(phase: Phase) {
    let mut trial = Trial::begin("client: SIGKILL", phase, "1s");
    trial.kill_client();
    let too_late = phase.is(&COMMIT) || phase.is(&DOUBT) || phase.is(&RUNNING);
    if !too_late {
        trial.a.wait_for("web", |status| status["migration"].is_null());
    }
    trial.release();
    trial.proxy.heal();
    if too_late { trial.arrives() } else { trial.stays() }
}

fn client_stopped(phase: Phase) {
    let mut trial = Trial::begin("client: SIGSTOP throughout", phase, "1s");
    trial.send.signal(Signal::STOP);
    trial.release();
    trial.proxy.heal();
    trial.serving();
    trial.send.signal(Signal::CONT);
    trial.arrives();
}

fn cancelled(phase: Phase) {
    let trial = Trial::begin("cancelled by the operator", phase, "1s");
    run_ok(&trial.a, &["cancel", "web"]);
    if phase.is(&COMMIT) {
        trial.release();
        return trial.arrives();
    }
    trial.a.wait_for("web", |status| status["migration"].is_null());
    trial.release();
    trial.stays();
}

fn destination_killed(phase: Phase) {
    let mut trial = Trial::begin("destination: SIGKILL", phase, "1s");
    trial.kill_destination();
    if phase.is(&RUNNING) {
        // The destination promised to run the guest. Its successor answers from the journal; the
        // guest crashed there.
        trial.proxy.lose();
        trial.send.event("in-doubt");
        trial.restart_destination();
        return trial.crashes();
    }
    let late = phase.is(&READY) || phase.is(&COMMIT) || phase.is(&DOUBT);
    trial.release();
    if late {
        if !phase.is(&DOUBT) {
            trial.send.event("in-doubt");
        }
        trial.restart_destination();
        trial.proxy.heal();
    }
    trial.stays();
}

fn destination_stopped(phase: Phase) {
    let trial = Trial::begin("destination: SIGSTOP for 2 s", phase, "20s");
    trial.destination.signal(Signal::STOP);
    trial.release();
    trial.proxy.heal();
    // The pause is the fault itself and does not wait for an event.
    std::thread::sleep(SHORT);
    trial.destination.signal(Signal::CONT);
    trial.arrives();
}

fn destination_stopped_until_it_is_given_up(phase: Phase) {
    let fault = "destination: SIGSTOP until it is given up";
    let mut trial = Trial::begin(fault, phase, "1s");
    trial.destination.signal(Signal::STOP);
    if phase.is(&COMMIT) || phase.is(&RUNNING) {
        // Just before it can write RUN-INTENT, or just after.
        if phase.is(&RUNNING) {
            trial.proxy.lose();
        }
        trial.release();
        trial.send.event("in-doubt");
    }
    if phase.is(&DOUBT) {
        trial.proxy.heal();
        // Nothing answers the source, and it keeps asking. The pause is the fault itself.
        std::thread::sleep(SHORT);
        assert_eq!(trial.a.status("web")["migration"]["in_doubt"], true);
    }
    if phase.is(&COMMIT) || phase.is(&RUNNING) || phase.is(&DOUBT) {
        trial.destination.signal(Signal::CONT);
        return trial.arrives();
    }
    // The source runs its guest again while the destination still expects to get it.
    trial.a.wait_for("web", |status| status["migration"].is_null());
    trial.release();
    trial.destination.signal(Signal::CONT);
    trial.stays();
}

fn link_cut(phase: Phase) {
    let mut trial = Trial::begin("link: cut, and back", phase, "20s");
    trial.proxy.cut();
    if phase.is(&READY) {
        // The destination has loaded the state, and there is no way back from that.
        return trial.stays();
    }
    if ROUNDS.iter().any(|round| phase.is(round)) || phase.is(&STATE) {
        trial.send.event("link-lost");
    }
    if phase.is(&COMMIT) || phase.is(&RUNNING) {
        trial.send.event("in-doubt");
    }
    if phase.is(&PAUSED) || phase.is(&STATE) {
        trial.send.event("recalled");
        assert_eq!(trial.a.status("web")["phase"], "running", "the guest does not wait");
    }
    trial.proxy.heal();
    trial.arrives();
}

fn link_cut_for_longer_than_it_is_tried(phase: Phase) {
    let trial = Trial::begin("link: cut for longer than --reconnect-timeout", phase, "1s");
    trial.proxy.cut();
    trial.stays();
}

fn link_cut_for_longer_than_the_destination_waits(phase: Phase) {
    let fault = "link: cut until the destination has written ABORTED";
    let mut trial = Trial::begin(fault, phase, "1s");
    trial.destination.finish_by_ref().exited(12);
    assert_eq!(
        trial.a.status("web")["migration"]["in_doubt"],
        true,
        "silence must not end the doubt"
    );
    trial.restart_destination();
    trial.proxy.heal();
    trial.stays();
}
