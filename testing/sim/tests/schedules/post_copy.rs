//! Schedules in which the guest is handed over with post-copy.

use std::time::Duration;

use vmferry_sim::{POST_COPY_MESSAGES, Ways};

use super::*;

/// A schedule with post-copy and without faults.
fn undisturbed(rng: u64) -> Plan {
    let mut plan = Plan::new(Seed::Boundary(0)).with_post_copy();
    plan.rng = rng;
    plan.faults.clear();
    plan
}

#[test]
fn undisturbed_schedule_fetches_all_pages_and_enumerates_its_messages() {
    let mut again = 0;
    for number in 0..60 {
        let mut plan = undisturbed(number);
        plan.lanes = [1, 2, 4][number as usize % 3];
        let outcome = run(&plan, false);
        assert_eq!((outcome.end, &outcome.violations[..]), (SourceEnd::Given, &[][..]));
        assert!(outcome.fetching && outcome.fetched.pages > 5, "{:?}", outcome.fetched);
        assert!(outcome.fetched.faults > 0, "no vCPU waited: {:?}", outcome.fetched);
        again += outcome.fetched.again;
        let counted = POST_COPY_MESSAGES;
        assert!(outcome.messages < counted, "{} messages, {counted} counted", outcome.messages);
    }
    assert!(again > 0, "no page was requested for a vCPU and in the background");
}

#[test]
fn post_copy_meets_every_kind_of_fault() {
    let plans = (0..Plan::boundaries()).map(|number| Plan::new(Seed::Boundary(number)));
    let plans: Vec<Plan> = plans.filter(|plan| plan.post_copy).collect();
    let meets =
        |wanted: fn(&Fault) -> bool| plans.iter().any(|plan| plan.faults.iter().any(wanted));
    for message in 0..POST_COPY_MESSAGES {
        let cuts = plans.iter().filter(|plan| {
            let cut =
                |fault: &Fault| matches!(fault, Fault::Cut { message: at, .. } if *at == message);
            plan.faults.iter().any(cut)
        });
        assert!(cuts.count() >= 10, "{message}");
    }
    assert!(meets(|fault| matches!(fault, Fault::Silence { .. })));
    assert!(meets(|fault| matches!(fault, Fault::Damage { .. })));
    assert!(meets(|fault| matches!(fault, Fault::Repeat { .. })));
    assert!(meets(|fault| matches!(fault, Fault::Stranger { .. })));
    assert!(meets(|fault| matches!(fault, Fault::Cancel { .. })));
    // The destination's third write is FETCHED.
    assert!(meets(|fault| {
        matches!(fault, Fault::Write { host: Host::Destination, number: 2, .. })
    }));
    assert!(meets(|fault| matches!(fault, Fault::Vm { .. })));
    assert!(meets(|fault| matches!(fault, Fault::Slow { .. })));
    assert!(meets(|fault| matches!(fault, Fault::Crash { .. })));
}

/// A guest that runs at the destination needs the source, so no lost channel ends a migration.
#[test]
fn cut_while_pages_are_fetched_ends_no_migration() {
    for (all, away) in [(false, 0), (true, 0), (true, 60)] {
        let first = number_of(&undisturbed(0), "ANSWER");
        for message in first..first + 30 {
            let (place, away) = (Where::Within, Duration::from_secs(away));
            let mut plan = undisturbed(0);
            plan.faults = vec![Fault::Cut { message, place, all, away }];
            let outcome = run(&plan, false);
            assert_eq!((outcome.end, &outcome.violations[..]), (SourceEnd::Given, &[][..]));
        }
    }
}

/// Processes that die while pages are missing, one of them or both.
#[test]
fn restarted_process_goes_on_where_the_other_one_died() {
    let first = number_of(&undisturbed(0), "ANSWER");
    let (mut taken_over, mut served_again) = (0, 0);
    for message in first..first + 30 {
        let back_after = Duration::from_secs(5);
        let crash = |host| Fault::Crash { host, message, back_after };
        let (here, there) = (crash(Host::Source), crash(Host::Destination));
        for faults in [vec![here], vec![there], vec![here, there]] {
            let mut plan = undisturbed(0);
            (plan.outlives, plan.faults) = (true, faults);
            let outcome = run(&plan, false);
            assert_eq!((outcome.end, &outcome.violations[..]), (SourceEnd::Given, &[][..]));
            assert!(!outcome.crashed_there && !outcome.given_up, "{outcome:?}");
            taken_over += outcome.taken_over;
            served_again += outcome.served_again;
        }
    }
    assert!(taken_over > 20 && served_again > 10, "{taken_over} {served_again}");
}

/// A guest that lives in the process which receives it dies with that process. Its source keeps the
/// memory until an operator gives the guest up.
#[test]
fn guest_that_dies_while_it_lacks_pages_is_given_up() {
    let mut plan = undisturbed(0);
    let message = number_of(&plan, "ANSWER") + 5;
    let back_after = Duration::from_secs(5);
    plan.faults = vec![Fault::Crash { host: Host::Destination, message, back_after }];
    plan.outlives = false;
    let outcome = run(&plan, false);
    assert_eq!((outcome.end, &outcome.violations[..]), (SourceEnd::Given, &[][..]));
    assert!(outcome.given_up && outcome.crashed_there, "{outcome:?}");
}

/// The same with a guest in a process of its own, whose receiver lives, dies, or loses the link.
#[test]
fn guest_that_crashes_alone_is_given_up() {
    let first = number_of(&undisturbed(0), "ANSWER");
    let (back_after, away) = (Duration::from_secs(5), Duration::from_secs(10));
    let mut crashed = 0;
    for message in first..first + 20 {
        let crash = |host| Fault::Crash { host, message: message + 1, back_after };
        let cut = Fault::Cut { message: message + 1, place: Where::Before, all: true, away };
        for more in [vec![], vec![crash(Host::Destination)], vec![crash(Host::Source)], vec![cut]] {
            let mut plan = undisturbed(0);
            plan.faults = vec![Fault::GuestCrash { message }];
            plan.faults.extend(more);
            plan.outlives = true;
            let outcome = run(&plan, false);
            assert_eq!((outcome.end, &outcome.violations[..]), (SourceEnd::Given, &[][..]));
            assert_eq!(outcome.given_up, outcome.crashed_there, "{outcome:?}");
            crashed += u64::from(outcome.crashed_there);
        }
    }
    assert!(crashed > 40, "{crashed}");
}

#[test]
fn sabotage_of_a_crashed_guest_is_detected() {
    let outcome = |sabotage| {
        let mut plan = undisturbed(0);
        let message = number_of(&plan, "ANSWER") + 5;
        plan.faults = vec![Fault::GuestCrash { message }];
        (plan.outlives, plan.sabotage) = (true, sabotage);
        run(&plan, false)
    };
    assert_eq!(outcome(None).violations, [""; 0]);
    let violations = outcome(Some(Sabotage::EndedIsOwns)).violations;
    assert_eq!(violations, ["the source frees what a crashed guest lacked"]);
}

#[test]
fn sabotage_of_a_restarted_destination_is_detected() {
    let outcome = |sabotage| {
        let mut plan = undisturbed(0);
        let message = number_of(&plan, "ANSWER") + 5;
        let back_after = Duration::from_secs(5);
        plan.faults = vec![Fault::Crash { host: Host::Destination, message, back_after }];
        (plan.outlives, plan.sabotage) = (true, sabotage);
        run(&plan, false)
    };
    assert_eq!(outcome(None).violations, [""; 0]);
    let violations = outcome(Some(Sabotage::ForgetMissing)).violations;
    let detected = |text: &String| text.contains("is not version");
    assert!(violations.iter().any(detected), "{violations:?}");
}

/// Nobody sends on a fetch lane whose answers were lost, so only the silence of the control channel
/// tells the source that the lane is lost too.
#[test]
fn lanes_are_redialed_after_a_silence() {
    for ways in [Ways::Both, Ways::To(Host::Source), Ways::To(Host::Destination)] {
        let restored = (0..4).map(|rng| {
            let mut plan = undisturbed(rng);
            let (message, lasts) = (number_of(&plan, "ANSWER"), Duration::from_secs(40));
            plan.faults = vec![Fault::Silence { message, ways, lasts, lost: true }];
            let outcome = run(&plan, false);
            let end = (outcome.end, &outcome.violations[..]);
            assert_eq!(end, (SourceEnd::Given, &[][..]), "{ways:?}");
            outcome.restored
        });
        // The last page may arrive before a lane has its next channel.
        assert!(restored.max() >= Some(4), "{ways:?}: 2 lanes for faults and 2 others");
    }
}

/// Each rule of post-copy, when broken, is detected by the check that was made for it.
#[test]
fn sabotage_of_post_copy_is_detected() {
    for (sabotage, violation) in [
        (Sabotage::ServeZeros, "a page that arrived differs"),
        (Sabotage::OmitLacking, "the memory that arrived differs"),
        (Sabotage::PlaceLate, "the guest reads a wrong page"),
        (Sabotage::FetchingIsOwns, "pages that the guest lacks"),
        (Sabotage::FetchedEarly, "the source frees 1 pages that the guest lacks"),
    ] {
        let found = |plan: &Plan| {
            let violations = run(plan, false).violations;
            violations.iter().any(|text| text.contains(violation))
        };
        let plans = || (0..20).map(undisturbed);
        assert!(!plans().any(|plan| found(&plan)), "{violation}");
        let sabotaged = |plan: Plan| Plan { sabotage: Some(sabotage), ..plan };
        assert!(plans().any(|plan| found(&sabotaged(plan))), "{sabotage:?}");
    }
}

#[test]
fn sabotage_of_repeated_requests_is_detected() {
    let outcome = |sabotage| {
        let mut plan = undisturbed(0);
        // A request of the background.
        let message = number_of(&plan, "page") + 2;
        let away = Duration::ZERO;
        plan.faults = vec![Fault::Cut { message, place: Where::Before, all: true, away }];
        plan.sabotage = sabotage;
        run(&plan, false)
    };
    assert_eq!(outcome(None).violations, [""; 0]);
    let violations = outcome(Some(Sabotage::ForgetRequests)).violations;
    assert!(violations[0].starts_with("nothing is decided"), "{violations:?}");
}
