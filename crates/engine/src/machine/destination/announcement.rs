//! The destination's machine: from the announcement of a guest to its acceptance or refusal.

use std::time::Duration;

use vmferry_handover::WitnessId;
use vmferry_memory::{PageSet, SlotLayout};
use vmferry_wire::{ControlMessage, FetchLanes, Reason, ReasonCode, Release, SessionId, one_line};

use super::common::Common;
use super::io::{Action, Prepared, Report};
use super::phase::{Announced, AwaitBegin, HashRun, Lacking, Phase, Session, Verification};
use crate::error::MigrateError;
use crate::vmm::GuestDescription;

/// The content of BEGIN.
#[derive(Debug)]
pub(super) struct Announcement {
    pub(super) session: SessionId,
    pub(super) guest: GuestDescription,
    pub(super) lanes: u8,
    /// Whether both memories are to be compared.
    pub(super) verify: bool,
    /// How long the source tries to reconnect.
    pub(super) reconnect: Duration,
    pub(super) release: Option<Release>,
    /// Whether the guest is carried.
    pub(super) streams: bool,
    pub(super) used_bytes: Vec<Option<u64>>,
    /// The fetch lanes that the source opens with post-copy.
    pub(super) fetch_lanes: Option<FetchLanes>,
    /// Who decides the handover in doubt.
    pub(super) witness: Option<WitnessId>,
}

impl AwaitBegin {
    pub(super) fn on_begin(self, common: &mut Common, begin: Announcement) -> Phase {
        common.stats.source = begin.release;
        common.links.reconnect = begin.reconnect.min(common.timeouts.reconnect);
        if let Err(reason) = check_layout(&begin.guest.layout) {
            let reason = Reason::new(ReasonCode::LayoutMismatch, &reason);
            let error = MigrateError::Refused { peer: "destination", reason: reason.clone() };
            return Phase::AwaitBegin(self).refuse(common, reason, error);
        }
        if let Err(reason) = check_witness(begin.witness.as_ref(), common.our_side.witness.as_ref())
        {
            let reason = Reason::new(ReasonCode::Incompatible, &reason);
            let error = MigrateError::Refused { peer: "destination", reason: reason.clone() };
            return Phase::AwaitBegin(self).refuse(common, reason, error);
        }
        let announced = Announced {
            session: begin.session,
            name: begin.guest.identity.name.clone(),
            lanes: begin.lanes,
            layout: begin.guest.layout.clone(),
            verification: if begin.verify { Verification::Announced } else { Verification::None },
            fetch_lanes: begin.fetch_lanes,
            no_post_copy: None,
            compares_storage: false,
        };
        let streams = (common.our_side.protocol > 1).then_some(begin.streams);
        let (guest, used_bytes) = (begin.guest, begin.used_bytes);
        common.act(Action::Prepare { guest, streams, used_bytes });
        Phase::Preparing(announced)
    }
}

impl Phase {
    pub(super) fn on_prepared(
        self,
        common: &mut Common,
        result: Result<Prepared, MigrateError>,
    ) -> Self {
        match (self, result) {
            (Self::Preparing(mut announced), Ok(Prepared { post_copy, compares_storage })) => {
                announced.compares_storage = compares_storage;
                if let (Some(_), Err(why)) = (announced.fetch_lanes, post_copy) {
                    announced.fetch_lanes = None;
                    announced.no_post_copy = Some(one_line(&why));
                }
                common.act(Action::Open(announced.session));
                Self::Opening(announced)
            }
            (Self::Preparing(announced), Err(error)) => {
                let reason = match &error {
                    MigrateError::Refused { reason, .. } => reason.clone(),
                    other => other.reason_for_peer(),
                };
                Self::Preparing(announced).refuse(common, reason, error)
            }
            (phase, _) => phase,
        }
    }

    pub(super) fn on_opened(self, common: &mut Common, result: Result<(), MigrateError>) -> Self {
        match (self, result) {
            (Self::Opening(announced), Ok(())) => announced.accept(common),
            // Without OPEN in the journal this session would be unknown after a restart.
            (Self::Opening(announced), Err(error)) => {
                Self::Opening(announced).refuse(common, error.reason_for_peer(), error)
            }
            (phase, _) => phase,
        }
    }

    /// Refuses the guest, or any source on this channel.
    pub(super) fn refuse(self, common: &mut Common, reason: Reason, error: MigrateError) -> Self {
        common.failure = Some(error);
        let release = Some(common.release());
        common.send(ControlMessage::Refuse { reason, release });
        Self::Refused(self.session_id())
    }
}

impl Announced {
    fn accept(self, common: &mut Common) -> Phase {
        let Self {
            session,
            name,
            lanes,
            layout,
            verification,
            fetch_lanes,
            no_post_copy,
            compares_storage,
        } = self;
        common.act(Action::ExpectLanes { lanes, fetch_lanes });
        common.send(ControlMessage::Accept {
            token: common.token,
            release: Some(common.release()),
            algorithms: Some(common.our_side.algorithms),
            verifies_placed: verification != Verification::None,
            compares_storage,
            post_copy: no_post_copy.map(Err).or(fetch_lanes.map(|_| Ok(()))),
        });
        common.report(Report::Accepted {
            run: session,
            name,
            memory_bytes: layout.iter().map(|slot| slot.pages).sum::<u64>()
                * vmferry_memory::PAGE_SIZE as u64,
            lanes,
            protocol: common.our_side.protocol,
            source: common.stats.source.clone(),
        });
        let none = || PageSet::for_layout(&layout);
        let lacking = fetch_lanes.map(|_| Lacking { named: none(), freed: none() });
        Phase::Receiving(Session {
            id: session,
            layout,
            lane_ends: vec![0; usize::from(lanes)],
            verification,
            free: None,
            hash: HashRun::Idle,
            lacking,
        })
    }
}

impl Common {
    fn release(&self) -> Release {
        Release::of_this(&self.our_side.vmm)
    }

    pub(super) fn on_unknown_fields(&mut self, message: &'static str, fields: Vec<u16>) {
        if self.unknown_fields.note(message, &fields) {
            self.report(Report::UnknownFields { message, fields });
        }
        self.stats.unknown_fields = self.unknown_fields.count;
    }
}

/// Both hosts must ask the same witness, or none.
fn check_witness(theirs: Option<&WitnessId>, ours: Option<&WitnessId>) -> Result<(), String> {
    match (theirs, ours) {
        (theirs, ours) if theirs == ours => Ok(()),
        (Some(theirs), Some(ours)) => Err(format!(
            "the source's witness is {theirs}, and this destination's is {ours}: in doubt they \
             could decide differently"
        )),
        (Some(theirs), None) => Err(format!(
            "the source's witness is {theirs}, and this destination has none: it would run the \
             guest without asking"
        )),
        (None, ours) => Err(format!(
            "this destination's witness is {}, and the source has none",
            ours.map_or("", WitnessId::as_str)
        )),
    }
}

/// The slots must be numbered from 0 and must not overlap or wrap in guest-physical space.
fn check_layout(layout: &[SlotLayout]) -> Result<(), String> {
    let mut end = 0_u64;
    for (index, slot) in layout.iter().enumerate() {
        if usize::from(slot.slot.0) != index {
            return Err(format!("slot {} stands at position {index}", slot.slot.0));
        }
        let bytes = slot.pages.checked_mul(vmferry_memory::PAGE_SIZE as u64);
        let next = bytes.and_then(|bytes| slot.gpa.checked_add(bytes));
        match next {
            Some(next) if slot.pages > 0 && slot.gpa >= end => end = next,
            _ => return Err(format!("slot {index} is empty, overlaps or wraps around")),
        }
    }
    if layout.is_empty() { Err("the guest has no memory".into()) } else { Ok(()) }
}
