//! What the source keeps from the announcement to the end, in every phase.

use std::collections::VecDeque;
use std::time::Duration;

use super::doubt::WitnessPoll;
use super::io::{Action, Report};
use super::links::Links;
use super::pace::Pace;
use super::pings::{Pings, Wait};
use super::post_copy::PostCopyPlan;
use crate::config::{SourceConfig, Timeouts};
use crate::error::MigrateError;
use crate::machine::peer::{SourceSide, UnknownFields};
use crate::rounds::tracker::RoundTracker;
use crate::stats::SourceStats;
use crate::vmm::GuestDescription;
use vmferry_handover::{SessionKind, SourceState};

/// The first protocol version whose messages have fields: fetch lanes, witnesses.
pub(crate) const FIELDS_SINCE: u16 = 2;

/// The state that outlives the phases.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) config: SourceConfig,
    pub(super) our_side: SourceSide,
    pub(super) handover: SourceState,
    pub(super) kind: SessionKind,
    /// Why the guest was not migrated, as far as that is known.
    pub(super) failure: Option<MigrateError>,
    /// Why a guest that was given away has lost pages.
    pub(super) lost: Option<MigrateError>,
    /// The VMM of a carried guest has ended, and the guest's memory here with it.
    pub(super) vmm_has_ended: bool,
    /// Why pages could not be sent to a destination that lacks them, as reported last.
    pub(super) serving_failure: Option<String>,
    pub(super) pace: Pace,
    pub(super) post_copy: PostCopyPlan,
    pub(super) rounds: RoundTracker,
    pub(super) links: Links,
    pub(super) pings: Pings,
    pub(super) wait: Wait,
    pub(super) verification: Verification,
    pub(super) witness_poll: WitnessPoll,
    /// The guest was paused by another client when its state was last saved.
    pub(super) guest_is_paused: bool,
    pub(super) stats: SourceStats,
    pub(super) unknown_fields: UnknownFields,
    pub(super) actions: VecDeque<Action>,
}

/// How both memories are compared, if they are.
#[derive(Debug, Default)]
pub(super) struct Verification {
    /// The destination hashes its memory before it loads the state: VERIFY is sent before FINAL.
    pub(super) before_load: bool,
    /// The number of hashes that this side has begun.
    pub(super) attempts: u32,
}

impl Common {
    pub(super) fn new(
        config: SourceConfig,
        guest: &GuestDescription,
        our_side: SourceSide,
        now: Duration,
    ) -> Self {
        let vmm_can = !our_side.streams || our_side.vmm_post_copy == Some(Ok(()));
        let can_fetch = vmm_can && our_side.protocol >= FIELDS_SINCE && !config.verify;
        let announced = can_fetch.then(|| our_side.fetch_lanes(&config));
        let witness_poll = match our_side.witness {
            Some(_) => WitnessPoll::Idle,
            None => WitnessPoll::Never,
        };
        let memory_pages: u64 = guest.layout.iter().map(|slot| slot.pages).sum();
        Self {
            handover: SourceState::Holding,
            kind: SessionKind::PreCopy,
            failure: None,
            lost: None,
            vmm_has_ended: false,
            serving_failure: None,
            pace: Pace::new(&config, now),
            post_copy: PostCopyPlan::new(config.post_copy, announced),
            rounds: RoundTracker::new(config.channels.get()),
            links: Links::new(config.channels.get()),
            pings: Pings::new(now),
            wait: Wait::new(now),
            verification: Verification::default(),
            witness_poll,
            guest_is_paused: false,
            stats: SourceStats {
                memory_bytes: memory_pages * vmferry_memory::PAGE_SIZE as u64,
                dirty_log: our_side.log.to_owned(),
                protocol: our_side.protocol,
                channels: config.channels.get(),
                compression: config.compression.way.to_string(),
                ..SourceStats::default()
            },
            unknown_fields: UnknownFields::default(),
            actions: VecDeque::new(),
            our_side,
            config,
        }
    }

    pub(super) fn timeouts(&self) -> &Timeouts {
        &self.config.timeouts
    }

    /// Whether this is the number of a fetch lane, and not of a data lane.
    pub(super) fn is_fetch_lane(&self, lane: u8) -> bool {
        lane >= self.config.channels.get()
    }

    /// Begins the wait of a phase.
    pub(super) fn begin_wait(&mut self, now: Duration) {
        self.wait = Wait::new(now);
    }

    pub(super) fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    pub(super) fn report(&mut self, report: Report) {
        self.act(Action::Report(report));
    }
}

/// Milliseconds, as in the statistics and reports.
pub(super) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
