//! What an operator's word about a guest of libvirt does on this host, or why it is refused.

use vmferry_handover::{DestinationFinish, DomainSeen, FinishWord, OperatorWord, SourceFinish};

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Whether the word is written to the journal, before all else.
    pub journals: bool,
    /// What libvirt of this host is told then, unless it has done it by itself.
    pub then: Then,
}

/// What libvirt is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Nothing.
    Nothing,
    /// The guest runs on.
    Resume,
    /// The paused guest is removed.
    Destroy,
}

/// What is known on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// What libvirt says about the guest.
    pub seen: DomainSeen,
    /// Whether libvirt has a job for it. It may still start or remove the guest then.
    pub has_job: bool,
    /// Whether its QEMU has loaded the guest.
    pub is_loaded: bool,
    /// Whether a daemon leads the session.
    pub led: bool,
}

/// Why the word is refused, for people.
pub type Refusal = &'static str;

const NO_LIBVIRT: Refusal = "libvirt of this host does not answer, so nobody can know whether the \
    guest runs here: start it first";
const NOTHING: Refusal = "there is nothing to decide";

fn plan(journals: bool, then: Then) -> Result<Plan, Refusal> {
    match (journals, then) {
        (false, Then::Nothing) => Err(NOTHING),
        _ => Ok(Plan { journals, then }),
    }
}

/// At the source.
///
/// # Errors
/// What contradicts the word.
pub fn at_source(
    state: SourceFinish,
    word: OperatorWord,
    evidence: Evidence,
) -> Result<Plan, Refusal> {
    use OperatorWord::{DestinationOwns, SourceResumes};
    use SourceFinish::{Answered, NotSent, Sent};
    let in_doubt = state == Sent;
    match (state, word, evidence.seen) {
        (NotSent, DestinationOwns, _) => {
            Err("Finish was never sent, so the guest has never run on the other host")
        }
        (NotSent, SourceResumes, _) if evidence.led => {
            Err("the guest is being moved and is not in doubt: `vmferry cancel` ends that")
        }
        (Answered(FinishWord::Runs), SourceResumes, _) => {
            Err("the journal has the word that the guest runs on the other host, or has run there")
        }
        (Answered(FinishWord::DoesNotRun), DestinationOwns, _) => Err(
            "the journal has the word that the guest never ran on the other host and never will",
        ),
        (_, _, DomainSeen::NoAnswer) => Err(NO_LIBVIRT),
        (_, SourceResumes, DomainSeen::Gone) => {
            Err("libvirt of this host has no such guest any more, so it can't be resumed here")
        }
        (_, SourceResumes, DomainSeen::Runs) => plan(in_doubt, Then::Nothing),
        (_, SourceResumes, DomainSeen::Waits) => plan(in_doubt, Then::Resume),
        (_, DestinationOwns, DomainSeen::Runs) => Err(
            "libvirt says that this host has the guest, which does not wait for a migration: if \
             it runs on the other host as well, end one of the two",
        ),
        (_, DestinationOwns, DomainSeen::Gone) => plan(in_doubt, Then::Nothing),
        (_, DestinationOwns, DomainSeen::Waits) => plan(in_doubt, Then::Destroy),
    }
}

/// At the destination.
///
/// # Errors
/// What contradicts the word.
pub fn at_destination(
    state: DestinationFinish,
    word: OperatorWord,
    evidence: Evidence,
) -> Result<Plan, Refusal> {
    use DestinationFinish::{Answered, Barred, NotPassed, Passed};
    use OperatorWord::{DestinationOwns, SourceResumes};
    let in_doubt = state == Passed;
    match (state, word, evidence.seen) {
        _ if evidence.led => Err(
            "the daemon on this host leads the session: libvirt's answer will come, or restart \
             libvirt if it hangs",
        ),
        (NotPassed | Barred, DestinationOwns, _) => {
            Err("Finish was never passed to libvirt, so the guest has never run here")
        }
        (Answered(FinishWord::Runs), SourceResumes, _) => {
            Err("the journal has the word that the guest runs here, or has run here")
        }
        (Answered(FinishWord::DoesNotRun), DestinationOwns, _) => {
            Err("the journal has the word that the guest never ran here and never will")
        }
        (_, _, DomainSeen::NoAnswer) => Err(NO_LIBVIRT),
        (_, _, DomainSeen::Waits) if evidence.has_job => {
            Err("libvirt still works on the guest and may start it: try again soon, and restart \
             libvirt if it hangs")
        }
        (Passed, SourceResumes, DomainSeen::Runs) => Err("libvirt says that the guest runs here"),
        // A later one of the same UUID.
        (_, SourceResumes, DomainSeen::Runs) => Err(NOTHING),
        (_, SourceResumes, DomainSeen::Waits) => plan(in_doubt, Then::Destroy),
        (_, DestinationOwns, DomainSeen::Waits) if !evidence.is_loaded => {
            Err("the guest's QEMU here has not received all of it, so it can't run here")
        }
        (_, DestinationOwns, DomainSeen::Waits) => plan(in_doubt, Then::Resume),
        (_, DestinationOwns, DomainSeen::Runs) | (_, _, DomainSeen::Gone) => {
            plan(in_doubt, Then::Nothing)
        }
    }
}

#[cfg(test)]
mod tests;
