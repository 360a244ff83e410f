//! The faults of a schedule and their times. Everything follows from the schedule's number.

mod fault;
mod generate;
mod post_copy;
mod sabotage;
mod seed;
mod step;
mod witness;

use std::time::Duration;

use fastrand::Rng;
use vmferry_wire::{PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN};

pub use self::fault::{Fault, VmCall, Ways, Where, WriteFault};
use self::generate::{boundary_kinds, random_cut, random_fault, write_faults};
pub use self::sabotage::Sabotage;
pub use self::seed::Seed;
pub use self::step::Step;

/// A schedule.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Its number.
    pub seed: Seed,
    /// Seeds everything that the faults leave open.
    pub rng: u64,
    /// The newest version of the protocol that the destination speaks; the source speaks all.
    pub protocol: u16,
    /// The number of data channels.
    pub lanes: u8,
    /// Whether both memories are verified.
    pub verify: bool,
    /// Whether the guest is handed over with post-copy.
    pub post_copy: bool,
    /// Whether a witness decides in doubt.
    pub witness: bool,
    /// Rounds with the guest running.
    pub rounds: u32,
    /// For how long a lost channel is reconnected; 0 gives up at once.
    pub reconnect: Duration,
    /// Whether the guest writes nothing during the migration. Even then a saved state is outdated
    /// once the guest has run on.
    pub quiet: bool,
    /// Whether the guest at the destination outlives its receiver.
    pub outlives: bool,
    /// The faults.
    pub faults: Vec<Fault>,
    /// The deliberate defect.
    pub sabotage: Option<Sabotage>,
}

/// Upper bound of the messages of an undisturbed migration without post-copy.
pub const MESSAGES: u64 = 96;

/// Upper bound of the messages of an undisturbed migration with post-copy.
pub const POST_COPY_MESSAGES: u64 = 216;

/// Upper bound of a host's journal writes.
const WRITES: u64 = 4;

const SECOND: Duration = Duration::from_secs(1);

/// The duration of a slow step: longer than the silence timeout, and shorter than the timeout for
/// any step.
const SLOW: Duration = Duration::from_secs(22);

impl Plan {
    /// The schedule with this number.
    #[must_use]
    pub fn new(seed: Seed) -> Self {
        match seed {
            Seed::Random(number) => Self::random(seed, number),
            Seed::Boundary(number) => Self::boundary(seed, number),
        }
    }

    fn random(seed: Seed, number: u64) -> Self {
        let mut rng = Rng::with_seed(number);
        let post_copy = post_copy::is_random(number);
        let messages = if post_copy { POST_COPY_MESSAGES } else { MESSAGES };
        let reconnect = SECOND * [0, 0, 2, 5, 10, 30][rng.usize(..6)];
        let faults = if rng.u32(..3) == 0 {
            (0..rng.u32(1..5)).map(|_| random_cut(&mut rng, messages, SECOND * 2)).collect()
        } else {
            let count = [0, 1, 1, 2, 2, 2, 3, 3, 4, 5][rng.usize(..10)];
            (0..count).map(|_| random_fault(&mut rng, messages)).collect()
        };
        let mut plan = Self {
            seed,
            rng: rng.u64(..),
            protocol: protocol(number),
            lanes: [1, 2, 2, 4][rng.usize(..4)],
            verify: rng.bool(),
            post_copy: false,
            witness: false,
            rounds: rng.u32(1..4),
            reconnect,
            quiet: rng.u32(..8) == 0,
            outlives: outlives(number),
            faults,
            sabotage: None,
        };
        if post_copy && plan.outlives && rng.u32(..4) == 0 {
            plan.faults.push(Fault::GuestCrash { message: rng.u64(..messages) });
        }
        if witness::is_random(number) {
            plan.faults.extend(witness::random_faults(&mut rng, messages));
            plan = plan.with_witness();
        }
        if post_copy { plan.with_post_copy() } else { plan }
    }

    /// Whether the link is the only fault and returns each time before either side gives up: all
    /// outages together, plus the time to reconnect the channels, are shorter than that. Or whether
    /// the only fault is a slow step within the other side's timeout for it.
    #[must_use]
    pub fn is_mild(&self) -> bool {
        let away = self.faults.iter().try_fold(Duration::ZERO, |sum, fault| match fault {
            Fault::Cut { away, .. } => Some(sum + *away + SECOND),
            _ => None,
        });
        let slow = matches!(self.faults[..], [Fault::Slow { .. }]);
        // With post-copy a link that is lost between FINAL and COMMIT ends the migration.
        slow || !self.post_copy && away.is_some_and(|away| away < self.reconnect)
    }

    /// Whether the only fault is a slow step for which the other side waits without being in doubt.
    /// The wait for RUNNING is a short one.
    #[must_use]
    pub fn is_borne(&self) -> bool {
        matches!(
            self.faults[..],
            [Fault::Slow { step, .. }] if !matches!(step, Step::WriteIntent | Step::Run)
        )
    }

    /// The number of boundary schedules. Those with a witness are the last ones, after those with
    /// post-copy.
    #[must_use]
    pub fn boundaries() -> u64 {
        Self::boundaries_without_witness() + witness::boundaries()
    }

    fn boundaries_without_witness() -> u64 {
        Self::pre_copy_boundaries()
            + post_copy::SHAPES.len() as u64 * one_faults(POST_COPY_MESSAGES)
    }

    fn pre_copy_boundaries() -> u64 {
        SHAPES.len() as u64 * one_faults(MESSAGES)
    }

    fn boundary(seed: Seed, number: u64) -> Self {
        if let Some(number) = number.checked_sub(Self::boundaries_without_witness()) {
            let (faults, post_copy) = witness::boundary(number);
            // The shape without a comparison and without a wait for a lost channel.
            let plain = Self { faults, outlives: outlives(number), ..Self::boundary(seed, 1) };
            let plan = plain.with_witness();
            return if post_copy { plan.with_post_copy() } else { plan };
        }
        let (post_copy, number, shapes, messages) =
            match number.checked_sub(Self::pre_copy_boundaries()) {
                None => (false, number, &SHAPES[..], MESSAGES),
                Some(number) => (true, number, &post_copy::SHAPES[..], POST_COPY_MESSAGES),
            };
        let (lanes, verify, reconnect) = shapes[(number % shapes.len() as u64) as usize];
        let number = number / shapes.len() as u64;
        let faults = one_fault(number, messages);
        let reconnect = SECOND * reconnect;
        let plan = Self {
            seed,
            rng: number % 7,
            protocol: protocol(number),
            lanes,
            verify,
            post_copy: false,
            witness: false,
            rounds: 2,
            reconnect,
            quiet: false,
            outlives: outlives(number),
            faults,
            sabotage: None,
        };
        if post_copy { plan.with_post_copy() } else { plan }
    }
}

/// The number of faults of boundary schedules with up to this number of messages.
fn one_faults(messages: u64) -> u64 {
    let others = write_faults().len() + VM_CALLS.len() + Step::ALL.len();
    boundary_kinds(0).len() as u64 * messages + others as u64
}

/// The faults of a boundary schedule with up to this number of messages.
fn one_fault(number: u64, messages: u64) -> Vec<Fault> {
    let kinds = boundary_kinds(0).len() as u64;
    let Some(rest) = number.checked_sub(kinds * messages) else {
        return boundary_kinds(number / kinds).swap_remove((number % kinds) as usize);
    };
    let (writes, rest) = (write_faults(), rest as usize);
    if let Some(faults) = writes.get(rest) {
        return faults.clone();
    }
    let rest = rest - writes.len();
    match VM_CALLS.get(rest) {
        Some(&call) => vec![Fault::Vm { call }],
        None => {
            let step = Step::ALL[(rest - VM_CALLS.len()) % Step::ALL.len()];
            vec![Fault::Slow { step, takes: SLOW }]
        }
    }
}

/// Half of all schedules have a destination of the previous release, whatever their faults are.
fn protocol(number: u64) -> u16 {
    let versions = u64::from(PROTOCOL_VERSION_MAX - PROTOCOL_VERSION_MIN) + 1;
    // Kinds of faults have their own order, with an even period.
    PROTOCOL_VERSION_MIN + ((number + number / 7) % versions) as u16
}

/// In a third of all schedules the guest outlives its receiver, whatever their faults are.
fn outlives(number: u64) -> bool {
    // No other period is divisible by three.
    (number + number / 11).is_multiple_of(3)
}

/// Data channels, whether both memories are verified, and the reconnect timeout in seconds.
const SHAPES: [(u8, bool, u32); 6] =
    [(2, true, 0), (2, false, 0), (1, false, 0), (4, true, 0), (2, false, 20), (3, true, 20)];

const VM_CALLS: [VmCall; 7] = [
    VmCall::Pause,
    VmCall::Save,
    VmCall::Resume,
    VmCall::Prepare,
    VmCall::Load,
    VmCall::Run,
    VmCall::Compress,
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Host;

    #[test]
    fn seed_enumerates_every_boundary() {
        let plans: Vec<Plan> =
            (0..Plan::boundaries()).map(|number| Plan::new(Seed::Boundary(number))).collect();
        let at = |message| {
            plans.iter().any(|plan| {
                let away = Duration::ZERO;
                plan.faults.contains(&Fault::Cut { message, place: Where::Within, all: true, away })
            })
        };
        assert!((0..MESSAGES).all(at));
        for call in VM_CALLS {
            assert!(plans.iter().any(|plan| plan.faults == [Fault::Vm { call }]), "{call:?}");
        }
        let last = Fault::Write {
            host: Host::Destination,
            number: WRITES - 1,
            how: WriteFault::OnDisk,
            crash: true,
        };
        assert!(plans.iter().any(|plan| plan.faults == [last]));
    }
}
