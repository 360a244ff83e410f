//! The phases of the destination. Each owns the data that is needed only in it, or in a run of
//! phases that hand the data on, and is consumed by the step that leaves it.

use std::time::Duration;

use vmferry_handover::SessionKind;
use vmferry_memory::{GuestBytes, PageSet, SlotLayout};
use vmferry_wire::{FetchLanes, SessionId};

/// The present phase. The diagram in [`destination`](super) has the order.
#[derive(Debug)]
pub(super) enum Phase {
    AwaitBegin(AwaitBegin),
    Preparing(Announced),
    Opening(Announced),
    Receiving(Session),
    Placing(Placing),
    Summing(Summing),
    Hashing(Hashing),
    Loading(Loading),
    PutOff(Session),
    Deciding(Deciding),
    Refused(Option<SessionId>),
}

/// The control channel is greeted, and no guest is announced yet.
#[derive(Debug)]
pub(super) struct AwaitBegin {
    pub(super) since: Duration,
}

/// The content of the announcement.
#[derive(Debug)]
pub(super) struct Announced {
    pub(super) session: SessionId,
    pub(super) name: String,
    pub(super) lanes: u8,
    pub(super) layout: Vec<SlotLayout>,
    pub(super) verification: Verification,
    pub(super) fetch_lanes: Option<FetchLanes>,
    /// Why the guest can't be received with post-copy, although the source announced fetch lanes.
    pub(super) no_post_copy: Option<String>,
    /// The VMM compares a sample of the guest's storage.
    pub(super) compares_storage: bool,
}

/// A session whose guest is accepted. It is in the journal.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: SessionId,
    pub(super) layout: Vec<SlotLayout>,
    /// The sequence number of the last round's last frame that each lane has placed.
    pub(super) lane_ends: Vec<u64>,
    pub(super) verification: Verification,
    /// Pages to leave out of the hash, once the source has named any.
    pub(super) free: Option<PageSet>,
    pub(super) hash: HashRun,
    /// `None` if this guest can't run before all its pages have arrived.
    pub(super) lacking: Option<Lacking>,
}

/// The pages that the source has named in LACKING.
#[derive(Debug)]
pub(super) struct Lacking {
    /// All of them. A withdrawal removes none: this side has freed them, so whatever the source
    /// sends or forgets to send later, they are fetched. Those that it has sent meanwhile stay
    /// as they are when they arrive again.
    pub(super) named: PageSet,
    /// Those that need not be freed: they were named since the last withdrawal.
    pub(super) freed: PageSet,
}

/// Whether both memories are compared. The time for it counts from READY, whenever VERIFY arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verification {
    None,
    /// VERIFY may be sent once.
    Announced,
    Asked,
}

/// Whether the memory is being hashed. There is at most one hash in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HashRun {
    Idle,
    Running,
    /// The hash in progress is of memory that was withdrawn since.
    Stale,
}

/// FINAL has arrived, and the last frames have not.
#[derive(Debug)]
pub(super) struct Placing {
    pub(super) session: Session,
    pub(super) lane_sequences: Vec<u64>,
    pub(super) last: Final,
    pub(super) since: Duration,
}

/// The rest of FINAL, which is needed once everything is placed.
#[derive(Debug)]
pub(super) struct Final {
    pub(super) digest: u64,
    pub(super) state: GuestBytes,
    /// The guest was paused at the source before the migration, and stays paused.
    pub(super) paused: bool,
    pub(super) kind: SessionKind,
    /// What the source has read from the guest's storage; empty if there is nothing to compare.
    pub(super) storage_sample: Vec<u8>,
}

/// Everything is placed, and its digest is being summed up.
#[derive(Debug)]
pub(super) struct Summing {
    pub(super) session: Session,
    pub(super) last: Final,
}

/// The digests agree, and the memory is being hashed.
#[derive(Debug)]
pub(super) struct Hashing {
    pub(super) session: Session,
    pub(super) last: Final,
}

/// The VMM loads the state. Nothing can be withdrawn any more.
#[derive(Debug)]
pub(super) struct Loading {
    pub(super) session: Session,
    pub(super) digest: u64,
    pub(super) paused: bool,
}

/// The state is loaded. The state of the handover decides.
#[derive(Debug)]
pub(super) struct Deciding {
    pub(super) session: Session,
    pub(super) digest: u64,
    pub(super) paused: bool,
    /// Duration of the load.
    pub(super) load: Duration,
    /// Since when COMMIT is awaited.
    pub(super) since: Duration,
    /// When the last COMMIT arrived.
    pub(super) committed_at: Option<Duration>,
}

impl Deciding {
    /// For a guest that was left by a process that has died.
    pub(super) fn recovered(session: SessionId, paused: bool, now: Duration) -> Self {
        let session = Session {
            id: session,
            layout: Vec::new(),
            lane_ends: Vec::new(),
            verification: Verification::None,
            free: None,
            hash: HashRun::Idle,
            lacking: None,
        };
        let load = Duration::ZERO;
        Self { session, digest: 0, paused, load, since: now, committed_at: None }
    }
}

impl Phase {
    /// The phase in words.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::AwaitBegin(_) => "the wait for the guest's announcement",
            Self::Preparing(_) | Self::Opening(_) => "the preparation of the machine",
            Self::Receiving(_) => "pre-copy",
            Self::Placing(_) => "the placing of the last pages",
            Self::Hashing(_) | Self::PutOff(_) => "the hash of the memory",
            Self::Summing(_) | Self::Loading(_) => "the loading of the state",
            Self::Deciding(_) => "the handover",
            Self::Refused(_) => "the end",
        }
    }

    pub(super) fn is_refused(&self) -> bool {
        matches!(self, Self::Refused(_))
    }

    /// Whether nothing was promised to the source: the session is not in the journal, or not known
    /// to be.
    pub(super) fn is_before_acceptance(&self) -> bool {
        matches!(self, Self::AwaitBegin(_) | Self::Preparing(_) | Self::Opening(_))
    }

    /// The session's ID, once it was announced.
    pub(super) fn session_id(&self) -> Option<SessionId> {
        match self {
            Self::AwaitBegin(_) => None,
            Self::Preparing(announced) | Self::Opening(announced) => Some(announced.session),
            Self::Refused(id) => *id,
            _ => self.session().map(|session| session.id),
        }
    }

    /// The session, once the guest is accepted.
    pub(super) fn session(&self) -> Option<&Session> {
        match self {
            Self::Receiving(session)
            | Self::Placing(Placing { session, .. })
            | Self::Summing(Summing { session, .. })
            | Self::Hashing(Hashing { session, .. })
            | Self::Loading(Loading { session, .. })
            | Self::PutOff(session)
            | Self::Deciding(Deciding { session, .. }) => Some(session),
            Self::AwaitBegin(_) | Self::Preparing(_) | Self::Opening(_) | Self::Refused(_) => None,
        }
    }

    /// The session, once the guest is accepted.
    pub(super) fn session_mut(&mut self) -> Option<&mut Session> {
        match self {
            Self::Receiving(session)
            | Self::Placing(Placing { session, .. })
            | Self::Summing(Summing { session, .. })
            | Self::Hashing(Hashing { session, .. })
            | Self::Loading(Loading { session, .. })
            | Self::PutOff(session)
            | Self::Deciding(Deciding { session, .. }) => Some(session),
            Self::AwaitBegin(_) | Self::Preparing(_) | Self::Opening(_) | Self::Refused(_) => None,
        }
    }
}
