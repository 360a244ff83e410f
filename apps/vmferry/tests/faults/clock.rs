//! A host's clock jumps by hours, forward and back, during a migration and between two migrations.
//! CLOCK_MONOTONIC does not jump, as in the kernel.

use crate::support::clock::Clock;
use crate::support::outcomes::{Outcome, Owner};
use crate::support::trial::{
    COMMIT, GUEST, PAUSED, Phase, Place, SECOND_ROUND, Trial, claim, side_by_side,
};
use crate::support::{Host, Running, World, all, run_ok};

const SIX_HOURS: i64 = 6 * 3600;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Whose {
    Source,
    Destination,
}

#[test]
fn clock_jump_during_a_migration_changes_nothing() {
    let mut trials =
        vec![(Whose::Source, -SIX_HOURS, COMMIT), (Whose::Destination, SIX_HOURS, PAUSED)];
    if all() {
        trials.clear();
        for whose in [Whose::Source, Whose::Destination] {
            for offset in [-SIX_HOURS, SIX_HOURS] {
                trials.extend([SECOND_ROUND, PAUSED, COMMIT].map(|phase| (whose, offset, phase)));
            }
        }
    }
    side_by_side(6, trials, |(whose, offset, phase)| jump(*whose, *offset, *phase));
}

fn jump(whose: Whose, offset: i64, phase: Phase) {
    let directory = tempfile::tempdir().unwrap();
    let clock = Clock::make(directory.path(), "offset");
    let mut place = Place::default();
    let fault = match (whose, offset > 0) {
        (Whose::Source, true) => "source: clock 6 h forward",
        (Whose::Source, false) => "source: clock 6 h back",
        (Whose::Destination, true) => "destination: clock 6 h forward",
        (Whose::Destination, false) => "destination: clock 6 h back",
    };
    match whose {
        Whose::Source => place.source = clock.prefix.clone(),
        Whose::Destination => place.destination = clock.prefix.clone(),
    }
    let trial = Trial::begin_at(fault, phase, "1s", &place, ["127.0.0.1", "127.0.0.1"]);
    clock.set(offset);
    trial.release();
    trial.arrives();
}

/// Moves a guest to a host and returns the process that runs it there.
fn migrate(from: &Host, to: &Host, prefix: &[String], guest: Running) -> Running {
    let mut destination =
        to.start_under(prefix, &["receive", "--listen", "tcp:127.0.0.1:0", "--plain"]);
    let address = destination.event("listening")["address"].as_str().unwrap().to_owned();
    from.run(&["send", "web", "--to", &address, "--plain", "--verify"]).exited(0);
    guest.finish().exited(0);
    destination.event("serving");
    to.check_guest("web");
    destination
}

/// The guest leaves when its host's clock says noon and returns when it says six in the morning of
/// the same day.
#[test]
fn clock_jump_between_two_migrations_changes_no_promise() {
    let world = World::without_certificates();
    let (a, b) = (world.host("a"), world.host("b"));
    let clock = Clock::make(world.directory.path(), "offset");
    let mut arguments = vec!["run", "web"];
    arguments.extend(GUEST);
    let mut guest = a.start_under(&clock.prefix, &arguments);
    guest.event("serving");
    a.wait_for("web", |status| status["report"]["populated"] == true);
    let there = migrate(&a, &b, &[], guest);
    clock.set(-SIX_HOURS);
    let back = migrate(&b, &a, &clock.prefix, there);

    let sessions = run_ok(&a, &["status", "--sessions"]);
    let [left, came] = &sessions["sessions"].as_array().unwrap()[..] else { panic!("{sessions}") };
    assert_eq!((&left["side"], &left["verdict"]), (&"source".into(), &"there".into()));
    assert_eq!((&came["side"], &came["verdict"]), (&"destination".into(), &"here".into()));
    let at = |session: &serde_json::Value| session["records"][0]["at"].as_i64().unwrap();
    assert!(at(came) < at(left) - SIX_HOURS / 2, "the clock did jump: {sessions}");
    let order = |session: &serde_json::Value| session["records"][0]["order"].as_u64().unwrap();
    assert!(order(came) > order(left), "{sessions}");
    assert!(claim(&a).has && !claim(&b).has);
    Outcome {
        guest: "microvm",
        fault: "source: clock 6 h back",
        phase: "between two migrations",
        source: "exit 0".into(),
        destination: "runs the guest".into(),
        owner: Owner::Destination,
    }
    .note();
    drop(back);
}

#[test]
fn clock_before_the_certificates_is_refused_before_the_migration() {
    let world = World::new();
    let (a, b) = (world.host("a"), world.host("b"));
    let clock = Clock::make(world.directory.path(), "offset");
    // Certificates are valid from a day before they were issued.
    clock.set(-8 * SIX_HOURS);
    let mut arguments = vec!["run", "web"];
    arguments.extend(GUEST);
    let mut guest = a.start_under(&clock.prefix, &arguments);
    guest.event("serving");
    a.wait_for("web", |status| status["report"]["populated"] == true);
    let tls = world.tls();
    let (mut destination, address) = b.receive(&["--listen", "127.0.0.1:0", "--tls", &tls]);
    let send = || a.run(&["send", "web", "--to", &address, "--tls", &tls]);
    let sent = send();
    sent.failed(4, "clock");
    a.check_guest("web");
    Outcome {
        guest: "microvm",
        fault: "source: clock 2 days back",
        phase: "before TLS",
        source: "exit 4".into(),
        destination: "goes on listening".into(),
        owner: Owner::Source,
    }
    .note();
    // With the clock set right, the migration works at once.
    clock.set(0);
    assert_eq!(send().code, Some(0));
    destination.event("serving");
    b.check_guest("web");
}
