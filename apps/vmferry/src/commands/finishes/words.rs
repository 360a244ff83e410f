//! What a journal of a Finish says, for people.

use std::time::{Duration, SystemTime};

use vmferry_handover::{
    DestinationFinish, DomainSeen, FinishEntry, FinishRecord, FinishWord, SourceFinish,
};

use super::{Finish, FinishState};
use crate::commands::daemon::domains::DomainLook;

/// Who has the guest and why, as a sentence without a subject: "this host …".
pub fn says(finish: &Finish, look: Option<&DomainLook>) -> String {
    let said = match finish.state {
        FinishState::Source(state) => source(finish, state),
        FinishState::Destination(state) => destination(finish, state, look),
    };
    match look {
        Some(look) => format!("{said}; libvirt here: {}", look.said),
        None => said,
    }
}

fn source(finish: &Finish, state: SourceFinish) -> String {
    let (peer, at) = (&finish.peer, time(finish));
    match state {
        SourceFinish::NotSent if finish.led => "is moving the guest, which is here".into(),
        SourceFinish::NotSent => "has the guest: Finish was never sent".into(),
        SourceFinish::Sent if finish.led => format!(
            "IN DOUBT: sent Finish {at}, and has no answer; the daemon asks {peer} for the word"
        ),
        SourceFinish::Sent => {
            format!("IN DOUBT: sent Finish {at}, has no answer, and no daemon asks for the word")
        }
        SourceFinish::Answered(FinishWord::Runs) => {
            format!(
                "gave the guest away: {}",
                by(finish, &format!("{peer} said that it runs there"))
            )
        }
        SourceFinish::Answered(FinishWord::DoesNotRun) => {
            let heard = format!("{peer} said that it never ran there and never will");
            format!("has the guest: {}", by(finish, &heard))
        }
    }
}

fn destination(finish: &Finish, state: DestinationFinish, look: Option<&DomainLook>) -> String {
    let at = time(finish);
    let seen = look.map_or(DomainSeen::NoAnswer, |look| look.seen);
    match (state, seen) {
        (DestinationFinish::NotPassed, _) if finish.led => {
            "is receiving the guest, which has not run here yet".into()
        }
        (DestinationFinish::NotPassed, _) => {
            "never ran the guest: Finish was never passed to libvirt".into()
        }
        (DestinationFinish::Barred, _) => {
            format!("never ran the guest and never will: said so {at}, before any Finish came")
        }
        (DestinationFinish::Passed, _) if finish.led => {
            format!("may run the guest: Finish was passed {at}, and libvirt's answer is awaited")
        }
        (DestinationFinish::Passed, DomainSeen::Runs) => {
            format!("has the guest: libvirt says so now; its answer to the Finish of {at} is lost")
        }
        (DestinationFinish::Passed, _) => {
            format!("IN DOUBT: Finish was passed {at}, and libvirt's answer is lost")
        }
        (DestinationFinish::Answered(FinishWord::Runs), _) => {
            format!("has the guest: {}", by(finish, "libvirt said that it runs here"))
        }
        (DestinationFinish::Answered(FinishWord::DoesNotRun), _) => {
            let said = by(finish, "libvirt said that it does not run here");
            format!("never ran the guest and never will: {said}")
        }
    }
}

/// What to do about the session, if there is something.
pub fn advice(finish: &Finish, look: Option<&DomainLook>) -> Option<String> {
    let name = &finish.guest.name;
    let look = look?;
    if look.is_split() {
        return Some(format!(
            "post-copy of {name} is not complete, and each host has a part of its memory: keep \
             both, and see docs/libvirt.md"
        ));
    }
    let waits = look.seen == DomainSeen::Waits;
    let resolve = |what: &str, word: FinishWord| {
        let option = match word {
            FinishWord::Runs => "--destination-owns",
            FinishWord::DoesNotRun => "--source-resumes",
        };
        Some(format!("{name} is paused here: `vmferry resolve {name} {option}` {what} it"))
    };
    use FinishState::{Destination, Source};
    match finish.state {
        Source(SourceFinish::Sent) => Some(format!(
            "look at {} with `vmferry status --sessions`, then `vmferry resolve {name}` here",
            finish.peer
        )),
        Source(SourceFinish::NotSent) if waits && !finish.led => {
            resolve("resumes", FinishWord::DoesNotRun)
        }
        Source(SourceFinish::Answered(word @ FinishWord::DoesNotRun)) if waits => {
            resolve("resumes", word)
        }
        Source(SourceFinish::Answered(word @ FinishWord::Runs)) if waits => {
            resolve("removes", word)
        }
        Destination(DestinationFinish::Passed) if !finish.led && look.seen != DomainSeen::Runs => {
            Some(format!(
                "look at QEMU's log of {name} and at {}, then `vmferry resolve {name}` here",
                finish.peer
            ))
        }
        Destination(DestinationFinish::Answered(word @ FinishWord::Runs)) if waits => {
            resolve("resumes", word)
        }
        Destination(
            DestinationFinish::NotPassed
            | DestinationFinish::Barred
            | DestinationFinish::Answered(FinishWord::DoesNotRun),
        ) if waits && !finish.led => resolve("removes", FinishWord::DoesNotRun),
        _ => None,
    }
}

/// Who has given the word, and when.
fn by(finish: &Finish, otherwise: &str) -> String {
    let at = time(finish);
    match finish.entries.last() {
        Some(FinishEntry { record: FinishRecord::Answered { by_operator: true, .. }, .. }) => {
            format!("an operator decided so {at}")
        }
        _ => format!("{otherwise} {at}"),
    }
}

/// When the last record was written.
fn time(finish: &Finish) -> String {
    // The format ends there.
    const END_OF_9999: u64 = 253_402_300_799;
    match finish.last_at() {
        at @ 1..=END_OF_9999 => {
            let at = SystemTime::UNIX_EPOCH + Duration::from_secs(at);
            format!("at {}", humantime::format_rfc3339_seconds(at))
        }
        // A release that knew no times wrote it, or a clock that is wrong.
        _ => "at an unknown time".into(),
    }
}
