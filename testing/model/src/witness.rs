//! The witness, the agents that report to it, and the fencing of the source.

use std::collections::BTreeSet;
use std::fmt;

use vmferry_handover::{
    DestinationEvent, DestinationState, Register, SessionWord, SourceEvent, SourceState,
    WitnessRequest,
};

use crate::action::Action;
use crate::model::{BrokenRule, Handover};
use crate::world::{SourceGuest, World};

/// The witness of the session, and the requests to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Witness {
    /// The register. `None`: its data is lost for good, or was restored from a backup, which the
    /// hosts see by the cluster's identity.
    pub register: Option<Register>,
    /// Every request ever sent that may still change the register. It may arrive at any time,
    /// repeatedly, or never, also after its sender has died. Answers need no messages: all that a
    /// host acts on stays true once the register says it.
    pub requests: BTreeSet<WitnessRequest>,
}

/// A step that involves the witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WitnessAction {
    /// A request takes effect. It may do so again.
    Takes(WitnessRequest),
    /// The destination sends its claim again.
    DestinationClaims,
    /// The destination receives the answer to its claim.
    DestinationHears(Register),
    /// The source receives the answer to its request.
    SourceHears(Register),
    /// An agent of the destination's host reports what its journal says.
    AgentReports(SessionWord),
    /// The lease of the destination's host ends, although the host may be well.
    LeaseEnds,
    /// The data of the witness is lost, or replaced by a backup.
    IsLost,
    /// The fencing of the source's host succeeds.
    SourceIsFenced,
    /// An operator declares the source's host lost.
    SourceIsDeclaredLost,
    /// The guest is started from its disks on a third host.
    GuestStartsElsewhere,
}

impl fmt::Display for WitnessAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Takes(request) => write!(f, "witness: takes {request:?}"),
            Self::DestinationClaims => f.write_str("destination: claims the guest again"),
            Self::DestinationHears(register) => {
                write!(f, "destination: hears from the witness: {register:?}")
            }
            Self::SourceHears(register) => {
                write!(f, "source: hears from the witness: {register:?}")
            }
            Self::AgentReports(word) => {
                write!(f, "destination's agent: reports {word:?} to the witness")
            }
            Self::LeaseEnds => f.write_str("witness: the lease of the destination's host ends"),
            Self::IsLost => f.write_str("witness: its data is lost or replaced by a backup"),
            Self::SourceIsFenced => f.write_str("source: its host is fenced"),
            Self::SourceIsDeclaredLost => f.write_str("operator: declares the source's host lost"),
            Self::GuestStartsElsewhere => {
                f.write_str("operator: starts the guest from its disks on a third host")
            }
        }
    }
}

impl Witness {
    /// A witness that was not asked yet.
    #[must_use]
    pub fn unopened() -> Self {
        Self { register: Some(Register::Unopened), requests: BTreeSet::new() }
    }

    /// Sends a request, unless it can't change anything.
    pub(crate) fn ask(&mut self, request: WitnessRequest) {
        if self.register.is_some_and(|register| !register.is_final()) {
            self.requests.insert(request);
        }
    }

    /// Sets the register, and forgets the requests that can't change it.
    fn set(&mut self, register: Option<Register>) {
        self.register = register;
        if register.is_none_or(Register::is_final) {
            self.requests.clear();
        }
    }
}

impl World {
    pub(crate) fn register(&self) -> Option<Register> {
        self.witness.as_ref().and_then(|witness| witness.register)
    }

    /// The word that the destination's journal holds, as far as it decides something.
    fn journaled_word(&self) -> Option<SessionWord> {
        let (state, _) = vmferry_handover::recover_destination(self.destination_records())?;
        Some(state.word()).filter(|word| *word != SessionWord::Pending)
    }
}

impl Handover {
    pub(crate) fn witness_actions(&self, world: &World, actions: &mut Vec<Action>) {
        let Some(witness) = &world.witness else { return };
        let faults = !world.faults_ended;
        let mut can = |action| actions.push(Action::Witness(action));
        if let Some(register) = witness.register {
            for request in &witness.requests {
                can(WitnessAction::Takes(*request));
            }
            if let Some(process) = &world.destination.process
                && process.todo.is_empty()
                && process.session == Some(DestinationState::Claiming)
            {
                can(WitnessAction::DestinationClaims);
                if register.destination_event().is_some() {
                    can(WitnessAction::DestinationHears(register));
                }
            }
            if let Some(process) = &world.source.process
                && process.todo.is_empty()
                && matches!(process.state, SourceState::InDoubt { .. } | SourceState::Serving)
            {
                can(WitnessAction::SourceHears(register));
            }
            let early = self.broken == Some(BrokenRule::ReportedBeforeWritten)
                && register == Register::Claimed;
            let word = if early { Some(SessionWord::Owns) } else { world.journaled_word() };
            if let Some(word) = word
                && !world.destination.lost
                && !register.is_final()
            {
                can(WitnessAction::AgentReports(word));
            }
        }
        if !faults {
            return;
        }
        can(WitnessAction::LeaseEnds);
        can(WitnessAction::IsLost);
        if !world.source.lost {
            can(WitnessAction::SourceIsFenced);
        }
        if world.source.lost || self.broken == Some(BrokenRule::FreedWithoutFencing) {
            can(WitnessAction::SourceIsDeclaredLost);
            let is_free = match witness.register {
                Some(Register::Freed | Register::TakenBack | Register::Aborted) => true,
                // All that can still be claimed has a register.
                Some(Register::Unopened) => world.source.lost,
                _ => false,
            };
            if is_free {
                can(WitnessAction::GuestStartsElsewhere);
            }
        }
    }

    pub(crate) fn apply_witness(&self, world: &mut World, action: WitnessAction) {
        let Some(witness) = &mut world.witness else { return };
        match action {
            WitnessAction::Takes(request) => {
                if self.broken == Some(BrokenRule::ClaimIsNotCompared) {
                    // Requests that should have no effect any more must not be forgotten.
                    witness.register = match request {
                        WitnessRequest::Claim => Some(Register::Claimed),
                        _ => witness.register.map(|register| register.after(request)),
                    };
                    return;
                }
                let unopened = self.broken == Some(BrokenRule::NotOpened)
                    && witness.register == Some(Register::Unopened)
                    && request == WitnessRequest::Claim;
                let register = match unopened {
                    true => Some(Register::Claimed),
                    false => witness.register.map(|register| register.after(request)),
                };
                witness.set(register);
            }
            WitnessAction::DestinationClaims => witness.ask(WitnessRequest::Claim),
            WitnessAction::DestinationHears(register) => {
                if let Some(event) = register.destination_event() {
                    self.destination_event(world, event);
                }
            }
            WitnessAction::SourceHears(register) => {
                let claimed_is_owns =
                    self.broken == Some(BrokenRule::ClaimedIsOwns) && register == Register::Claimed;
                let event = if claimed_is_owns {
                    Some(SourceEvent::Word(SessionWord::Owns))
                } else {
                    register.source_event()
                };
                if let Some(event) = event {
                    self.source_event(world, event);
                }
            }
            WitnessAction::AgentReports(word) => witness.ask(WitnessRequest::Report(word)),
            // A lease says that a host is not heard, and decides nothing.
            WitnessAction::LeaseEnds => {
                if self.broken == Some(BrokenRule::LeaseEndTakesBack) {
                    self.source_event(world, SourceEvent::TakenBack);
                }
            }
            WitnessAction::IsLost => {
                let trusted = self.broken == Some(BrokenRule::RestoredIsTrusted);
                witness.set(trusted.then_some(Register::Open));
            }
            WitnessAction::SourceIsFenced => {
                world.source.lost = true;
                world.source.process = None;
                if world.source.guest != SourceGuest::Released {
                    world.source.guest = SourceGuest::Lost;
                }
            }
            WitnessAction::SourceIsDeclaredLost => witness.ask(WitnessRequest::Free),
            WitnessAction::GuestStartsElsewhere => world.started_elsewhere = true,
        }
    }

    /// What a destination does before it accepts the guest.
    pub(crate) fn open_register(&self, world: &mut World) {
        if let Some(witness) = &mut world.witness
            && self.broken != Some(BrokenRule::NotOpened)
        {
            let register = witness.register.map(|register| register.after(WitnessRequest::Open));
            witness.set(register);
        }
    }

    /// What a destination does to claim the guest.
    pub(crate) fn claim(&self, world: &mut World) {
        match &mut world.witness {
            Some(witness) => witness.ask(WitnessRequest::Claim),
            None => self.destination_event(world, DestinationEvent::Claimed),
        }
    }

    /// What a source that asks the destination does besides.
    pub(crate) fn take_back(world: &mut World) {
        let in_doubt = world
            .source
            .process
            .as_ref()
            .is_some_and(|process| matches!(process.state, SourceState::InDoubt { .. }));
        if let Some(witness) = &mut world.witness
            && in_doubt
        {
            witness.ask(WitnessRequest::TakeBack);
        }
    }
}
