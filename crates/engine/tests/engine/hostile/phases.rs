//! Messages that arrive in the wrong phase: each ends its own session with an error that states the
//! reason, and the receiver accepts the next session.

use std::sync::mpsc::Receiver;

use super::by_hand::{Line, PATIENCE, Pki, SESSION, accepted, begin, hear, hello, policy};
use crate::support::{DestinationGuest, Scenario, nothing};
use vmferry::destination::{Notice, receive};
use vmferry_memory::SlotId;
use vmferry_transport::{Address, Listener};
use vmferry_wire::{
    ControlMessage, FrameHeader, HelloStatus, Reason, ReasonCode, Role, SessionId, SessionWord,
    Token,
};

/// A receiver to which the test sends messages.
struct Destination {
    address: Address,
    pki: Pki,
    notices: Receiver<Notice>,
}

impl Destination {
    fn announced(&self, message: &ControlMessage) -> Line {
        let mut line = Line::dial(&self.address, Some(&self.pki.identity("source")));
        assert_eq!(line.greet(hello(Role::Control, 0, Token([0; 16]))), HelloStatus::Ok);
        line.say(message);
        line
    }

    fn accepted(&self) -> (Line, Token) {
        accepted(&self.address, &self.pki, "source")
    }

    /// All memory is placed (there is none), and the state is loaded.
    fn ready(&self, verify: bool) -> (Line, Line) {
        let mut announcement = begin(SESSION);
        if let ControlMessage::Begin { verify: announced, .. } = &mut announcement {
            *announced = verify;
        }
        let mut control = self.announced(&announcement);
        let ControlMessage::Accept { token, .. } = control.hear() else { panic!("refused") };
        let mut lane = Line::dial(&self.address, Some(&self.pki.identity("source")));
        assert_eq!(lane.greet(hello(Role::Data, 0, token)), HelloStatus::Ok);
        lane.write(&FrameHeader::end_of_round(1, 1).encode());
        let state = 0_u64.to_le_bytes().into();
        control.say(&ControlMessage::Final {
            lane_sequences: vec![1],
            digest: 0,
            state,
            paused: false,
            kind: vmferry_wire::SessionKind::PreCopy,
            storage_sample: Vec::new(),
        });
        loop {
            match control.hear() {
                ControlMessage::Ready { .. } => return (control, lane),
                ControlMessage::Placed { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// The reason why the last attempt failed.
    fn failed(&self) -> String {
        loop {
            if let Notice::AttemptFailed { reason } = hear(&self.notices) {
                return reason;
            }
        }
    }

    /// The destination's answer about the session that the test began.
    fn word(&self) -> SessionWord {
        let mut line = Line::dial(&self.address, Some(&self.pki.identity("source")));
        assert_eq!(line.greet(hello(Role::Query, 0, Token([0; 16]))), HelloStatus::Ok);
        line.say(&ControlMessage::Query { session: SESSION, offer: None });
        match line.hear() {
            ControlMessage::Answer { word, .. } => word,
            other => panic!("{other:?}"),
        }
    }
}

/// Lets a test send messages to a receiver over each type of channel. The receiver must be
/// listening afterwards.
fn spoken_to(talk: impl Fn(&Destination)) {
    for way in ["tcp:127.0.0.1:0", "tls:127.0.0.1:0", "grpc:127.0.0.1:0", "grpc-ack:127.0.0.1:0"] {
        let mut scenario = Scenario::new();
        scenario.destination.once = false;
        let (pki, at) = (Pki::new(), way.parse().unwrap());
        let tls = !matches!(at, Address::Tcp { .. });
        scenario.destination.policy = tls.then(|| policy(&pki.path("policy.toml")) as _);
        let listener = Listener::bind(&at, tls.then(|| pki.identity("destination"))).unwrap();
        let address = listener.local_address().clone();
        let (said, notices) = std::sync::mpsc::channel();
        let destination = Destination { address, pki, notices };
        let scenario = &scenario;
        std::thread::scope(|scope| {
            let receiving = scope.spawn(move || {
                let mut watch = |notice: &Notice| drop(said.send(notice.clone()));
                let vm = DestinationGuest::default();
                receive(listener, vm, &scenario.destination, &scenario.stop, &mut watch)
            });
            let talked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                talk(&destination);
                // It is listening, and accepts another guest.
                let (line, _) = destination.accepted_as(SessionId([4; 16]));
                drop(line);
            }));
            scenario.stop.stop();
            let error = nothing(receiving.join().unwrap());
            talked.unwrap_or_else(|panic| {
                eprintln!("{way}: receiving ended with {error}");
                std::panic::resume_unwind(panic)
            });
        });
    }
}

impl Destination {
    fn accepted_as(&self, session: SessionId) -> (Line, Token) {
        let mut line = self.announced(&begin(session));
        match line.hear() {
            ControlMessage::Accept { token, .. } => (line, token),
            other => panic!("{other:?}"),
        }
    }
}

fn is_aborted(line: &mut Line, words: &str) {
    loop {
        match line.hear() {
            ControlMessage::Aborted { reason, .. } => {
                assert_eq!(reason.code, ReasonCode::Protocol, "{reason}");
                assert!(reason.text.contains(words), "{reason}");
                return;
            }
            ControlMessage::Placed { .. } | ControlMessage::Verified { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn commit_before_ready_ends_only_its_session() {
    spoken_to(|destination| {
        let (mut line, _) = destination.accepted();
        line.say(&ControlMessage::Commit { session: SESSION });
        is_aborted(&mut line, "COMMIT does not belong in pre-copy");
        drop(line);
        assert!(destination.failed().contains("COMMIT does not belong in pre-copy"));
        assert_eq!(destination.word(), SessionWord::Aborted);
    });
}

#[test]
fn commit_on_a_query_channel_before_ready_ends_only_its_session() {
    spoken_to(|destination| {
        let (mut line, _) = destination.accepted();
        let mut asking =
            Line::dial(&destination.address, Some(&destination.pki.identity("source")));
        assert_eq!(asking.greet(hello(Role::Query, 0, Token([0; 16]))), HelloStatus::Ok);
        asking.say(&ControlMessage::Query { session: SESSION, offer: None });
        assert!(matches!(asking.hear(), ControlMessage::Answer { word: SessionWord::Pending, .. }));
        asking.say(&ControlMessage::Commit { session: SESSION });
        is_aborted(&mut line, "COMMIT does not belong in pre-copy");
        is_aborted(&mut asking, "COMMIT does not belong in pre-copy");
        drop((line, asking));
        destination.failed();
    });
}

fn of_source() -> Vec<ControlMessage> {
    let last = ControlMessage::Final {
        lane_sequences: vec![1],
        digest: 0,
        state: [1; 100].into(),
        paused: false,
        kind: vmferry_wire::SessionKind::PreCopy,
        storage_sample: Vec::new(),
    };
    let free = ControlMessage::Free { slot: SlotId(0), runs: vec![(0, 1)] };
    let (verify, withdraw) = (ControlMessage::Verify {}, ControlMessage::Withdraw {});
    let query = ControlMessage::Query { session: SessionId([9; 16]), offer: None };
    vec![begin(SESSION), last, free, verify, withdraw, query]
}

/// Messages that only a destination sends.
fn of_destination() -> Vec<ControlMessage> {
    let (session, reason) = (SESSION, Reason::new(ReasonCode::Busy, "no"));
    vec![
        ControlMessage::Accept {
            token: Token([1; 16]),
            release: None,
            algorithms: None,
            verifies_placed: false,
            post_copy: None,
            compares_storage: false,
        },
        ControlMessage::Refuse { reason: reason.clone(), release: None },
        ControlMessage::Placed { lane: 0, sequence: 1 },
        ControlMessage::Ready { digest: 0, load_us: 0 },
        ControlMessage::Verified { hash: 0, pages: 0, elapsed_us: 0 },
        ControlMessage::Running { session, start_us: 0 },
        ControlMessage::Aborted { session, reason },
        ControlMessage::Answer { session, word: SessionWord::Owns, token: None },
    ]
}

#[test]
fn messages_before_the_announcement_end_only_their_session() {
    spoken_to(|destination| {
        for message in of_source().into_iter().skip(1).chain(of_destination()) {
            let mut line = destination.announced(&message);
            let ControlMessage::Refuse { reason, .. } = line.hear() else { panic!("taken") };
            assert_eq!(reason.code, ReasonCode::Protocol, "{reason}");
            assert!(reason.text.contains(message.name()), "{reason}");
            drop(line);
            assert!(destination.failed().contains(message.name()));
        }
    });
}

#[test]
fn messages_out_of_phase_in_pre_copy_end_only_their_session() {
    spoken_to(|destination| {
        let allowed = ["FINAL", "WITHDRAW"];
        let mut wrong = of_source();
        wrong.retain(|message| !allowed.contains(&message.name()));
        for (number, message) in (10..).zip(wrong.into_iter().chain(of_destination())) {
            let (mut line, _) = destination.accepted_as(SessionId([number; 16]));
            line.say(&message);
            is_aborted(&mut line, message.name());
            drop(line);
            assert!(destination.failed().contains(message.name()));
        }
    });
}

#[test]
fn second_final_without_a_withdrawal_is_refused() {
    spoken_to(|destination| {
        let (mut line, _) = destination.accepted();
        let last = |content: u8| ControlMessage::Final {
            lane_sequences: vec![9],
            digest: 0,
            state: [content; 8].into(),
            paused: false,
            kind: vmferry_wire::SessionKind::PreCopy,
            storage_sample: Vec::new(),
        };
        line.say(&last(1));
        line.say(&ControlMessage::Withdraw {});
        line.say(&last(2));
        line.say(&last(3));
        is_aborted(&mut line, "FINAL came out of turn");
        drop(line);
        destination.failed();
    });
}

#[test]
fn verify_is_answered_once_and_only_if_announced() {
    spoken_to(|destination| {
        let (mut line, _lane) = destination.ready(true);
        line.say(&ControlMessage::Verify {});
        line.say(&ControlMessage::Verify {});
        is_aborted(&mut line, "VERIFY does not belong in the handover");
        drop(line);
        destination.failed();
    });
    spoken_to(|destination| {
        let (mut line, _lane) = destination.ready(false);
        line.say(&ControlMessage::Verify {});
        is_aborted(&mut line, "VERIFY does not belong in the handover");
        drop(line);
        destination.failed();
    });
}

#[test]
fn repeated_queries_of_a_source_hold_few_channels() {
    spoken_to(|destination| {
        let (line, _) = destination.accepted();
        let identity = destination.pki.identity("source");
        let mut asking: Vec<Line> = (0..12)
            .map(|_| {
                let mut line = Line::dial(&destination.address, Some(&identity));
                assert_eq!(line.greet(hello(Role::Query, 0, Token([0; 16]))), HelloStatus::Ok);
                line.say(&ControlMessage::Query { session: SESSION, offer: None });
                let word = line.hear();
                assert!(matches!(word, ControlMessage::Answer { word: SessionWord::Pending, .. }));
                line
            })
            .collect();
        // All but the newest two are closed; these are still served.
        let newest = asking.split_off(10);
        for mut old in asking {
            old.read_to_end();
        }
        for mut line in newest {
            line.reader.set_timeout(Some(PATIENCE)).unwrap();
            line.say(&ControlMessage::Ping { nonce: 7 });
            assert_eq!(line.hear(), ControlMessage::Pong { nonce: 7 });
        }
        drop(line);
        destination.failed();
    });
}
