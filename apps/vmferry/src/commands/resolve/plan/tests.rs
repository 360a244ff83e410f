//! Every word, with every state of the journal and everything that libvirt may say.

use OperatorWord::{DestinationOwns, SourceResumes};

use super::*;

const SEEN: [DomainSeen; 4] =
    [DomainSeen::Runs, DomainSeen::Waits, DomainSeen::Gone, DomainSeen::NoAnswer];
const WORDS: [OperatorWord; 2] = [DestinationOwns, SourceResumes];

fn evidence(seen: DomainSeen) -> Evidence {
    Evidence { seen, has_job: false, is_loaded: true, led: false }
}

fn journals(then: Then) -> Result<Plan, Refusal> {
    Ok(Plan { journals: true, then })
}

fn only(then: Then) -> Result<Plan, Refusal> {
    Ok(Plan { journals: false, then })
}

#[test]
fn source_in_doubt_follows_the_operator_unless_libvirt_contradicts() {
    let decide = |word, seen| at_source(SourceFinish::Sent, word, evidence(seen));
    assert_eq!(decide(SourceResumes, DomainSeen::Waits), journals(Then::Resume));
    assert_eq!(decide(SourceResumes, DomainSeen::Runs), journals(Then::Nothing));
    assert!(decide(SourceResumes, DomainSeen::Gone).is_err());
    assert_eq!(decide(DestinationOwns, DomainSeen::Waits), journals(Then::Destroy));
    assert_eq!(decide(DestinationOwns, DomainSeen::Gone), journals(Then::Nothing));
    assert!(decide(DestinationOwns, DomainSeen::Runs).is_err(), "it runs here");
}

#[test]
fn word_that_contradicts_the_journal_is_refused_whatever_libvirt_says() {
    for seen in SEEN {
        let source = |state, word| at_source(state, word, evidence(seen));
        assert!(source(SourceFinish::Answered(FinishWord::Runs), SourceResumes).is_err());
        assert!(source(SourceFinish::Answered(FinishWord::DoesNotRun), DestinationOwns).is_err());
        assert!(source(SourceFinish::NotSent, DestinationOwns).is_err());
        let destination = |state, word| at_destination(state, word, evidence(seen));
        let answered = DestinationFinish::Answered;
        assert!(destination(answered(FinishWord::Runs), SourceResumes).is_err());
        assert!(destination(answered(FinishWord::DoesNotRun), DestinationOwns).is_err());
        assert!(destination(DestinationFinish::NotPassed, DestinationOwns).is_err());
        assert!(destination(DestinationFinish::Barred, DestinationOwns).is_err());
    }
}

#[test]
fn nothing_is_decided_without_libvirt() {
    for word in WORDS {
        let nobody = evidence(DomainSeen::NoAnswer);
        assert!(at_source(SourceFinish::Sent, word, nobody).is_err());
        assert!(at_destination(DestinationFinish::Passed, word, nobody).is_err());
    }
}

#[test]
fn guest_that_libvirt_has_left_paused_follows_the_journal() {
    let left = evidence(DomainSeen::Waits);
    let answered = SourceFinish::Answered;
    let source = |state, word| at_source(state, word, left);
    assert_eq!(source(answered(FinishWord::DoesNotRun), SourceResumes), only(Then::Resume));
    assert_eq!(source(answered(FinishWord::Runs), DestinationOwns), only(Then::Destroy));
    assert_eq!(source(SourceFinish::NotSent, SourceResumes), only(Then::Resume));
    let led = Evidence { led: true, ..left };
    assert!(at_source(SourceFinish::NotSent, SourceResumes, led).is_err(), "it is being moved");
    let answered = DestinationFinish::Answered;
    let destination = |state, word| at_destination(state, word, left);
    assert_eq!(destination(answered(FinishWord::Runs), DestinationOwns), only(Then::Resume));
    for state in
        [answered(FinishWord::DoesNotRun), DestinationFinish::Barred, DestinationFinish::NotPassed]
    {
        assert_eq!(destination(state, SourceResumes), only(Then::Destroy), "{state:?}");
    }
}

#[test]
fn destination_in_doubt_decides_only_what_libvirt_has_ended() {
    let decide = |word, evidence| at_destination(DestinationFinish::Passed, word, evidence);
    let waits = evidence(DomainSeen::Waits);
    assert_eq!(decide(SourceResumes, waits), journals(Then::Destroy));
    assert_eq!(decide(DestinationOwns, waits), journals(Then::Resume));
    let busy = Evidence { has_job: true, ..waits };
    let partial = Evidence { is_loaded: false, ..waits };
    let led = Evidence { led: true, ..waits };
    for word in WORDS {
        assert!(decide(word, busy).is_err(), "libvirt may still start it");
        assert!(decide(word, led).is_err(), "the answer will come");
        assert_eq!(decide(word, evidence(DomainSeen::Gone)), journals(Then::Nothing));
    }
    assert!(decide(DestinationOwns, partial).is_err());
    assert_eq!(decide(SourceResumes, partial), journals(Then::Destroy));
    let runs = evidence(DomainSeen::Runs);
    assert_eq!(decide(DestinationOwns, runs), journals(Then::Nothing));
    assert!(decide(SourceResumes, runs).is_err());
}

/// A word that says that the other host has the guest never resumes it, and the other way round.
#[test]
fn no_plan_resumes_on_both_hosts() {
    let sources = [
        SourceFinish::NotSent,
        SourceFinish::Sent,
        SourceFinish::Answered(FinishWord::Runs),
        SourceFinish::Answered(FinishWord::DoesNotRun),
    ];
    let destinations = [
        DestinationFinish::NotPassed,
        DestinationFinish::Passed,
        DestinationFinish::Barred,
        DestinationFinish::Answered(FinishWord::Runs),
        DestinationFinish::Answered(FinishWord::DoesNotRun),
    ];
    let never =
        |planned: Result<Plan, Refusal>, then| planned.is_err() || planned.unwrap().then != then;
    for seen in SEEN {
        let known = evidence(seen);
        for state in sources {
            assert!(never(at_source(state, DestinationOwns, known), Then::Resume));
            assert!(never(at_source(state, SourceResumes, known), Then::Destroy));
        }
        for state in destinations {
            assert!(never(at_destination(state, SourceResumes, known), Then::Resume));
            assert!(never(at_destination(state, DestinationOwns, known), Then::Destroy));
        }
    }
}
