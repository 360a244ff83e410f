//! Errors of the engine, sorted by whose fault they are.

use std::time::Duration;
use vmferry_handover::{Register, VmError, WitnessId};

use vmferry_dirty::DirtyLogError;
use vmferry_faults::FaultError;
use vmferry_memory::MemoryError;
use vmferry_transport::TransportError;
use vmferry_wire::{Algorithm, AlgorithmSet, Reason, ReasonCode, SessionId};

use crate::config::ConfigError;
use crate::stats::forecast::NotConverging;
use crate::vmm::PoweredOff;
use crate::vmm::told::Told;
use vmferry_handover::journal::JournalError;

/// Why a migration did not succeed. The outcome says which host has the guest; it is never both.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// A setting is out of its range. Nothing was started.
    #[error("bad settings")]
    Config(#[from] ConfigError),
    /// The link could not be established, or the peer was not authenticated.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The peer refuses this migration.
    #[error("the {peer} refused: {reason}")]
    Refused {
        /// The side that refused.
        peer: &'static str,
        /// Its code and text.
        reason: Reason,
    },
    /// The peer ended the migration.
    #[error("the {peer} ended the migration: {reason}")]
    EndedByPeer {
        /// The side that ended it.
        peer: &'static str,
        /// Its code and text.
        reason: Reason,
    },
    /// The peer violated the protocol.
    #[error("protocol error on {channel} at byte {offset}: {reason}")]
    Protocol {
        /// `control` or `lane N`.
        channel: String,
        /// Bytes read from that channel before the bad message.
        offset: u64,
        /// What is wrong.
        reason: String,
    },
    /// The destination can't decode the compression method that the user has chosen.
    #[error(
        "the destination can't decode {algorithm}, only: {known}; choose one of these or none, \
         let it be measured, or upgrade vmferry there"
    )]
    Undecodable {
        /// The chosen algorithm.
        algorithm: Algorithm,
        /// The algorithms that the destination can decode.
        known: AlgorithmSet,
    },
    /// A channel was lost.
    #[error("the link was lost ({channel}, {during}): {detail}")]
    LinkLost {
        /// `control` or `lane N`.
        channel: String,
        /// What the migration was doing.
        during: &'static str,
        /// The error of the operating system.
        detail: String,
    },
    /// The peer was silent for too long.
    #[error(
        "waited {} for {what} and gave up: the other host hangs or the network drops packets",
        humantime_seconds(*.after)
    )]
    TimedOut {
        /// What was awaited.
        what: &'static str,
        /// For how long.
        after: Duration,
    },
    /// The guest writes too fast for the limits.
    #[error("the migration does not converge: {0}")]
    NotConverging(Box<NotConverging>),
    /// The guest was paused for the handover for too long.
    #[error(
        "the guest stood still for {} before COMMIT, in {during}, and the migration is given up \
         after {}: the link or a host became slower at the switchover; the source keeps the guest",
        humantime_seconds(*.paused),
        humantime_seconds(*.bound)
    )]
    PauseTooLong {
        /// What the migration was doing.
        during: &'static str,
        /// For how long the guest was paused.
        paused: Duration,
        /// The longest pause allowed.
        bound: Duration,
    },
    /// The user relies on post-copy, and it can't be used.
    #[error("this guest can't be moved with post-copy: {why}")]
    NoPostCopy {
        /// Why.
        why: String,
    },
    /// A receiver is to take over a guest that lacks no pages.
    #[error("by its journal, no guest of session {session} lacks pages on this host")]
    NothingLeft {
        /// The session.
        session: SessionId,
    },
    /// The guest's VMM at the source has ended while the destination lacked pages, or its own
    /// post-copy has failed.
    #[error(
        "the guest at the destination has lost the pages that it had not fetched yet, and waits \
         for them: its VMM at the source can't send them any more"
    )]
    PagesLost {
        /// Why it can't.
        source: VmError,
    },
    /// The guest has crashed at the destination while it lacked pages. Its VMM is a process of its
    /// own, and has ended.
    #[error(
        "the guest has crashed here while it lacked pages of the source: its VMM has ended. It is \
         lost, and can only be started again from its disks"
    )]
    CrashedLacking,
    /// The operator has given up a guest that lacked pages.
    #[error("the guest was given up while it lacked pages of this host, and is lost")]
    GivenUp,
    /// The user canceled the migration.
    #[error("cancelled during {during}")]
    Cancelled {
        /// What the migration was doing.
        during: &'static str,
    },
    /// The destination placed something other than what was sent.
    #[error(
        "the digests differ: sent {sent:#018x}, placed {placed:#018x}; the source keeps the guest"
    )]
    DigestMismatch {
        /// Sum of the hashes of all pages as last sent.
        sent: u64,
        /// Sum of the hashes of all pages as last placed.
        placed: u64,
    },
    /// The paused memories differ: a write escaped the dirty log.
    #[error(
        "verification found different memory: {source_pages} pages hash to {source_hash:#018x} \
         at the source, {destination_pages} to {destination_hash:#018x} at the destination; {}; \
         the source keeps the guest",
        mismatch_cause(*.compared, .log)
    )]
    VerifyMismatch {
        /// Non-zero pages at the source.
        source_pages: u64,
        /// Their hash.
        source_hash: u64,
        /// Non-zero pages at the destination.
        destination_pages: u64,
        /// Their hash.
        destination_hash: u64,
        /// The dirty log in use.
        log: &'static str,
        /// When the destination hashed its memory.
        compared: Compared,
    },
    /// Compressing pages failed.
    #[error("compression failed on {channel}")]
    Compression {
        /// `lane N`.
        channel: String,
        /// The pages, as far as they are known, and the cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The dirty log failed.
    #[error("the dirty log failed")]
    DirtyLog(#[from] DirtyLogError),
    /// Reading or writing guest memory failed.
    #[error("guest memory failed")]
    Memory(#[from] MemoryError),
    /// Missing pages could not be registered or placed.
    #[error("pages that the guest lacks can't be handled")]
    Faults(#[from] FaultError),
    /// The VMM failed.
    #[error("the VMM could not {action}")]
    Vm {
        /// The action requested.
        action: &'static str,
        /// The VMM's error.
        #[source]
        source: VmError,
    },
    /// The guest has powered off by itself.
    #[error("the guest has powered off: there is nothing to move")]
    PoweredOff,
    /// The guest is paused, and the destination would run it anyway.
    #[error(
        "the guest is paused, and the destination's release (protocol version 1) would run it: \
         upgrade vmferry there, or continue the guest first"
    )]
    PausedForOldPeer,
    /// The witness did not answer the destination's claim.
    #[error(
        "the witness {witness} did not answer for {}, so the guest was not started here",
        humantime_seconds(*.after)
    )]
    ClaimUnanswered {
        /// The witness.
        witness: WitnessId,
        /// How long the destination has waited.
        after: Duration,
        /// Why the last request failed, if it did.
        source: Option<VmError>,
    },
    /// The witness has no register for the session, which begins.
    #[error("the witness {witness} could not open a register for this session")]
    NotOpened {
        /// The witness.
        witness: WitnessId,
        /// Why.
        #[source]
        source: VmError,
    },
    /// The witness has refused the destination's claim.
    #[error("the witness {witness} refuses the guest to this host: {}", refusal(*.register))]
    ClaimRefused {
        /// The witness.
        witness: WitnessId,
        /// What it has on record instead.
        register: Register,
    },
    /// The witness has given the guest back to the source.
    #[error(
        "the destination could not be reached after COMMIT, and the witness {witness} has given \
         the guest back to this host"
    )]
    TakenBack {
        /// The witness.
        witness: WitnessId,
        /// Why the source was in doubt; `None` after a restart.
        source: Option<Box<MigrateError>>,
    },
    /// The session was to have a witness, and the destination's release can't have one.
    #[error(
        "the destination's release (protocol version 1) asks no witness: upgrade vmferry there"
    )]
    NoWitnessThere,
    /// The journal failed, so no promise was made.
    #[error("no promise could be made")]
    Journal(#[from] JournalError),
    /// The operating system lacks threads or other resources.
    #[error("this host could not {action}")]
    Local {
        /// The action attempted.
        action: &'static str,
        /// The error of the operating system.
        #[source]
        source: std::io::Error,
    },
}

/// When the destination hashes its memory for `--verify`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// After all of memory was placed and before the state was loaded.
    BeforeLoad,
    /// After the state was loaded, which may have written memory. Destinations of an earlier
    /// release do this.
    AfterLoad,
}

/// The possible causes of a mismatch.
fn mismatch_cause(compared: Compared, log: &str) -> String {
    match compared {
        Compared::BeforeLoad => format!("a write escaped the dirty log {log}"),
        Compared::AfterLoad => format!(
            "a write escaped the dirty log {log}, or the destination wrote memory while it loaded \
             the state, since it compares after that: upgrade vmferry there"
        ),
    }
}

/// Errors by the caller's reaction. The command's exit codes follow these classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// No link could be established.
    Connect,
    /// The peer was not authenticated or not authorized, or TLS failed.
    Authentication,
    /// The peer violates the protocol, or speaks another version of it.
    Protocol,
    /// Another machine, memory layout or guest identity, or too little memory for the guest.
    Incompatible,
    /// An address, a guest or the destination is already in use.
    Busy,
    /// The link was lost, or the peer went silent.
    LinkLost,
    /// The guest writes too fast.
    NotConverging,
    /// The user canceled it.
    Cancelled,
    /// The memories or digests differ.
    Corrupt,
    /// The guest is in a state in which it can't be migrated.
    GuestState,
    /// This host or the other one failed.
    Internal,
}

impl MigrateError {
    /// The peer violated the protocol on this channel, after this number of bytes.
    pub(crate) fn protocol(
        channel: impl Into<String>,
        offset: u64,
        reason: impl Into<String>,
    ) -> Self {
        Self::Protocol { channel: channel.into(), offset, reason: reason.into() }
    }

    /// The system can't create a thread.
    pub(crate) fn no_thread(source: std::io::Error) -> Self {
        Self::Local { action: "start a thread", source }
    }

    /// A VMM error as `MigrateError::PoweredOff` if that is its cause, else as
    /// `MigrateError::Vm`.
    pub(crate) fn of_vm(action: &'static str, source: VmError) -> Self {
        if PoweredOff::is_in(&source) { Self::PoweredOff } else { Self::Vm { action, source } }
    }

    /// The class of the failure.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Transport(error) if error.is_authentication() => ErrorClass::Authentication,
            Self::Transport(TransportError::AddressInUse { .. }) => ErrorClass::Busy,
            Self::Transport(_) => ErrorClass::Connect,
            // The destination has too little memory for this guest.
            Self::Refused { reason: Reason { code: ReasonCode::Memory, .. }, .. } => {
                ErrorClass::Incompatible
            }
            Self::Refused { reason, .. } | Self::EndedByPeer { reason, .. } => match reason.code {
                ReasonCode::Cancelled => ErrorClass::Cancelled,
                ReasonCode::Incompatible
                | ReasonCode::IdentityMismatch
                | ReasonCode::LayoutMismatch => ErrorClass::Incompatible,
                ReasonCode::Busy => ErrorClass::Busy,
                ReasonCode::Protocol => ErrorClass::Protocol,
                ReasonCode::DigestMismatch => ErrorClass::Corrupt,
                ReasonCode::TimedOut => ErrorClass::LinkLost,
                ReasonCode::Unauthorized => ErrorClass::Authentication,
                ReasonCode::PoweredOff => ErrorClass::GuestState,
                _ => ErrorClass::Internal,
            },
            Self::Protocol { .. } => ErrorClass::Protocol,
            Self::Undecodable { .. }
            | Self::NoPostCopy { .. }
            | Self::PausedForOldPeer
            | Self::NoWitnessThere => ErrorClass::Incompatible,
            Self::PoweredOff | Self::NothingLeft { .. } => ErrorClass::GuestState,
            Self::LinkLost { .. }
            | Self::TimedOut { .. }
            | Self::TakenBack { .. }
            | Self::NotOpened { .. }
            | Self::ClaimUnanswered { .. }
            | Self::ClaimRefused { .. } => ErrorClass::LinkLost,
            Self::NotConverging(_) | Self::PauseTooLong { .. } => ErrorClass::NotConverging,
            Self::Cancelled { .. } => ErrorClass::Cancelled,
            Self::DigestMismatch { .. }
            | Self::VerifyMismatch { .. }
            | Self::PagesLost { .. }
            | Self::CrashedLacking
            | Self::GivenUp => ErrorClass::Corrupt,
            Self::Vm { source, .. } if Told::of(source).is_some_and(Told::is_incompatible) => {
                ErrorClass::Incompatible
            }
            Self::Config(_)
            | Self::Compression { .. }
            | Self::DirtyLog(_)
            | Self::Memory(_)
            | Self::Faults(_)
            | Self::Vm { .. }
            | Self::Journal(_)
            | Self::Local { .. } => ErrorClass::Internal,
        }
    }

    /// The reason to send to the peer: a code and one line of text, without this host's paths or
    /// causes. The exception is a full memory back end, which is named.
    #[must_use]
    pub fn reason_for_peer(&self) -> Reason {
        let code = match self {
            Self::Cancelled { .. } => ReasonCode::Cancelled,
            Self::NotConverging(_) | Self::PauseTooLong { .. } => ReasonCode::Cancelled,
            Self::Protocol { .. } => ReasonCode::Protocol,
            Self::Undecodable { .. }
            | Self::NoPostCopy { .. }
            | Self::PausedForOldPeer
            | Self::NoWitnessThere => ReasonCode::Incompatible,
            Self::PoweredOff | Self::NothingLeft { .. } => ReasonCode::PoweredOff,
            Self::TimedOut { .. }
            | Self::LinkLost { .. }
            | Self::TakenBack { .. }
            | Self::NotOpened { .. }
            | Self::ClaimUnanswered { .. }
            | Self::ClaimRefused { .. } => ReasonCode::TimedOut,
            Self::DigestMismatch { .. } | Self::VerifyMismatch { .. } => ReasonCode::DigestMismatch,
            Self::DirtyLog(_) | Self::Memory(_) | Self::Faults(_) => ReasonCode::Memory,
            Self::Vm { .. } => ReasonCode::State,
            Self::PagesLost { .. } | Self::CrashedLacking | Self::GivenUp => ReasonCode::PagesLost,
            Self::Journal(_) => ReasonCode::Journal,
            Self::Refused { reason, .. } | Self::EndedByPeer { reason, .. } => reason.code,
            Self::Config(_)
            | Self::Transport(_)
            | Self::Local { .. }
            | Self::Compression { .. } => ReasonCode::Internal,
        };
        if let Self::Memory(full @ MemoryError::NoRoom { .. }) = self {
            return Reason::new(code, &full.to_string());
        }
        if let Self::Journal(_) = self {
            return Reason::new(code, "its journal can't be used: see what it says itself");
        }
        if let Self::Vm { source, .. } = self
            && let Some(told) = Told::of(source)
        {
            let code =
                if told.is_incompatible() { ReasonCode::Incompatible } else { ReasonCode::State };
            return Reason::new(code, &format!("{self}: {told}"));
        }
        Reason::new(code, &self.to_string())
    }
}

/// Why a destination may not run the guest.
fn refusal(register: Register) -> &'static str {
    match register {
        Register::TakenBack => "the source could not reach this host, and has taken the guest back",
        Register::Freed => "the source's host was fenced, and its guests were freed",
        Register::Unopened => "it has no register for the session: was its data edited?",
        _ => "the session was decided before",
    }
}

fn humantime_seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}
