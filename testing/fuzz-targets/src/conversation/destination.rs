//! The destination: its machine, its journal, and the actions it carries out for the machine.

use std::time::Duration;

use vmferry::Timeouts;
use vmferry::machine::destination::io::{Action, Ending, Input as What, LinkId, Loaded, Prepared};
use vmferry::machine::destination::{Destination, Left};
use vmferry::machine::peer::DestinationSide;
use vmferry_faults::FaultError;
use vmferry_handover::journal::{Record, recover_destination};
use vmferry_handover::{DestinationState, SessionKind};
use vmferry_memory::{SlotId, WholeHash};
use vmferry_wire::{ControlMessage, LaneToken, LateStreamsId, SessionWord, Token};

use super::pages::MissingPages;
use super::{SESSION, TOKEN, Wire, carried, failure, link_lost, open};
use crate::input::Input;

/// An action whose result is pending.
enum Task {
    Prepare,
    Open,
    Sum,
    Load,
    Hash,
    Intent(SessionKind),
    Aborted(String),
    Start,
    Fetched,
    Ended,
    /// No page was missing in the first place.
    NothingMissing,
}

pub struct DestinationHost {
    /// `None` once its process has died: another process answers from the journal.
    machine: Option<Destination>,
    journal: Vec<Record>,
    tasks: Vec<Task>,
    placed: [u64; 2],
    /// The guest has run here.
    ran: bool,
    /// This process has taken over a guest that may have run.
    is_recovered: bool,
    loaded: bool,
    /// It compares a sample of the guest's storage.
    compares_storage: bool,
    pub missing: MissingPages,
    /// What fetch lanes must present.
    token: Token,
}

impl DestinationHost {
    pub fn new() -> Self {
        Self {
            machine: Some(Destination::new(
                Timeouts::default(),
                TOKEN,
                DestinationSide::default(),
                Duration::ZERO,
            )),
            journal: Vec::new(),
            tasks: Vec::new(),
            placed: [0; 2],
            ran: false,
            is_recovered: false,
            loaded: false,
            compares_storage: false,
            missing: MissingPages::default(),
            token: TOKEN,
        }
    }

    pub fn has_run(&self) -> bool {
        self.ran
    }

    pub fn handover(&self) -> Option<DestinationState> {
        match &self.machine {
            Some(machine) => Some(machine.handover()),
            None => recover_destination(&self.journal).map(|(state, _)| state),
        }
    }

    /// Whether this side answers queries.
    pub fn is_there(&self) -> bool {
        self.machine.is_none() || !self.journal.is_empty()
    }

    pub fn placed(&self, lane: u8) -> u64 {
        self.placed[usize::from(lane)]
    }

    fn has(&self, wanted: fn(&Record) -> bool) -> bool {
        self.journal.iter().any(wanted)
    }

    fn handle(&mut self, now: Duration, what: What, wire: &mut Wire) {
        let Some(machine) = &mut self.machine else { return };
        machine.handle(now, what);
        self.act(wire);
    }

    fn act(&mut self, wire: &mut Wire) {
        let mut budget = 1000;
        while let Some(action) = self.machine.as_mut().and_then(Destination::next_action) {
            budget -= 1;
            assert!(budget > 0, "the destination never stops acting");
            self.do_it(action, wire);
        }
    }

    pub fn hear(&mut self, now: Duration, message: ControlMessage, wire: &mut Wire) {
        if self.machine.is_none() {
            if matches!(message, ControlMessage::Query { session: SESSION, .. }) {
                let word = self.word_of_the_journal();
                self.say(&ControlMessage::Answer { session: SESSION, word, token: None }, wire);
            }
            return;
        }
        self.handle(now, What::Control { link: LinkId::CONTROL, message }, wire);
    }

    pub fn tick(&mut self, now: Duration, wire: &mut Wire) {
        self.handle(now, What::Tick, wire);
    }

    pub fn cancel(&mut self, now: Duration, wire: &mut Wire) {
        self.handle(now, What::Cancel, wire);
    }

    pub fn lose_the_link(&mut self, now: Duration, wire: &mut Wire) {
        self.handle(now, What::LinkLost(link_lost()), wire);
    }

    pub fn lose_a_lane(&mut self, now: Duration, lane: u8, wire: &mut Wire) {
        self.handle(now, What::LaneLost { lane, attempt: 0, error: link_lost() }, wire);
    }

    /// Lets the source resume its session, if it may.
    pub fn resume(&mut self, now: Duration, wire: &mut Wire) -> bool {
        let may = self.machine.as_ref().is_some_and(Destination::may_resume);
        if may {
            self.handle(now, What::Resumed, wire);
        }
        may
    }

    pub fn rejoin(&mut self, now: Duration, lane: u8, wire: &mut Wire) {
        self.handle(now, What::LaneJoined { lane }, wire);
    }

    pub fn end_of_round(&mut self, now: Duration, lane: u8, sequence: u64, wire: &mut Wire) {
        self.placed[usize::from(lane)] = sequence;
        self.say(&ControlMessage::Placed { lane, sequence }, wire);
        self.handle(now, What::LaneEnded { lane, sequence }, wire);
    }

    /// Accepts a fetch lane's channel with the right token, unless a later one is there.
    pub fn join_fetch_lane(
        &mut self,
        now: Duration,
        lane: u8,
        (token, attempt): (Token, u64),
        wire: &mut Wire,
    ) -> bool {
        let accepts = self.machine.is_some() && token == self.token;
        let joins = accepts && wire.fetch.join(lane, attempt);
        if joins {
            self.handle(now, What::LaneJoined { lane }, wire);
        }
        joins
    }

    /// Whether the guest may run here and lacks pages.
    pub fn lacks_pages(&self) -> bool {
        self.has(|record| *record == Record::RunIntentPostCopy) && self.missing.are_left()
    }

    /// Whether a process would request a page if a fetch lane were open.
    pub fn wants_pages(&self) -> bool {
        self.machine.is_some() && self.missing.are_fetched() && self.missing.are_left()
    }

    /// Whether all missing pages are requested, because the guest runs.
    pub fn wants_all(&self) -> bool {
        self.ran && self.wants_pages()
    }

    /// A page that was requested is placed.
    pub fn place_a_page(&mut self, now: Duration, wire: &mut Wire) {
        if self.missing.place_one() {
            self.handle(now, What::Fetched, wire);
        }
    }

    /// The VMM of a guest that has run ends.
    pub fn end_the_guest(&mut self, now: Duration, wire: &mut Wire) {
        if self.ran && self.missing.are_fetched() {
            self.missing.end_the_guest();
            let gone = FaultError::ProcessGone { at: 0 };
            self.handle(now, What::Failed(gone.into()), wire);
        }
    }

    /// The process dies. The next one reads the journal and closes open sessions. A guest that
    /// outlives it continues to fetch its pages.
    pub fn die_and_recover(&mut self, now: Duration, input: &mut Input<'_>, wire: &mut Wire) {
        for task in std::mem::take(&mut self.tasks) {
            let record = match task {
                Task::Open => open(),
                Task::Intent(kind) => Record::run_intent(kind),
                Task::Fetched => Record::Fetched,
                Task::Ended => Record::Ended,
                Task::Aborted(reason) => Record::Aborted { reason },
                _ => continue,
            };
            if input.byte().is_multiple_of(2) {
                self.journal.push(record);
            }
        }
        self.machine = None;
        self.check_the_journal();
        wire.fetch.close();
        let fetches = self.handover().is_some_and(DestinationState::is_fetching);
        if fetches && self.missing.has_guest() && input.byte().is_multiple_of(2) {
            let missing_pages = self.missing.count();
            let left = Left { session: SESSION, missing_pages, paused: false };
            let (timeouts, side) = (Timeouts::default(), DestinationSide::default());
            self.machine = Destination::recovered(timeouts, side, left, &self.journal, now);
            assert!(self.machine.is_some(), "nobody fetches the missing pages");
            // The source learns the next token from an answer.
            self.token = Token([0xff; 16]);
            self.is_recovered = true;
            self.act(wire);
        }
    }

    fn word_of_the_journal(&mut self) -> SessionWord {
        match recover_destination(&self.journal) {
            None => SessionWord::Unknown,
            Some((DestinationState::AbortWriting, _)) => {
                self.journal.push(Record::Aborted { reason: "restarted".into() });
                self.check_the_journal();
                SessionWord::Aborted
            }
            Some((state, _)) => state.word(),
        }
    }

    fn check_the_journal(&self) {
        let intent = self.has(is_intent);
        let aborted = self.has(|record| matches!(record, Record::Aborted { .. }));
        assert!(!(intent && aborted), "both outcomes are in the journal");
    }

    /// Ends one of the pending actions with success or failure.
    pub fn finish_a_task(&mut self, now: Duration, input: &mut Input<'_>, wire: &mut Wire) {
        if self.tasks.is_empty() {
            return;
        }
        let task = self.tasks.remove(usize::from(input.byte()) % self.tasks.len());
        let outcome = input.byte();
        let well = outcome < 0xe0;
        let result = || if well { Ok(()) } else { Err(failure()) };
        // A failed write may be on disk.
        let on_disk = well || outcome.is_multiple_of(2);
        let what = match task {
            Task::Prepare => {
                let fetches = outcome.is_multiple_of(2);
                let post_copy = fetches.then_some(()).ok_or_else(|| "it can't".to_owned());
                self.compares_storage = outcome & 2 != 0;
                let compares_storage = self.compares_storage;
                What::Prepared(result().map(|()| Prepared { post_copy, compares_storage }))
            }
            Task::Open => {
                if on_disk {
                    self.journal.push(open());
                }
                What::Opened(result())
            }
            Task::Sum => What::Digest(if well { 7 } else { 8 }),
            Task::Load => {
                self.loaded = well;
                What::Loaded(result().map(|()| Loaded::default()))
            }
            Task::Hash => {
                What::Hashed(WholeHash { hash: if well { 7 } else { 8 }, pages: 1 }, Duration::ZERO)
            }
            Task::Intent(kind) => {
                if on_disk {
                    self.journal.push(Record::run_intent(kind));
                }
                What::IntentWritten(result())
            }
            Task::Aborted(reason) => {
                if on_disk {
                    self.journal.push(Record::Aborted { reason });
                }
                What::AbortWritten(result())
            }
            Task::Fetched => {
                if on_disk {
                    self.journal.push(Record::Fetched);
                }
                What::FetchedWritten(result())
            }
            Task::Ended => {
                if on_disk {
                    self.journal.push(Record::Ended);
                }
                What::EndedWritten(result())
            }
            Task::NothingMissing => What::Fetched,
            Task::Start => What::Started(result()),
        };
        self.check_the_journal();
        self.handle(now, what, wire);
    }

    fn say(&mut self, message: &ControlMessage, wire: &mut Wire) {
        let intent = self.has(is_intent);
        let aborted = self.has(|record| matches!(record, Record::Aborted { .. }));
        let post_copy = self.has(|record| *record == Record::RunIntentPostCopy);
        match message {
            ControlMessage::Running { .. }
            | ControlMessage::Answer { word: SessionWord::Owns, .. } => {
                assert!(intent && !aborted, "{} before it is written", message.name());
                let needs_nothing = !post_copy || self.has(|record| *record == Record::Fetched);
                assert!(needs_nothing, "{} before FETCHED is written", message.name());
            }
            ControlMessage::Answer { word: SessionWord::Ended, .. } => {
                let ended = self.has(|record| *record == Record::Ended);
                assert!(post_copy && ended && !aborted, "ENDED before it is written");
            }
            ControlMessage::Answer { word: SessionWord::Fetching, .. } => {
                assert!(post_copy && !aborted, "FETCHING before RUN-INTENT is written");
            }
            ControlMessage::Aborted { .. }
            | ControlMessage::Answer { word: SessionWord::Aborted, .. } => {
                assert!(aborted && !intent, "{} before it is written", message.name());
            }
            ControlMessage::Ready { .. } => {
                assert!(self.loaded, "READY before the state is loaded")
            }
            _ => {}
        }
        if wire.ends[1] {
            wire.to_source.push_back(carried(message));
        }
    }

    fn do_it(&mut self, action: Action, wire: &mut Wire) {
        match action {
            Action::Send { message, .. } | Action::Broadcast(message) => self.say(&message, wire),
            Action::Prepare { .. } => self.tasks.push(Task::Prepare),
            Action::Open(_) => self.tasks.push(Task::Open),
            Action::SumDigest => self.tasks.push(Task::Sum),
            Action::Load { storage_sample, .. } => {
                assert!(self.compares_storage || storage_sample.is_empty(), "nobody asked for it");
                self.tasks.push(Task::Load);
            }
            Action::Hash { .. } => self.tasks.push(Task::Hash),
            Action::Claim => unreachable!("no conversation has a witness"),
            Action::WriteIntent(kind) => {
                assert!(self.loaded, "RUN-INTENT for a guest that is not complete");
                let fetches = kind == SessionKind::PostCopy;
                assert_eq!(fetches, self.missing.are_fetched(), "RUN-INTENT of another kind");
                self.tasks.push(Task::Intent(kind));
            }
            Action::WriteAborted { reason } => self.tasks.push(Task::Aborted(reason)),
            Action::Run => {
                assert!(self.has(is_intent), "it runs before RUN-INTENT is written");
                assert!(!self.ran || self.is_recovered, "it runs twice");
                self.ran = true;
                self.tasks.push(Task::Start);
            }
            Action::Discard => assert!(!self.ran, "a running guest is discarded"),
            Action::FetchMissing { missing } => {
                assert!(!self.loaded, "the state is loaded before missing pages are fetched");
                let pages = (0..8).filter(|page| missing.bitmap(SlotId(0)).is_set(*page));
                self.missing.begin(pages.fold(0, |bits, page| bits | 1 << page));
            }
            Action::FetchAll => {
                assert!(self.ran, "all pages are fetched for a guest that may never run");
                if self.missing.count() == 0 {
                    self.tasks.push(Task::NothingMissing);
                }
            }
            Action::UseOffer { .. } => {
                wire.fetch.close();
                self.token.0[0] = self.token.0[0].wrapping_add(1);
                // As if its VMM had begun its streams again.
                let streams = Some(LateStreamsId(u64::from(self.token.0[0] / 2)));
                let token = Some(LaneToken { token: self.token, streams });
                let word = SessionWord::Fetching;
                self.say(&ControlMessage::Answer { session: SESSION, word, token }, wire);
            }
            Action::WriteFetched => {
                assert!(!self.missing.are_left(), "FETCHED while pages are missing");
                self.tasks.push(Task::Fetched);
            }
            Action::WriteEnded => {
                assert!(!self.missing.has_guest(), "ENDED of a guest that lives");
                self.tasks.push(Task::Ended);
            }
            Action::FreeOutdated { .. } | Action::ExpectLanes { .. } | Action::Report(_) => {}
        }
    }

    pub fn end(&mut self) {
        let Some(machine) = &mut self.machine else { return };
        let handover = machine.handover();
        assert_eq!(machine.next_action().map(|_| ()), None);
        match machine.ending() {
            Some(Ending::Owns(_)) => {
                let owned = [DestinationState::Owns, DestinationState::Ended];
                assert!(self.ran && owned.contains(&handover));
            }
            Some(Ending::Aborted(_)) => {
                assert!(!self.ran && handover == DestinationState::Aborted);
            }
            Some(Ending::Stuck(_)) => assert!(!self.ran && handover == DestinationState::Stuck),
            Some(Ending::Refused(_)) => assert!(!self.ran && self.journal.len() <= 1),
            None => {}
        }
    }
}

fn is_intent(record: &Record) -> bool {
    matches!(record, Record::RunIntent | Record::RunIntentPostCopy)
}
