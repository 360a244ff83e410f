//! The engine in thousands of schedules of faults, and negative controls that show that the checks
//! can fail.

mod post_copy;
mod witness;

use std::sync::atomic::AtomicBool;

use vmferry_sim::{
    Fault, Host, Plan, Sabotage, Seed, SourceEnd, Step, Where, WriteFault, forgeries, run, run_all,
};

/// The number of random schedules in addition to those of every boundary.
const RANDOM: u64 = 12_000;

/// Without `VMFERRY_TEST_ALL`, one of this many schedules runs. It has no factor in common with the
/// number of a boundary's faults or of the shapes, so that the sample has all of them.
const SAMPLE: u64 = 7;

fn all() -> bool {
    std::env::var_os("VMFERRY_TEST_ALL").is_some()
}

#[test]
fn schedules_break_no_promise() {
    let one_of = if all() { 1 } else { SAMPLE };
    let every = one_of as usize;
    let boundaries = (0..Plan::boundaries()).step_by(every).map(Seed::Boundary);
    let random = (0..RANDOM).step_by(every).map(Seed::Random);
    let seeds: Vec<Seed> = boundaries.chain(random).collect();
    let summary = run_all(&seeds, &AtomicBool::new(false));
    assert!(
        summary.failures.is_empty(),
        "`cargo run -p vmferry-sim -- --replay SEED` shows {:#?}",
        summary.failures
    );
    println!("{summary:#?}");
    assert!(summary.struck >= 10_000 / one_of, "too few schedules had a fault: {summary:?}");
    for end in [
        "handed over",
        "handed over, after doubt",
        "handed over, then crashed",
        "kept",
        "kept, after doubt",
    ] {
        assert!(
            summary.ends.get(end) > Some(&(50 / one_of)),
            "{end} is hardly ever reached: {summary:?}"
        );
    }
    let reached =
        [summary.survived, summary.recalled, summary.must_be_given, summary.cut_while_fetching];
    assert!(
        reached.iter().all(|&count| count > 300 / one_of),
        "links are hardly ever lost: {summary:?}"
    );
    assert!(summary.fetching > 3000 / one_of, "pages are hardly ever fetched: {summary:?}");
    assert_eq!(summary.fetching, summary.fetched, "a guest that runs there stays there");
}

#[test]
fn seed_determines_the_schedule() {
    for seed in [Seed::Boundary(77), Seed::Random(2), Seed::Random(33), Seed::Random(4711)] {
        let [first, second] = [(); 2].map(|()| run(&Plan::new(seed), true));
        assert_eq!(first.trace, second.trace, "{seed}");
        assert!(!first.trace.is_empty());
    }
}

#[test]
fn undisturbed_schedule_moves_the_guest_and_enumerates_its_messages() {
    for number in 0..40 {
        let mut plan = Plan::new(Seed::Boundary(number));
        plan.faults.clear();
        let outcome = run(&plan, false);
        assert_eq!((outcome.end, &outcome.violations[..]), (SourceEnd::Given, &[][..]));
        let counted = vmferry_sim::MESSAGES;
        assert!(outcome.messages < counted, "{} messages, {counted} counted", outcome.messages);
    }
}

/// The shapes of the boundaries: lanes, with and without `--verify`, with and without reconnection;
/// and those with post-copy.
fn shapes() -> impl Iterator<Item = Plan> {
    let shapes = (0..6).map(|shape| Plan::new(Seed::Boundary(shape)));
    shapes.chain((1..3).map(|shape| Plan::new(Seed::Boundary(shape)).with_post_copy()))
}

/// A peer that violates the protocol ends at most its own session: in the end one host has the
/// guest, intact.
#[test]
fn forged_messages_break_no_promise() {
    let every: u64 = if all() { 3 } else { 7 };
    let mut struck = 0;
    for to in [Host::Source, Host::Destination] {
        for number in forgeries(to) {
            for message in (0..vmferry_sim::MESSAGES).step_by(every as usize) {
                for mut plan in shapes() {
                    plan.rng = message;
                    plan.faults = vec![Fault::Forge { message, to, number }];
                    let outcome = run(&plan, false);
                    assert!(
                        outcome.violations.is_empty(),
                        "{number} to {to:?} at {message}: {:?} {plan:?}",
                        outcome.violations
                    );
                    struck += outcome.struck;
                }
            }
        }
    }
    assert!(struck > 9000 / every, "only {struck} messages were forged");
}

/// Runs the pinned schedule with a deliberate defect, which the checks must detect. If they no
/// longer do, because schedules have changed, searches for another one, and names it in the
/// failure.
fn assert_detected(sabotage: Sabotage, violation: &str, pinned: Seed, adapt: impl Fn(&mut Plan)) {
    let detects = |seed: Seed| {
        let mut plan = Plan::new(seed);
        adapt(&mut plan);
        plan.sabotage = Some(sabotage);
        run(&plan, false).violations.iter().any(|text| text.contains(violation))
    };
    if !detects(pinned) {
        let mut seeds =
            (0..Plan::boundaries()).map(Seed::Boundary).chain((0..RANDOM).map(Seed::Random));
        match seeds.find(|&seed| detects(seed)) {
            Some(other) => panic!("{sabotage:?}: pin {other} instead of {pinned}"),
            None => panic!("{sabotage:?} was not detected"),
        }
    }
}

/// Deliberate defects that no correct engine has: the checks detect each.
#[test]
fn sabotage_is_detected() {
    for (sabotage, violation, pinned) in [
        (Sabotage::UnknownIsAborted, "two hosts run the guest", 6793),
        (Sabotage::LyingDisk, "in the end", 60),
        (Sabotage::NoClock, "no event is left", 0),
    ] {
        assert_detected(sabotage, violation, Seed::Boundary(pinned), |_| {});
    }
}

/// Each rule of reconnection, when broken, is detected by the check that was made for it.
#[test]
fn sabotage_of_reconnection_is_detected() {
    let not_given = "the guest was not handed over";
    for (sabotage, violation, pinned) in [
        (Sabotage::ForgetRecalled, "the memory that arrived differs", 1078),
        (Sabotage::StayPaused, "the guest waits for a link that is down", 1078),
        (Sabotage::RunOnBeforeReady, "of which the source ran on", 4078),
        (Sabotage::ForgetWithdraw, not_given, 4414),
        (Sabotage::PlaceTwice, "is placed after frame", 1150),
        (Sabotage::ForgetKept, not_given, 1948),
        (Sabotage::KeepFinal, not_given, 5698),
    ] {
        assert_detected(sabotage, violation, Seed::Boundary(pinned), |_| {});
    }
}

/// A VMM call or a journal write that takes longer than the silence timeout ends no migration, on
/// either side. Each rule that ensures this is needed.
#[test]
fn slow_steps_do_not_end_a_migration_and_their_sabotage_is_detected() {
    let takes = std::time::Duration::from_secs(22);
    let schedules = |sabotage| {
        Step::ALL.iter().flat_map(move |&step| {
            let plans = (0..24).map(|shape| Plan::new(Seed::Boundary(shape)));
            plans.chain(shapes().skip(6)).map(move |mut plan| {
                (plan.faults, plan.sabotage) = (vec![Fault::Slow { step, takes }], sabotage);
                (step, run(&plan, false))
            })
        })
    };
    for (step, outcome) in schedules(None) {
        assert_eq!(outcome.violations, [""; 0], "{step:?}");
        assert_eq!(outcome.end, SourceEnd::Given, "{step:?}");
    }
    let (not_given, away) = ("the guest was not handed over", "was treated as lost");
    for (sabotage, violation) in [
        (Sabotage::NoLife, not_given),
        (Sabotage::CountOwnTime, not_given),
        (Sabotage::CountOwnTime, away),
    ] {
        let found = schedules(Some(sabotage))
            .any(|(_, outcome)| outcome.violations.iter().any(|text| text.contains(violation)));
        assert!(found, "{sabotage:?}: {violation}");
    }
}

/// On a host whose memory is touched for the first time every call takes seconds, such as the start
/// of KVM's log.
#[test]
fn cold_hosts_move_the_guest_and_report_the_connection_once() {
    let takes = std::time::Duration::from_secs(6);
    for mut plan in (0..24).map(|shape| Plan::new(Seed::Boundary(shape))).chain(shapes().skip(6)) {
        plan.faults = Step::ALL.iter().map(|&step| Fault::Slow { step, takes }).collect();
        let outcome = run(&plan, false);
        assert_eq!(outcome.violations, [""; 0], "{plan:?}");
        assert_eq!((outcome.end, outcome.connected), (SourceEnd::Given, 1), "{plan:?}");
    }
}

/// Each rule of free-page hints, when broken, loses a page that was used again.
#[test]
fn sabotage_of_free_page_hints_is_detected() {
    for sabotage in [Sabotage::HintAcrossHarvest, Sabotage::HintUnprotected] {
        let violation = "the memory that arrived differs";
        assert_detected(sabotage, violation, Seed::Boundary(60), |plan| plan.verify = false);
    }
}

/// A receiver that dies after RUN-INTENT is on disk, and whose guest outlives it.
fn dies_after_run_intent() -> Plan {
    let mut plan = Plan::new(Seed::Boundary(1));
    plan.outlives = true;
    let (host, number, how) = (Host::Destination, 1, WriteFault::OnDisk);
    plan.faults = vec![Fault::Write { host, number, how, crash: true }];
    plan
}

#[test]
fn restarted_receiver_runs_the_guest_that_outlived_its_predecessor() {
    let outcome = run(&dies_after_run_intent(), false);
    assert_eq!((outcome.end, &outcome.violations[..]), (SourceEnd::Given, &[][..]));
    assert!(!outcome.crashed_there, "{outcome:?}");
    let mut dies_with_it = dies_after_run_intent();
    dies_with_it.outlives = false;
    assert!(run(&dies_with_it, false).crashed_there);
}

#[test]
fn sabotage_of_a_restarted_receiver_is_detected() {
    let mut plan = dies_after_run_intent();
    plan.sabotage = Some(Sabotage::LeaveUnfinished);
    let outcome = run(&plan, false);
    assert_eq!(outcome.violations, ["the guest outlived its receiver, and no host ran it"]);
}

/// A page that the log loses arrives outdated. The guest detects it, unless both memories are
/// compared before.
#[test]
fn lost_page_is_detected_by_the_guest_or_by_verify() {
    let outcome = |verify| {
        let mut plan = Plan::new(Seed::Random(5));
        plan.faults.clear();
        plan.verify = verify;
        plan.sabotage = Some(Sabotage::ForgetPages);
        run(&plan, false)
    };
    let seen = outcome(true);
    assert_eq!((seen.end, seen.violations.len()), (SourceEnd::Kept, 0), "{seen:?}");
    let unseen = outcome(false);
    assert_eq!(unseen.end, SourceEnd::Given);
    assert!(unseen.violations[0].contains("the memory that arrived differs"), "{unseen:?}");
}

/// The number of the first message of a kind in a schedule without faults.
fn number_of(plan: &Plan, what: &str) -> u64 {
    let mut undisturbed = plan.clone();
    undisturbed.faults.clear();
    let trace = run(&undisturbed, true).trace;
    let line = trace.iter().find(|line| line.ends_with(what)).expect("it is sent");
    let words: Vec<&str> = line.split_whitespace().collect();
    words[2].parse().expect("messages are numbered")
}

/// Weaknesses of other implementations, one by one.
mod known_weaknesses {
    use std::time::Duration;

    use vmferry_sim::{Host, Ways, WriteFault};

    use super::*;

    fn plan(faults: impl FnOnce(&Plan) -> Vec<Fault>) -> Plan {
        let mut plan = Plan::new(Seed::Boundary(0));
        plan.faults = faults(&plan);
        plan
    }

    #[test]
    fn lost_last_reply_leaves_one_running_guest() {
        for lost in [true, false] {
            let outcome = run(
                &plan(|plan| {
                    let message = number_of(plan, "RUNNING");
                    let ways = Ways::To(Host::Source);
                    vec![Fault::Silence { message, ways, lasts: Duration::from_secs(90), lost }]
                }),
                false,
            );
            assert_eq!(outcome.violations, [""; 0]);
            assert_eq!((outcome.end, outcome.was_in_doubt), (SourceEnd::Given, true));
        }
    }

    #[test]
    fn error_after_completion_resumes_no_outdated_source() {
        let outcome = run(
            &plan(|plan| {
                let message = number_of(plan, "RUNNING");
                vec![
                    Fault::Cut { message, place: Where::Before, all: true, away: Duration::ZERO },
                    Fault::Crash {
                        host: Host::Source,
                        message,
                        back_after: Duration::from_secs(1),
                    },
                ]
            }),
            false,
        );
        assert_eq!(outcome.violations, [""; 0]);
        assert_eq!(outcome.end, SourceEnd::Given);
    }

    #[test]
    fn unknown_session_is_not_aborted() {
        let outcome = run(
            &plan(|plan| {
                let message = number_of(plan, "RUNNING");
                vec![
                    Fault::Cut { message, place: Where::Before, all: true, away: Duration::ZERO },
                    Fault::Stranger { message, lasts: Duration::from_secs(30) },
                ]
            }),
            true,
        );
        assert_eq!(outcome.violations, [""; 0]);
        assert_eq!((outcome.end, outcome.was_in_doubt), (SourceEnd::Given, true));
        assert!(outcome.took > Duration::from_secs(30), "it asked until the right one answered");
    }

    #[test]
    fn end_of_a_link_is_never_success() {
        // The destination dies with COMMIT on its way: the source must query, and get the guest
        // back.
        let outcome = run(
            &plan(|plan| {
                let message = number_of(plan, "COMMIT");
                let back_after = Duration::from_secs(5);
                vec![Fault::Crash { host: Host::Destination, message, back_after }]
            }),
            false,
        );
        assert_eq!(outcome.violations, [""; 0]);
        assert_eq!((outcome.end, outcome.was_in_doubt), (SourceEnd::Kept, true));
    }

    #[test]
    fn run_intent_after_a_failed_write_runs_no_guest_until_the_disk_is_read() {
        for (how, end) in
            [(WriteFault::Torn, SourceEnd::Kept), (WriteFault::OnDisk, SourceEnd::Given)]
        {
            let outcome = run(
                &plan(|_| {
                    // After OPEN.
                    vec![Fault::Write { host: Host::Destination, number: 1, how, crash: false }]
                }),
                false,
            );
            assert_eq!(outcome.violations, [""; 0]);
            assert_eq!((outcome.end, outcome.was_in_doubt), (end, true), "{how:?}");
        }
    }

    #[test]
    fn commit_is_not_sent_after_a_failed_write() {
        for how in [WriteFault::Lost, WriteFault::Torn, WriteFault::OnDisk] {
            for crash in [false, true] {
                let outcome = run(
                    &plan(|_| vec![Fault::Write { host: Host::Source, number: 1, how, crash }]),
                    false,
                );
                assert_eq!(outcome.violations, [""; 0]);
                assert_eq!(outcome.end, SourceEnd::Kept, "{how:?} {crash}");
            }
        }
    }

    /// The first message of a kind after another one.
    fn next_after(plan: &Plan, what: &str, after: u64) -> Option<u64> {
        let numbered = |line: &String| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = words.get(2)?.parse().ok()?;
            (words[1] == "message" && line.ends_with(what) && number > after).then_some(number)
        };
        run(plan, true).trace.iter().find_map(numbered)
    }

    /// A lane is lost after FINAL, so the guest is resumed. READY, sent before the destination
    /// could know, is so late that the source waits for the next one, and the late READY looks like
    /// that one, because the guest has written nothing. WITHDRAW and everything after it is lost
    /// after COMMIT, which the source may repeat on another channel.
    #[test]
    fn late_ready_does_not_hand_over_a_guest_that_ran_on() {
        let mut reached = 0;
        for rng in 0..400 {
            let mut plan = Plan::new(Seed::Boundary(2));
            plan.reconnect = Duration::from_secs(20);
            (plan.rng, plan.rounds, plan.quiet) = (rng, 1, true);
            plan.faults.clear();
            let last = next_after(&plan, "FINAL", 0).expect("it is sent") - 1;
            let (all, away) = (false, Duration::ZERO);
            plan.faults.push(Fault::Cut { message: last, place: Where::After, all, away });
            for (what, by) in [("PLACED", 3), ("WITHDRAW", 5)] {
                let Some(message) = next_after(&plan, what, last) else { break };
                plan.faults.push(Fault::Delay { message, by: Duration::from_secs(by) });
            }
            if plan.faults.len() == 3 && next_after(&plan, "READY", last).is_some() {
                reached += 1;
            }
            if let Some(message) = next_after(&plan, "COMMIT", last) {
                plan.faults.push(Fault::Cut { message, place: Where::Before, all: true, away });
            }
            let outcome = run(&plan, false);
            assert_eq!(outcome.violations, [""; 0], "{plan:#?}");
        }
        assert!(reached > 3, "{reached} of them had a late READY");
    }
}
