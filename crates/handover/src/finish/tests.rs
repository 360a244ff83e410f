//! The record comes before the action, words never change, and records read back as states.

use super::*;
use crate::journal::Side;

const WORDS: [FinishWord; 2] = [FinishWord::Runs, FinishWord::DoesNotRun];
const SOURCES: [SourceFinish; 4] = [
    SourceFinish::NotSent,
    SourceFinish::Sent,
    SourceFinish::Answered(FinishWord::Runs),
    SourceFinish::Answered(FinishWord::DoesNotRun),
];
const DESTINATIONS: [DestinationFinish; 5] = [
    DestinationFinish::NotPassed,
    DestinationFinish::Passed,
    DestinationFinish::Answered(FinishWord::Runs),
    DestinationFinish::Answered(FinishWord::DoesNotRun),
    DestinationFinish::Barred,
];
const ANSWERS: [FinishAnswer; 4] = [
    FinishAnswer::Unknown,
    FinishAnswer::AskAgain,
    FinishAnswer::Word(FinishWord::DoesNotRun),
    FinishAnswer::Word(FinishWord::Runs),
];
const OPERATORS: [OperatorWord; 2] = [OperatorWord::DestinationOwns, OperatorWord::SourceResumes];
const SEEN: [DomainSeen; 4] =
    [DomainSeen::Runs, DomainSeen::Waits, DomainSeen::Gone, DomainSeen::NoAnswer];

fn open() -> FinishRecord {
    FinishRecord::Open {
        guest: crate::GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() },
        peer: "host-b:7001".into(),
        peer_names: vec!["host-b".into()],
    }
}

fn source_steps(from: SourceFinish) -> Vec<SourceStep> {
    let heard = ANSWERS.map(|answer| from.hear(answer));
    let operator = OPERATORS.map(|word| from.operator(word));
    [from.send()].into_iter().chain(heard).chain(operator).flatten().collect()
}

fn destination_steps(from: DestinationFinish) -> Vec<DestinationStep> {
    let replies = WORDS.map(|word| from.reply(word));
    let looks = SEEN.map(|seen| from.looked(seen));
    let operator = OPERATORS.map(|word| from.operator(word));
    let fallible = [from.pass(), Ok(from.asked())];
    fallible.into_iter().chain(replies).chain(looks).chain(operator).flatten().collect()
}

#[test]
fn source_step_journals_every_new_state() {
    for from in SOURCES {
        for step in source_steps(from) {
            assert_eq!(step.journal.is_some(), step.state != from, "{from:?}: {step:?}");
            if let SourceAction::Reply(word) = step.action {
                assert_eq!(step.state, SourceFinish::Answered(word));
            }
            if step.action == SourceAction::Send {
                assert_eq!(step.journal, Some(FinishRecord::Sent));
            }
            assert!(step.journal.is_none_or(|record| record.is_of(Side::Source)));
        }
    }
}

#[test]
fn destination_step_journals_every_new_state() {
    for from in DESTINATIONS {
        for step in destination_steps(from) {
            assert_eq!(step.journal.is_some(), step.state != from, "{from:?}: {step:?}");
            let word = match step.action {
                DestinationAction::SendReply(word)
                | DestinationAction::Answer(FinishAnswer::Word(word)) => Some(word),
                _ => None,
            };
            let journaled = match step.state {
                DestinationFinish::Answered(word) => Some(word),
                DestinationFinish::Barred => Some(FinishWord::DoesNotRun),
                _ => None,
            };
            assert!(word.is_none() || word == journaled, "{from:?}: {step:?}");
            if step.action == DestinationAction::Pass {
                assert_eq!(step.journal, Some(FinishRecord::Passed));
            }
            assert!(step.journal.is_none_or(|record| record.is_of(Side::Destination)));
        }
    }
}

#[test]
fn words_never_change() {
    for word in WORDS {
        for step in source_steps(SourceFinish::Answered(word)) {
            assert_eq!(step.state, SourceFinish::Answered(word));
        }
        for step in destination_steps(DestinationFinish::Answered(word)) {
            assert_eq!(step.state, DestinationFinish::Answered(word));
        }
    }
    for step in destination_steps(DestinationFinish::Barred) {
        assert_eq!(step.state, DestinationFinish::Barred);
    }
}

#[test]
fn source_breaks_only_before_sent_or_after_does_not_run() {
    let breaking: Vec<_> = SOURCES.into_iter().filter(|state| state.may_break()).collect();
    let expected = [SourceFinish::NotSent, SourceFinish::Answered(FinishWord::DoesNotRun)];
    assert_eq!(breaking, expected);
}

#[test]
fn hear_asks_again_without_a_word() {
    for answer in [FinishAnswer::Unknown, FinishAnswer::AskAgain] {
        let step = SourceFinish::Sent.hear(answer).unwrap();
        let expected =
            FinishStep { journal: None, state: SourceFinish::Sent, action: SourceAction::Ask };
        assert_eq!(step, expected);
    }
}

#[test]
fn looked_gives_a_word_only_if_the_domain_runs() {
    for seen in SEEN {
        let step = DestinationFinish::Passed.looked(seen).unwrap();
        assert_eq!(step.journal.is_some(), seen == DomainSeen::Runs, "{seen:?}");
    }
}

#[test]
fn pass_refuses_after_barred_and_errs_after_passed() {
    let step = DestinationFinish::Barred.pass().unwrap();
    assert_eq!((step.journal, step.action), (None, DestinationAction::Refuse));
    for state in [DestinationFinish::Passed, DestinationFinish::Answered(FinishWord::Runs)] {
        assert_eq!(state.pass(), Err(FinishError::SecondFinish));
    }
}

#[test]
fn recover_reads_what_the_steps_journaled() {
    assert_eq!(SourceFinish::recover(&[]), Ok(None));
    let mut found = vec![(SourceFinish::NotSent, vec![open()])];
    let mut at = 0;
    while let Some((from, records)) = found.get(at).cloned() {
        assert_eq!(SourceFinish::recover(&records), Ok(Some(from)));
        for step in source_steps(from).into_iter().filter(|step| step.journal.is_some()) {
            found
                .push((step.state, [records.clone(), step.journal.into_iter().collect()].concat()));
        }
        at += 1;
    }
    assert_eq!(DestinationFinish::recover(&[]), Ok(None));
    let mut found = vec![(DestinationFinish::NotPassed, vec![open()])];
    let mut at = 0;
    while let Some((from, records)) = found.get(at).cloned() {
        assert_eq!(DestinationFinish::recover(&records), Ok(Some(from)));
        for step in destination_steps(from).into_iter().filter(|step| step.journal.is_some()) {
            found
                .push((step.state, [records.clone(), step.journal.into_iter().collect()].concat()));
        }
        at += 1;
    }
}

#[test]
fn recover_refuses_contradictions() {
    let answered = |word| FinishRecord::Answered { word, by_operator: false };
    for records in [
        vec![FinishRecord::Sent],
        vec![open(), FinishRecord::Sent, FinishRecord::Sent],
        vec![open(), FinishRecord::Passed],
        vec![open(), answered(FinishWord::Runs)],
    ] {
        assert_eq!(SourceFinish::recover(&records), Err(FinishError::Records), "{records:?}");
    }
    for records in [
        vec![open(), FinishRecord::Barred, FinishRecord::Passed],
        vec![open(), FinishRecord::Passed, FinishRecord::Barred],
        vec![open(), FinishRecord::Sent],
        vec![open(), FinishRecord::Barred, answered(FinishWord::Runs)],
        vec![open(), open()],
    ] {
        assert_eq!(DestinationFinish::recover(&records), Err(FinishError::Records), "{records:?}");
    }
}

#[test]
fn numbers_of_answers_are_stable() {
    for (number, answer) in ANSWERS.into_iter().enumerate() {
        assert_eq!(usize::from(answer.number()), number);
        assert_eq!(FinishAnswer::from_number(answer.number()), Some(answer));
    }
    assert_eq!(FinishAnswer::from_number(4), None);
}

#[test]
fn records_have_a_stable_form() {
    let golden = [
        (
            open(),
            r#"{"record":"open","guest":{"uuid":"00000000-0000-0000-0000-000000000000","name":"web"},"peer":"host-b:7001","peer_names":["host-b"],"at":1}"#,
        ),
        (FinishRecord::Sent, r#"{"record":"sent","at":1}"#),
        (FinishRecord::Passed, r#"{"record":"passed","at":1}"#),
        (FinishRecord::Barred, r#"{"record":"barred","at":1}"#),
        (
            FinishRecord::Answered { word: FinishWord::Runs, by_operator: false },
            r#"{"record":"answered","word":"runs","by_operator":false,"at":1}"#,
        ),
        (
            FinishRecord::Answered { word: FinishWord::DoesNotRun, by_operator: true },
            r#"{"record":"answered","word":"does-not-run","by_operator":true,"at":1}"#,
        ),
    ];
    for (record, json) in golden {
        let entry = FinishEntry { record, at: 1 };
        assert_eq!(serde_json::to_string(&entry).unwrap(), json);
        assert_eq!(serde_json::from_str::<FinishEntry>(json).unwrap(), entry);
    }
    // Written by a release that knew no times.
    let old = serde_json::from_str::<FinishEntry>(r#"{"record":"sent"}"#).unwrap();
    assert_eq!(old, FinishEntry { record: FinishRecord::Sent, at: 0 });
}
