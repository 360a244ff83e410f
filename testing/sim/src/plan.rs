//! What goes wrong in a schedule, and when: everything follows from its number.

mod faults;
mod step;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use fastrand::Rng;
use vmferry_wire::{PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN};

use self::faults::{boundary_kinds, random_cut, random_fault, write_faults};
pub use self::step::Step;

/// One of the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Host {
    /// The host that the guest leaves.
    Source,
    /// The host that it goes to.
    Destination,
}

impl Host {
    /// The other one.
    #[must_use]
    pub fn peer(self) -> Self {
        match self {
            Self::Source => Self::Destination,
            Self::Destination => Self::Source,
        }
    }
}

/// The number of a schedule. The same number is the same schedule, whatever the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Seed {
    /// Any faults at any time.
    Random(u64),
    /// One fault, at one message boundary or journal write, of one kind: counted through.
    Boundary(u64),
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Random(number) => write!(f, "random:{number}"),
            Self::Boundary(number) => write!(f, "boundary:{number}"),
        }
    }
}

impl FromStr for Seed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = || format!("`{text}` is no seed: random:NUMBER or boundary:NUMBER");
        let (kind, number) = text.split_once(':').ok_or_else(wanted)?;
        let number = number.parse().map_err(|_| wanted())?;
        match kind {
            "random" => Ok(Self::Random(number)),
            "boundary" => Ok(Self::Boundary(number)),
            _ => Err(wanted()),
        }
    }
}

/// Where a channel is cut, beside a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// Before the message: it is lost.
    Before,
    /// Within it: a part of it arrives.
    Within,
    /// After it has arrived.
    After,
}

/// Which messages a silent network swallows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ways {
    /// Those to both hosts.
    Both,
    /// Those to one host.
    To(Host),
}

impl Ways {
    /// Whether messages to `host` are swallowed.
    #[must_use]
    pub fn cover(self, host: Host) -> bool {
        self == Self::Both || self == Self::To(host)
    }
}

/// What becomes of a journal's write that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteFault {
    /// Nothing of it is on disk.
    Lost,
    /// A part of the line is.
    Torn,
    /// All of it is, though the write said that it failed.
    OnDisk,
}

/// A call into a VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmCall {
    /// The source pauses the guest.
    Pause,
    /// The source saves its state.
    Save,
    /// The source resumes it, and is asked to again.
    Resume,
    /// The source makes a compressor.
    Compress,
    /// The destination makes its memory.
    Prepare,
    /// The destination loads its state.
    Load,
    /// The destination starts it: the guest crashes.
    Run,
}

/// One thing that goes wrong. Messages are counted from 0 over all channels, as they are sent.
#[allow(missing_docs, reason = "each variant says what its fields are")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// All channels are cut, or only the message's, and for some time none can be made.
    Cut { message: u64, place: Where, all: bool, away: Duration },
    /// From this message on the network is silent. What was sent then arrives when it speaks again,
    /// unless it is lost.
    Silence { message: u64, ways: Ways, lasts: Duration, lost: bool },
    /// The message arrives twice.
    Repeat { message: u64 },
    /// The message, and what follows on its channel, is late.
    Delay { message: u64, by: Duration },
    /// A bit of the message is flipped.
    Damage { message: u64, bit: u32 },
    /// A host's process dies when the message is sent, and comes back.
    Crash { host: Host, message: u64, back_after: Duration },
    /// The user cancels.
    Cancel { host: Host, message: u64 },
    /// For some time somebody else answers at the destination's address, and knows nothing.
    Stranger { message: u64, lasts: Duration },
    /// Beside the message, the session's control channel brings another one, of this number, to a
    /// host: its peer does not keep the protocol.
    Forge { message: u64, to: Host, number: u16 },
    /// A write to a journal fails, counted from 0 for each host. `crash`: the process dies with it.
    Write { host: Host, number: u64, how: WriteFault, crash: bool },
    /// A VMM's call fails.
    Vm { call: VmCall },
    /// A step takes so long, once: the process listens to nobody meanwhile.
    Slow { step: Step, takes: Duration },
}

/// The proof that the checks can fail: something is broken that no correct engine breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The log forgets pages.
    ForgetPages,
    /// The source hears ABORTED where the destination said that it knows no such session.
    UnknownIsAborted,
    /// The destination's disk forgets what it said was written.
    LyingDisk,
    /// The source never learns that the link is lost, and no time passes for it.
    NoClock,
    /// The pages of a round that was recalled are not sent once more.
    ForgetRecalled,
    /// A guest that was paused waits for the link instead of running on.
    StayPaused,
    /// The source lets the guest run on when a lane is lost, and believes in READY all the same.
    RunOnBeforeReady,
    /// The source does not tell the destination that the guest runs on.
    ForgetWithdraw,
    /// The destination takes the last frame before a cut for one that it has not placed.
    PlaceTwice,
    /// A lane does not send again what was lost with its channel.
    ForgetKept,
    /// The destination goes on with a FINAL that it heard before the control channel was made again.
    KeepFinal,
    /// Hints of free pages are not stopped before a harvest.
    HintAcrossHarvest,
    /// Hints are asked for before the pages of the round are protected again.
    HintUnprotected,
    /// A receiver that is restarted leaves a guest that outlived the one before as it is.
    LeaveUnfinished,
    /// A process that is within a slow step gives no sign of life.
    NoLife,
    /// The source takes the time of its own slow step for its peer's silence.
    CountOwnTime,
}

/// A schedule.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Its number.
    pub seed: Seed,
    /// Seeds everything that the faults leave open.
    pub rng: u64,
    /// The newest version of the protocol that the destination speaks; the source speaks all.
    pub protocol: u16,
    /// Data channels.
    pub lanes: u8,
    /// Whether both memories are hashed whole.
    pub verify: bool,
    /// Rounds with the guest running.
    pub rounds: u32,
    /// For how long a lost channel is made again; 0 gives up at once.
    pub reconnect: Duration,
    /// Whether the guest writes nothing during the migration: what is saved is past all the same once it ran on.
    pub quiet: bool,
    /// Whether the guest at the destination outlives the process that receives it.
    pub outlives: bool,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// What is broken on purpose.
    pub sabotage: Option<Sabotage>,
}

/// Messages of a migration that nothing disturbs are fewer than this.
pub const MESSAGES: u64 = 96;

/// Journal writes of a host are fewer than this.
const WRITES: u64 = 4;

const SECOND: Duration = Duration::from_secs(1);

/// What a slow step takes: more than a peer's silence is borne for, less than any wait for a step.
const SLOW: Duration = Duration::from_secs(22);

impl Plan {
    /// The schedule of a number.
    #[must_use]
    pub fn new(seed: Seed) -> Self {
        match seed {
            Seed::Random(number) => Self::random(seed, number),
            Seed::Boundary(number) => Self::boundary(seed, number),
        }
    }

    fn random(seed: Seed, number: u64) -> Self {
        let mut rng = Rng::with_seed(number);
        let reconnect = SECOND * [0, 0, 2, 5, 10, 30][rng.usize(..6)];
        let faults = if rng.u32(..3) == 0 {
            (0..rng.u32(1..5)).map(|_| random_cut(&mut rng, SECOND * 2)).collect()
        } else {
            let count = [0, 1, 1, 2, 2, 2, 3, 3, 4, 5][rng.usize(..10)];
            (0..count).map(|_| random_fault(&mut rng)).collect()
        };
        Self {
            seed,
            rng: rng.u64(..),
            protocol: protocol(number),
            lanes: [1, 2, 2, 4][rng.usize(..4)],
            verify: rng.bool(),
            rounds: rng.u32(1..4),
            reconnect,
            quiet: rng.u32(..8) == 0,
            outlives: outlives(number),
            faults,
            sabotage: None,
        }
    }

    /// Whether the link is all that goes wrong, and is back each time before anybody gives up: all
    /// losses together, and what it takes to make the channels again, are shorter than that. Or a
    /// step that takes long, which the other side bears up to its own limit for that step.
    #[must_use]
    pub fn is_mild(&self) -> bool {
        let away = self.faults.iter().try_fold(Duration::ZERO, |sum, fault| match fault {
            Fault::Cut { away, .. } => Some(sum + *away + SECOND),
            _ => None,
        });
        let slow = matches!(self.faults[..], [Fault::Slow { .. }]);
        slow || away.is_some_and(|away| away < self.reconnect)
    }

    /// Whether nothing happens but a step that takes long, and that the other side waits for
    /// without a doubt. The wait for RUNNING is a short one.
    #[must_use]
    pub fn is_borne(&self) -> bool {
        matches!(
            self.faults[..],
            [Fault::Slow { step, .. }] if !matches!(step, Step::WriteIntent | Step::Run)
        )
    }

    /// How many boundary schedules there are.
    #[must_use]
    pub fn boundaries() -> u64 {
        let kinds = boundary_kinds(0).len() as u64;
        SHAPES.len() as u64
            * (kinds * MESSAGES + (write_faults().len() + VM_CALLS.len() + Step::ALL.len()) as u64)
    }

    fn boundary(seed: Seed, number: u64) -> Self {
        let (lanes, verify, reconnect) = SHAPES[(number % SHAPES.len() as u64) as usize];
        let number = number / SHAPES.len() as u64;
        let kinds = boundary_kinds(0).len() as u64;
        let by_message = kinds * MESSAGES;
        let writes = write_faults();
        let faults = if number < by_message {
            boundary_kinds(number / kinds).swap_remove((number % kinds) as usize)
        } else {
            let rest = (number - by_message) as usize;
            match writes.get(rest) {
                Some(faults) => faults.clone(),
                None => {
                    let rest = rest - writes.len();
                    match VM_CALLS.get(rest) {
                        Some(&call) => vec![Fault::Vm { call }],
                        None => {
                            let step = Step::ALL[(rest - VM_CALLS.len()) % Step::ALL.len()];
                            vec![Fault::Slow { step, takes: SLOW }]
                        }
                    }
                }
            }
        };
        let reconnect = SECOND * reconnect;
        Self {
            seed,
            rng: number % 7,
            protocol: protocol(number),
            lanes,
            verify,
            rounds: 2,
            reconnect,
            quiet: false,
            outlives: outlives(number),
            faults,
            sabotage: None,
        }
    }
}

/// Half of all schedules are with a destination of the release before, whatever else they are about.
fn protocol(number: u64) -> u16 {
    let versions = u64::from(PROTOCOL_VERSION_MAX - PROTOCOL_VERSION_MIN) + 1;
    // Kinds of faults come in an order of their own, with an even period.
    PROTOCOL_VERSION_MIN + ((number + number / 7) % versions) as u16
}

/// In a third of all schedules the guest outlives its receiver, whatever else they are about.
fn outlives(number: u64) -> bool {
    // Three goes into no other period.
    (number + number / 11).is_multiple_of(3)
}

/// Data channels, whether both memories are hashed whole, and for how many seconds a lost channel is made again.
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

impl Fault {
    /// The message at which it strikes, if it strikes at one.
    #[must_use]
    pub fn message(&self) -> Option<u64> {
        match *self {
            Self::Cut { message, .. }
            | Self::Silence { message, .. }
            | Self::Repeat { message }
            | Self::Delay { message, .. }
            | Self::Damage { message, .. }
            | Self::Crash { message, .. }
            | Self::Cancel { message, .. }
            | Self::Forge { message, .. }
            | Self::Stranger { message, .. } => Some(message),
            Self::Write { .. } | Self::Vm { .. } | Self::Slow { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_reads_as_it_is_written() {
        for seed in [Seed::Random(17), Seed::Boundary(0)] {
            assert_eq!(seed.to_string().parse(), Ok(seed));
        }
        assert!("17".parse::<Seed>().is_err());
    }

    #[test]
    fn every_boundary_has_a_number() {
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
