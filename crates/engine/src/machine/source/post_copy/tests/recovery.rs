//! Fetch lanes after one of the two processes was restarted.

use vmferry_handover::journal::Record;
use vmferry_wire::{ControlMessage, GuestIdentity, Token};

use super::*;
use crate::vmm::GuestDescription;

fn token(number: u8) -> Token {
    Token([number; 16])
}

fn answer_with(source: &Source, token: Option<Token>) -> Input {
    let (session, word) = (source.common.config.session, SessionWord::Fetching);
    Input::Control(ControlMessage::Answer { session, word, token })
}

/// The tokens with which fetch lanes are dialed.
fn dialed_with(source: &mut Source) -> Vec<Token> {
    let token = |action| match action {
        Action::RejoinLane { token, .. } => Some(token),
        _ => None,
    };
    did(source).into_iter().filter_map(token).collect()
}

/// A destination that was restarted expects another token, whatever is being dialed.
#[test]
fn lanes_are_dialed_with_the_token_of_the_last_answer() {
    let mut source = serving();
    source.handle(NOW, lane_lost(FETCH, 0));
    let _ = did(&mut source);
    source.handle(NOW, Input::LinkLost(lost()));
    let [Action::Ask { offer: Some(offer), .. }] = did(&mut source)[..] else {
        panic!("{source:?}")
    };
    assert_eq!(offer.first, FETCH);
    source.handle(NOW, answer_with(&source, Some(token(5))));
    let lanes = usize::from(offer.lanes.count());
    assert_eq!(dialed_with(&mut source), vec![token(5); lanes]);
    source.handle(NOW, Input::LinkLost(lost()));
    let _ = did(&mut source);
    source.handle(NOW, answer_with(&source, None));
    assert_eq!(dialed_with(&mut source), [], "the lanes are being dialed");
}

/// A source that was restarted, with these records in its journal.
fn recovered(records: &[Record]) -> Source {
    let guest = GuestDescription {
        identity: GuestIdentity { uuid: uuid::Uuid::nil(), name: String::new() },
        vmm: String::new(),
        config: Vec::new(),
        layout: Vec::new(),
    };
    Source::recovered(config(PostCopy::Never), &guest, records, NOW)
}

#[test]
fn recovered_source_offers_lanes_and_serves() {
    let commit = Record::commit(SessionKind::PostCopy);
    for records in [vec![commit.clone()], vec![commit.clone(), Record::Serving]] {
        let mut source = recovered(&records);
        let begins = did(&mut source);
        let [Action::ServePages { .. }, Action::Ask { offer: Some(offer), .. }] = begins[..] else {
            panic!("{begins:?}")
        };
        source.handle(NOW, answer_with(&source, Some(token(5))));
        let lanes = usize::from(offer.lanes.count());
        assert_eq!(dialed_with(&mut source), vec![token(5); lanes], "{records:?}");
        assert_eq!(source.handover(), SourceState::Serving);
    }
    let mut without = recovered(&[Record::commit(SessionKind::PreCopy)]);
    assert!(matches!(did(&mut without)[..], [Action::Ask { offer: None, .. }]));
    let mut kept = recovered(&[]);
    assert!(matches!(did(&mut kept)[..], [Action::Resume, ..]));
}

/// Only the answer to a question has a token: the destination may say FETCHING by itself first.
#[test]
fn recovered_source_asks_again_until_it_has_a_token() {
    let mut source = recovered(&[Record::commit(SessionKind::PostCopy)]);
    let _ = did(&mut source);
    for _ in 0..3 {
        source.handle(NOW, answer_with(&source, None));
        assert_eq!(source.handover(), SourceState::Serving);
        let asks = |action: &Action| matches!(action, Action::Ask { offer: Some(_), .. });
        assert!(did(&mut source).iter().any(asks), "{source:?}");
    }
    source.handle(NOW, answer_with(&source, Some(token(5))));
    assert!(!dialed_with(&mut source).is_empty());
}
