//! Any bytes, read as events of a source and a destination: messages are delivered or lost, actions
//! succeed or fail, channels break, time passes, processes die, and a malicious peer sends any
//! message at any time.
//!
//! These rules hold for each side whatever its peer sends. No journal has both RUN-INTENT and
//! ABORTED. Nothing is sent or done before it is journaled. A source that has written COMMIT
//! resumes its guest only on ABORTED or an operator's decision, and never once it has heard that
//! the guest runs at the destination. It releases the guest only if the destination says that it
//! needs nothing of the source, or an operator does. A destination says so only when every page is
//! there.
//!
//! If no message is forged and no operator decides, at most one host runs the guest, no page that
//! the destination lacks is released, and the destination knows which pages it lacks.

mod destination;
mod pages;
mod source;

use std::collections::VecDeque;
use std::time::Duration;

use vmferry::MigrateError;
use vmferry_handover::journal::Record;
use vmferry_handover::{DestinationState, SourceState};
use vmferry_memory::{SlotId, SlotLayout};
use vmferry_wire::{
    CONTROL_HEADER_BYTES, ControlHeader, ControlMessage, GuestIdentity, PROTOCOL_VERSION_MAX,
    SessionId, Token,
};

use self::destination::DestinationHost;
use self::pages::FetchLanes;
use self::source::SourceHost;
use super::control;
use super::input::Input;

/// All zeros, so that a forged message easily belongs to this session.
const SESSION: SessionId = SessionId([0; 16]);
const TOKEN: Token = Token([0; 16]);
/// Longer than any useful conversation.
const MOST_STEPS: usize = 600;

/// The messages in transit between the hosts, on the control channel or on a query channel.
#[derive(Default)]
pub struct Wire {
    /// Whether the source has the channel open, and whether the destination has.
    ends: [bool; 2],
    to_source: VecDeque<ControlMessage>,
    to_destination: VecDeque<ControlMessage>,
    /// Ends of rounds on the data channels.
    rounds: VecDeque<(u8, u64)>,
    fetch: FetchLanes,
}

impl Wire {
    fn cut(&mut self) {
        self.ends = [false; 2];
        self.to_source.clear();
        self.to_destination.clear();
    }
}

/// Both hosts, and their common state.
struct World {
    now: Duration,
    wire: Wire,
    source: SourceHost,
    destination: DestinationHost,
    /// No message was forged, and no operator has decided anything.
    honest: bool,
}

/// Executes the events of the bytes.
pub fn run(data: &[u8]) {
    outcome(data);
}

/// The same. Returns the final state of both sides; the destination's is read from its journal if
/// its process has died.
pub fn outcome(data: &[u8]) -> (SourceState, Option<DestinationState>) {
    let mut input = Input(data);
    let mut world = World::new(&mut input);
    for _ in 0..MOST_STEPS {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
        world.check();
    }
    world.end();
    (world.source.handover(), world.destination.handover())
}

impl World {
    fn new(input: &mut Input<'_>) -> Self {
        let mut wire = Wire { ends: [true; 2], ..Wire::default() };
        let source = SourceHost::new(input, &mut wire);
        let destination = DestinationHost::new();
        Self { now: Duration::ZERO, wire, source, destination, honest: true }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let Self { now, wire, source, destination, honest } = self;
        match input.byte() % 16 {
            0..3 => {
                if let Some(message) = wire.to_destination.pop_front() {
                    destination.hear(*now, message, wire);
                }
            }
            3..6 => {
                if let Some(message) = wire.to_source.pop_front() {
                    source.hear(*now, message, wire);
                }
            }
            6 | 7 => source.finish_a_task(*now, input, wire, destination),
            8 | 9 => destination.finish_a_task(*now, input, wire),
            10 => {
                if let Some((lane, sequence)) = wire.rounds.pop_front() {
                    destination.end_of_round(*now, lane, sequence, wire);
                } else if destination.wants_all() {
                    self.fetch_a_page();
                }
            }
            11 => {
                *now += Duration::from_millis(input.below(1 << 14));
                source.tick(*now, wire);
                destination.tick(*now, wire);
            }
            12 => {
                // Either side may notice it late.
                let noticed = input.byte();
                wire.cut();
                if !noticed.is_multiple_of(3) {
                    source.lose_the_link(*now, wire);
                }
                if noticed % 3 != 1 {
                    destination.lose_the_link(*now, wire);
                }
            }
            13 => {
                // Either side may notice the loss of a fetch lane late, or never.
                let (lane, noticed) = (input.byte() % 8, input.byte());
                wire.rounds.retain(|(other, _)| *other != lane);
                wire.fetch.lose(lane);
                if lane < 2 || !noticed.is_multiple_of(3) {
                    source.lose_a_lane(*now, lane, wire);
                }
                if lane < 2 || noticed % 3 != 1 {
                    destination.lose_a_lane(*now, lane, wire);
                }
            }
            14 => match input.byte() % 8 {
                0 => source.cancel(*now, wire),
                1 => destination.cancel(*now, wire),
                2 => {
                    wire.cut();
                    source.die_and_recover(*now, input, wire);
                }
                3 => {
                    wire.cut();
                    destination.die_and_recover(*now, input, wire);
                }
                // The load of the state touches a page, or the guest does.
                6 => self.fetch_a_page(),
                7 => destination.end_the_guest(*now, wire),
                _ if source.operator_speaks(*now, input, wire) => *honest = false,
                _ => {}
            },
            _ => {
                let number = u16::from(input.byte());
                let length = usize::from(input.byte());
                let body = input.bytes(length);
                let Ok(message) = control::decode(PROTOCOL_VERSION_MAX, number, body) else {
                    return;
                };
                *honest = false;
                if input.byte().is_multiple_of(2) {
                    source.hear(*now, message, wire);
                } else {
                    destination.hear(*now, message, wire);
                }
            }
        }
    }

    /// A missing page is requested, and the answer is placed.
    fn fetch_a_page(&mut self) {
        if self.destination.wants_pages() && self.wire.fetch.are_open() {
            assert!(!self.honest || self.source.serves(), "a page is requested in vain");
            self.destination.place_a_page(self.now, &mut self.wire);
        }
    }

    fn check(&self) {
        if self.honest {
            let both = self.source.guest_runs() && self.destination.has_run();
            assert!(!both, "two hosts run the guest");
            let lost = self.source.has_released() && self.destination.lacks_pages();
            assert!(!lost, "pages that the destination lacks are released");
            let known = self.source.pages.are_known_to(&self.destination.missing);
            assert!(known, "the destination takes an outdated page for a valid one");
        }
    }

    fn end(&mut self) {
        self.source.end();
        self.destination.end();
    }
}

/// A message after encoding and decoding.
fn carried(message: &ControlMessage) -> ControlMessage {
    let mut bytes = Vec::new();
    message.encode(PROTOCOL_VERSION_MAX, &mut bytes);
    let (head, body) = bytes.split_at(CONTROL_HEADER_BYTES);
    let header =
        ControlHeader::parse(head.try_into().unwrap()).expect("a side sends valid messages");
    let read = header.decode(PROTOCOL_VERSION_MAX, body).expect("a side sends valid messages");
    assert_eq!((&read.message, read.ignored.len()), (message, 0));
    read.message
}

fn layout() -> Vec<SlotLayout> {
    vec![SlotLayout { slot: SlotId(0), gpa: 0, pages: 1024 }]
}

fn guest() -> GuestIdentity {
    GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: "web".into() }
}

fn open() -> Record {
    Record::Open {
        guest: guest(),
        peer: String::new(),
        peer_names: Vec::new(),
        at: 0,
        order: 1,
        process: None,
        witness: None,
    }
}

fn failure() -> MigrateError {
    MigrateError::Cancelled { during: "fuzzing" }
}

fn link_lost() -> MigrateError {
    let detail = "cut".into();
    MigrateError::LinkLost { channel: "control".into(), during: "fuzzing", detail }
}
