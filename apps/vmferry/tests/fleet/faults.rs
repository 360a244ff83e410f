//! Moves by order with seeded faults: in the end one host has the guest, two never ran it, and no
//! doubt is left.

mod place;

use std::time::{Duration, Instant};

use fastrand::Rng;
use parking_lot::Mutex;

use self::place::{Moment, Place};
use crate::support::strikes::Tally;
use crate::support::{all, in_parallel};

/// How long doubt may last once etcd can be reached, and how long an order may take once all is
/// well again. An agent's lease, a destination's wait for COMMIT and reconnection are in it.
const PATIENCE: Duration = Duration::from_secs(180);

/// What strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    AgentOfSourceKilled,
    AgentOfDestinationKilled,
    AgentOfSourceStopped,
    AgentOfDestinationStopped,
    DaemonOfSourceKilled,
    DaemonOfDestinationKilled,
    SenderKilled,
    SenderStopped,
    ReceiverKilled,
    ReceiverStopped,
    EtcdMinorityKilled,
    EtcdMajorityKilled,
    EtcdSilent,
    EtcdDiskFull,
    LinkCut,
    LinkFrozen,
    ClockAnHourAhead,
}

impl Fault {
    const ALL: [Self; 17] = [
        Self::AgentOfSourceKilled,
        Self::AgentOfDestinationKilled,
        Self::AgentOfSourceStopped,
        Self::AgentOfDestinationStopped,
        Self::DaemonOfSourceKilled,
        Self::DaemonOfDestinationKilled,
        Self::SenderKilled,
        Self::SenderStopped,
        Self::ReceiverKilled,
        Self::ReceiverStopped,
        Self::EtcdMinorityKilled,
        Self::EtcdMajorityKilled,
        Self::EtcdSilent,
        Self::EtcdDiskFull,
        Self::LinkCut,
        Self::LinkFrozen,
        Self::ClockAnHourAhead,
    ];
}

/// The faults of one move.
#[derive(Clone, Copy, Debug)]
struct Plan {
    seed: u64,
    moment: Moment,
    /// At the moment, and soon after.
    faults: [Fault; 2],
    /// How long they last.
    lasts: Duration,
}

impl Plan {
    fn of(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let mut one = || Fault::ALL[random.usize(..Fault::ALL.len())];
        // Each fault is the first one at each moment in turn.
        let number = usize::try_from(seed).unwrap();
        let first = Fault::ALL[number % Fault::ALL.len()];
        let moment = Moment::ALL[number / Fault::ALL.len() % Moment::ALL.len()];
        let faults = [first, one()];
        Self { seed, moment, faults, lasts: Duration::from_millis(random.u64(200..6000)) }
    }
}

/// Each fault at each moment, and another one beside it; a few of these by default.
#[test]
fn faults_leave_one_owner_and_no_doubt() {
    let number = (Fault::ALL.len() * Moment::ALL.len()) as u64;
    let seeds: Vec<u64> = match std::env::var("VMFERRY_SEEDS") {
        Ok(range) => {
            let (first, end) = range.split_once("..").expect("VMFERRY_SEEDS=FIRST..END");
            (first.parse().unwrap()..end.parse().unwrap()).collect()
        }
        Err(_) if all() => (0..number).collect(),
        Err(_) => (0..number).step_by(20).collect(),
    };
    let (tally, longest) = (Mutex::new(Tally::default()), Mutex::new(Duration::ZERO));
    let moves = seeds.len();
    in_parallel(seeds, |seed| {
        let plan = Plan::of(seed);
        println!("{plan:?}");
        let (outcome, took) = carry_out(plan);
        println!("seed {}: {outcome}, {took:.1?} after all was well again", plan.seed);
        let mut longest = longest.lock();
        *longest = took.max(*longest);
        for fault in plan.faults {
            tally.lock().add(&format!("{:?}", plan.moment), &format!("{fault:?}"));
        }
    });
    tally.lock().print(moves);
    println!("the last order was over {:.1?} after all was well again", longest.lock());
}

/// Returns what became of the guest, and how long that took once all was well again.
fn carry_out(plan: Plan) -> (String, Duration) {
    let mut place = Place::new(plan.moment);
    let mut order = place.order();
    place.reaches(plan.moment, &mut order);
    for fault in plan.faults {
        place.strike(fault);
    }
    // The faults last for this time.
    std::thread::sleep(plan.lasts);
    place.heal();
    let healed = Instant::now();
    let moved = place.settles(order, healed + PATIENCE);
    let (took, times) = (healed.elapsed(), place.watch.check());
    // Otherwise a QEMU was not listened to.
    assert!(times >= if moved { 2 } else { 1 }, "it has begun to run {times} times");
    let outcome = if moved { "the guest has moved" } else { "the guest has stayed" };
    (format!("{outcome}, which began to run {times} times"), took)
}
