//! Schedules with a witness.

use fastrand::Rng;
use vmferry_wire::PROTOCOL_VERSION_MAX;

use super::fault::{Fault, Ways, Where};
use super::{MESSAGES, Plan, SECOND};
use crate::host::Host;

/// Longer than any schedule: the link is cut for good.
const FOR_GOOD: std::time::Duration = std::time::Duration::from_secs(3600);

/// Whether a random schedule has a witness: a quarter of them have, whatever their faults are.
pub(super) fn is_random(number: u64) -> bool {
    number % 4 == 1
}

/// Faults that only a schedule with a witness has.
pub(super) fn random_faults(rng: &mut Rng, messages: u64) -> Vec<Fault> {
    let mut faults = Vec::new();
    if rng.u32(..3) == 0 {
        let place = if rng.bool() { Where::Within } else { Where::After };
        faults.push(cut_for_good(rng.u64(..messages), place));
    }
    for _ in 0..rng.u32(..3) {
        let (message, lasts) = (rng.u64(..messages), SECOND * rng.u32(1..60));
        faults.push(match rng.u32(..8) {
            0..5 => {
                let one = Ways::To(if rng.bool() { Host::Source } else { Host::Destination });
                let ways = if rng.bool() { one } else { Ways::Both };
                Fault::WitnessCut { message, ways, lasts, answers_only: rng.u32(..4) == 0 }
            }
            5..7 => Fault::WitnessSlow { message, lasts },
            _ => Fault::WitnessLost { message },
        });
    }
    faults
}

/// Every channel is cut at this message, and none can be opened again.
fn cut_for_good(message: u64, place: Where) -> Fault {
    Fault::Cut { message, place, all: true, away: FOR_GOOD }
}

/// What can happen at one message, besides that the link is cut for good there.
fn kinds(message: u64) -> Vec<Vec<Fault>> {
    let lasts = SECOND * 20;
    let cut_off =
        |ways, answers_only| vec![Fault::WitnessCut { message, ways, lasts, answers_only }];
    let crash = |host| vec![Fault::Crash { host, message, back_after: SECOND * 2 }];
    vec![
        Vec::new(),
        cut_off(Ways::To(Host::Source), false),
        cut_off(Ways::To(Host::Destination), false),
        cut_off(Ways::To(Host::Destination), true),
        cut_off(Ways::Both, false),
        cut_off(Ways::Both, true),
        vec![Fault::WitnessSlow { message, lasts }],
        vec![Fault::WitnessLost { message }],
        crash(Host::Source),
        crash(Host::Destination),
    ]
}

/// The number of schedules in which the link is cut for good, with a witness, at each of the first
/// messages: as many as an undisturbed migration without post-copy has.
pub(super) fn boundaries() -> u64 {
    4 * kinds(0).len() as u64 * MESSAGES
}

/// The faults of one of them, and whether the guest moves with post-copy.
pub(super) fn boundary(number: u64) -> (Vec<Fault>, bool) {
    let (post_copy, number) = (number % 2 == 1, number / 2);
    // Either the message is lost, or nothing after it arrives.
    let (place, number) = ([Where::Within, Where::After][(number % 2) as usize], number / 2);
    let all = kinds(0).len() as u64;
    let (message, kind) = (number / all, (number % all) as usize);
    let mut faults = kinds(message).swap_remove(kind);
    faults.push(cut_for_good(message, place));
    (faults, post_copy)
}

impl Plan {
    /// The same schedule with a witness.
    #[must_use]
    pub fn with_witness(mut self) -> Self {
        self.witness = true;
        self.protocol = PROTOCOL_VERSION_MAX;
        self
    }

    /// Whether a doubt must end soon after both hosts reach the witness: processes live, and no
    /// step is slow.
    #[must_use]
    pub fn is_decided_soon(&self) -> bool {
        let harmless = |fault: &Fault| {
            matches!(
                fault,
                Fault::Cut { .. } | Fault::WitnessCut { .. } | Fault::WitnessSlow { .. }
            )
        };
        self.witness && self.sabotage.is_none() && self.faults.iter().all(harmless)
    }
}
