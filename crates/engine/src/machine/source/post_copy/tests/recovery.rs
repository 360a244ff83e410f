//! Fetch lanes after one of the two processes was restarted.

use vmferry_handover::journal::Record;
use vmferry_wire::{ControlMessage, GuestIdentity, LaneOffer, LaneToken, Token};

use super::*;
use crate::machine::peer::SourceSide;
use crate::vmm::{GuestDescription, PostCopyFailed};

fn token(number: u8) -> Token {
    Token([number; 16])
}

fn answer_with(source: &Source, token: Option<Token>) -> Input {
    let (session, word) = (source.common.config.session, SessionWord::Fetching);
    let token = token.map(|token| LaneToken { token, streams: None });
    Input::Control(ControlMessage::Answer { session, word, token })
}

/// An answer with a token, from a destination whose VMM has these streams.
fn answer_with_streams(source: &Source, number: u64) -> Input {
    let session = source.common.config.session;
    let streams = Some(LateStreamsId(number));
    let token = Some(LaneToken { token: Token([3; 16]), streams });
    Input::Control(ControlMessage::Answer { session, word: SessionWord::Fetching, token })
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
    recovered_as(SourceSide::recovered(false, None), records)
}

fn recovered_as(our_side: SourceSide, records: &[Record]) -> Source {
    let guest = GuestDescription {
        identity: GuestIdentity { uuid: uuid::Uuid::nil(), name: String::new() },
        vmm: String::new(),
        config: Vec::new(),
        layout: Vec::new(),
    };
    Source::recovered(config(PostCopy::Never), &guest, our_side, records, NOW)
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

/// One of the two processes that carried the guest has died.
#[test]
fn streams_of_a_carried_guest_begin_again_if_the_destination_has_others() {
    let mut source = serving();
    source.common.post_copy.streams = Some(LateStreamsId::FIRST);
    let reconnects = |source: &mut Source| {
        did(source).iter().filter(|action| matches!(action, Action::ReconnectVmm)).count()
    };
    for (number, count) in [(0, 0), (5, 1), (5, 0), (6, 1)] {
        source.handle(NOW, answer_with_streams(&source, number));
        assert_eq!(reconnects(&mut source), count, "{number}");
        let offered = source.common.lane_offer().and_then(|offer| offer.streams);
        assert_eq!(offered, Some(LateStreamsId(number)));
    }
    source.handle(NOW, Input::NotReconnected(lost()));
    assert!(did(&mut source).iter().any(|action| {
        let offered = |offer: &LaneOffer| offer.streams == Some(LateStreamsId::NONE);
        matches!(action, Action::Ask { offer: Some(offer), .. } if offered(offer))
    }));
    source.handle(NOW, answer_with_streams(&source, 7));
    assert_eq!(reconnects(&mut source), 1);
}

/// By itself, or with the process that carries it: it is connected again in any case.
#[test]
fn streams_begin_again_if_the_post_copy_of_the_vmm_has_failed() {
    let asks_for_streams = |source: &mut Source| {
        did(source).iter().any(|action| {
            let has_none = |offer: &LaneOffer| offer.streams == Some(LateStreamsId::NONE);
            matches!(action, Action::Ask { offer: Some(offer), .. } if has_none(offer))
        })
    };
    let failure = || {
        let source = PostCopyFailed.into();
        MigrateError::Vm { action: "stream the guest", source }
    };
    let mut source = serving();
    source.common.post_copy.streams = Some(LateStreamsId::FIRST);
    let _ = did(&mut source);
    for input in [Input::Failed(failure()), Input::NotReconnected(failure())] {
        source.handle(NOW, input);
        assert!(asks_for_streams(&mut source), "{source:?}");
        assert_eq!(source.handover(), SourceState::Serving);
        source.handle(NOW, answer_with_streams(&source, 5));
        let reconnects = |action: &Action| matches!(action, Action::ReconnectVmm);
        assert!(did(&mut source).iter().any(reconnects));
    }
}

/// Its pages are read by this side.
#[test]
fn source_without_streams_of_a_vmm_offers_none() {
    let source = serving();
    assert_eq!(source.common.lane_offer().unwrap().streams, None);
}

/// The process that carried the guest has died. Its VMM is connected after the record SERVING, and
/// before its lanes, which are being dialed then, have channels.
#[test]
fn recovered_source_of_a_carried_guest_connects_its_vmm() {
    let records = [Record::commit(SessionKind::PostCopy)];
    let mut source = recovered_as(SourceSide::recovered(true, None), &records);
    let begins = did(&mut source);
    let Some(Action::Ask { offer: Some(offer), .. }) = begins.last() else { panic!("{begins:?}") };
    assert_eq!((offer.lanes.count(), offer.streams), (2, Some(LateStreamsId::NONE)));
    source.handle(NOW, answer_with_streams(&source, 5));
    let done = did(&mut source);
    assert!(
        matches!(
            done[..],
            [
                Action::RejoinLane { .. },
                Action::RejoinLane { .. },
                Action::WriteOutcome(Record::Serving),
                Action::ReconnectVmm
            ]
        ),
        "{done:?}"
    );
}
