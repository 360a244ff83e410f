//! The destination's machine: from the announcement of a guest to its acceptance or refusal.

use vmferry_memory::SlotLayout;
use vmferry_wire::{ControlMessage, Reason, Release};

use super::io::{Action, LinkId, Report};
use super::{Destination, Phase};
use crate::error::MigrateError;

impl Destination {
    pub(super) fn refuse(&mut self, reason: Reason) {
        self.failure = Some(MigrateError::Refused { peer: "destination", reason: reason.clone() });
        self.actions.push_back(Action::Send {
            link: LinkId::CONTROL,
            message: ControlMessage::Refuse { reason, release: Some(self.release()) },
        });
        self.phase = Phase::Refused;
    }

    pub(super) fn on_prepared(&mut self, result: Result<(), MigrateError>) {
        match (result, self.session()) {
            (Ok(()), Some(session)) if self.phase == Phase::Preparing => {
                self.phase = Phase::Opening;
                self.actions.push_back(Action::Open(session));
            }
            (Err(error), _) if self.phase == Phase::Preparing => {
                let reason = match &error {
                    MigrateError::Refused { reason, .. } => reason.clone(),
                    other => other.reason_for_peer(),
                };
                self.refuse(reason);
                self.failure = Some(error);
            }
            _ => {}
        }
    }

    pub(super) fn on_opened(&mut self, result: Result<(), MigrateError>) {
        if let Err(error) = result {
            // Without OPEN in the journal this session would be unknown after a restart.
            self.refuse(error.reason_for_peer());
            self.failure = Some(error);
            return;
        }
        let Some(announced) = &self.announced else { return };
        let lanes = announced.lanes;
        self.lane_ends = vec![0; usize::from(lanes)];
        let report = Report::Accepted {
            run: announced.session,
            name: announced.name.clone(),
            memory_bytes: announced.layout.iter().map(|slot| slot.pages).sum::<u64>()
                * vmferry_memory::PAGE_SIZE as u64,
            lanes,
            protocol: self.our_side.protocol,
            source: self.stats.source.clone(),
        };
        self.phase = Phase::Receiving;
        self.actions.push_back(Action::ExpectLanes { lanes });
        self.actions.push_back(Action::Send {
            link: LinkId::CONTROL,
            message: ControlMessage::Accept {
                token: self.token,
                release: Some(self.release()),
                algorithms: Some(self.our_side.algorithms),
                verifies_placed: self.verification != super::Verification::None,
            },
        });
        self.actions.push_back(Action::Report(report));
    }

    fn release(&self) -> Release {
        Release::of_this(&self.our_side.vmm)
    }

    pub(super) fn on_unknown_fields(&mut self, message: &'static str, fields: Vec<u16>) {
        if self.unknown_fields.note(message, &fields) {
            self.actions.push_back(Action::Report(Report::UnknownFields { message, fields }));
        }
        self.stats.unknown_fields = self.unknown_fields.count;
    }
}

/// The slots must be numbered from 0 and must not overlap or wrap in guest-physical space.
pub(super) fn check_layout(layout: &[SlotLayout]) -> Result<(), String> {
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
