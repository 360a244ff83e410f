//! The witness: a register outside both hosts that decides a handover in doubt.
//!
//! Without a witness a source that has sent COMMIT and lost the link waits for the destination's
//! word. With one, the destination claims the guest in the register before it journals RUN-INTENT,
//! and a source in doubt takes the guest back there. Each session has a register of its own, which
//! the destination opens before it accepts the guest, and at most one of the two requests succeeds:
//!
//! ```text
//!   Unopened
//!    |  destination: OPEN
//!    v       destination: CLAIM           agent: its journal says so
//!   Open ----------------------> Claimed -----------------------> Owns, Fetching, Ended
//!    |                              |                                Fetching -> Owns, Ended
//!    |  source: TAKE-BACK           |  agent: its journal says ABORTED
//!    |----> TakenBack               v
//!    |----> Aborted <---------------+
//!    |  fencing of the source
//!    +----> Freed
//! ```
//!
//! Every session that can still be claimed has a register, so the guests of a fenced host can be
//! freed without knowing what that host was doing.
//!
//! A claim permits RUN-INTENT and nothing else: the source keeps the guest's memory until the
//! register repeats what the destination's journal says. So a destination that dies between both
//! loses no guest, and after RUN-INTENT the journals decide as they do without a witness.
//!
//! Each request may be delayed, repeated and lost, and its answer too. [`Register::after`] is what
//! one request does, atomically; a request that the register has already decided changes nothing.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{DestinationEvent, SessionWord, SourceEvent};

/// Maximum length of a witness's name, in bytes.
pub const MAX_WITNESS_BYTES: usize = 128;

/// The name of a witness. Both hosts of a session have the same one, and a witness whose data was
/// lost or restored has another one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WitnessId(String);

/// A text that is no name of a witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the name of a witness has 1 to {MAX_WITNESS_BYTES} bytes, all of them printable")]
pub struct BadWitnessId;

impl WitnessId {
    /// A witness of this name.
    ///
    /// # Errors
    /// The name is empty, too long or not printable.
    pub fn new(name: &str) -> Result<Self, BadWitnessId> {
        let fits = (1..=MAX_WITNESS_BYTES).contains(&name.len());
        if fits && !name.chars().any(char::is_control) {
            Ok(Self(name.to_owned()))
        } else {
            Err(BadWitnessId)
        }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for WitnessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for WitnessId {
    type Error = BadWitnessId;

    fn try_from(name: String) -> Result<Self, BadWitnessId> {
        Self::new(&name)
    }
}

impl From<WitnessId> for String {
    fn from(id: WitnessId) -> Self {
        id.0
    }
}

/// What the witness has on record about the handover of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Register {
    /// There is no register: nobody can claim the guest.
    Unopened,
    /// Neither host has asked for the guest.
    Open,
    /// The destination may journal RUN-INTENT.
    Claimed,
    /// The source may run the guest again, and the destination never may.
    TakenBack,
    /// The source's host was fenced before the destination claimed the guest. Neither host may run
    /// it in this session.
    Freed,
    /// The destination's journal says ABORTED.
    Aborted,
    /// The destination's journal says that it owns the guest and needs nothing of the source.
    Owns,
    /// The destination's journal says that it owns the guest, which lacks pages.
    Fetching,
    /// The destination's journal says that the guest has ended there while it lacked pages.
    Ended,
}

/// A change of the register that one of the hosts, or an operator, asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WitnessRequest {
    /// The destination is about to accept the guest. The source has not sent COMMIT yet.
    Open,
    /// The destination has COMMIT and wants to run the guest.
    Claim,
    /// The source is in doubt and wants the guest back.
    TakeBack,
    /// The fencing of the source's host has succeeded.
    Free,
    /// What the destination's journal says, synced.
    Report(SessionWord),
}

impl Register {
    /// The register after `request`.
    #[must_use]
    pub fn after(self, request: WitnessRequest) -> Self {
        use WitnessRequest::{Claim, Free, Open, Report, TakeBack};
        match (self, request) {
            (Self::Unopened, Open) => Self::Open,
            (Self::Open, Claim) => Self::Claimed,
            (Self::Open, TakeBack) => Self::TakenBack,
            (Self::Open, Free) => Self::Freed,
            (Self::Open | Self::Claimed, Report(SessionWord::Aborted)) => Self::Aborted,
            (Self::Claimed, Report(SessionWord::Fetching)) => Self::Fetching,
            (Self::Claimed | Self::Fetching, Report(SessionWord::Owns)) => Self::Owns,
            (Self::Claimed | Self::Fetching, Report(SessionWord::Ended)) => Self::Ended,
            (register, _) => register,
        }
    }

    /// Whether no request changes the register any more.
    #[must_use]
    pub fn is_final(self) -> bool {
        !matches!(self, Self::Unopened | Self::Open | Self::Claimed | Self::Fetching)
    }

    /// The event of a destination that has asked for a claim; `None` if the register has not taken
    /// the request yet.
    #[must_use]
    pub fn destination_event(self) -> Option<DestinationEvent> {
        match self {
            Self::Open => None,
            Self::Claimed => Some(DestinationEvent::Claimed),
            _ => Some(DestinationEvent::ClaimRefused),
        }
    }

    /// The event of a source that reads the register; `None` if it decides nothing for the source.
    #[must_use]
    pub fn source_event(self) -> Option<SourceEvent> {
        match self {
            Self::Unopened | Self::Open | Self::Claimed | Self::Freed => None,
            Self::TakenBack => Some(SourceEvent::TakenBack),
            Self::Aborted => Some(SourceEvent::Word(SessionWord::Aborted)),
            Self::Owns => Some(SourceEvent::Word(SessionWord::Owns)),
            Self::Fetching => Some(SourceEvent::Word(SessionWord::Fetching)),
            Self::Ended => Some(SourceEvent::Word(SessionWord::Ended)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGISTERS: [Register; 9] = [
        Register::Unopened,
        Register::Open,
        Register::Claimed,
        Register::TakenBack,
        Register::Freed,
        Register::Aborted,
        Register::Owns,
        Register::Fetching,
        Register::Ended,
    ];
    const REQUESTS: [WitnessRequest; 10] = [
        WitnessRequest::Open,
        WitnessRequest::Claim,
        WitnessRequest::TakeBack,
        WitnessRequest::Free,
        WitnessRequest::Report(SessionWord::Unknown),
        WitnessRequest::Report(SessionWord::Pending),
        WitnessRequest::Report(SessionWord::Aborted),
        WitnessRequest::Report(SessionWord::Owns),
        WitnessRequest::Report(SessionWord::Fetching),
        WitnessRequest::Report(SessionWord::Ended),
    ];

    #[test]
    fn of_claim_take_back_and_free_the_first_one_succeeds() {
        let asked = [WitnessRequest::Claim, WitnessRequest::TakeBack, WitnessRequest::Free];
        for first in asked {
            let register = Register::Open.after(first);
            assert_ne!(register, Register::Open);
            for second in asked {
                assert_eq!(register.after(second), register, "{first:?}, then {second:?}");
            }
        }
    }

    #[test]
    fn session_that_was_not_opened_is_decided_by_nobody() {
        for request in REQUESTS.into_iter().filter(|request| *request != WitnessRequest::Open) {
            assert_eq!(Register::Unopened.after(request), Register::Unopened, "{request:?}");
        }
        assert_eq!(Register::Unopened.source_event(), None);
        let refused = Some(DestinationEvent::ClaimRefused);
        assert_eq!(Register::Unopened.destination_event(), refused);
    }

    #[test]
    fn repeated_request_changes_nothing() {
        for (register, request) in REGISTERS.into_iter().flat_map(|r| REQUESTS.map(|q| (r, q))) {
            let once = register.after(request);
            assert_eq!(once.after(request), once, "{register:?} {request:?}");
        }
    }

    #[test]
    fn final_register_never_changes() {
        for register in REGISTERS {
            let stays = REQUESTS.iter().all(|request| register.after(*request) == register);
            assert_eq!(stays, register.is_final(), "{register:?}");
        }
    }

    #[test]
    fn claim_alone_frees_nothing_at_the_source() {
        assert_eq!(Register::Claimed.source_event(), None);
        assert_eq!(Register::Claimed.destination_event(), Some(DestinationEvent::Claimed));
    }

    #[test]
    fn name_of_a_witness_is_checked() {
        let id = WitnessId::new("etcd 5f0c1e2d/vmferry").unwrap();
        assert_eq!(id.to_string(), "etcd 5f0c1e2d/vmferry");
        for bad in ["", "a\nb", "\x1b[2J", &"é".repeat(65)] {
            assert_eq!(WitnessId::new(bad), Err(BadWitnessId), "{bad:?}");
        }
    }

    #[test]
    fn taken_back_is_never_claimed() {
        for register in REGISTERS {
            if register.source_event() == Some(SourceEvent::TakenBack) {
                assert_eq!(register.destination_event(), Some(DestinationEvent::ClaimRefused));
            }
        }
    }
}
