//! The destination: its disk, and a process that listens and drives the engine's machine.

mod fetch;
mod greeting;
mod lane;
mod lanes;
mod session;

use std::sync::Arc;
use std::time::Duration;

use vmferry::link::{ControlReader, FinalDue, Speaker, channel_name, lost};
use vmferry::machine::destination::io::{Action, Ending, Input, LinkId};
use vmferry::machine::destination::{Destination, Left};
use vmferry::machine::peer::DestinationSide;
use vmferry::{DestinationVm, MigrateError, Timeouts};
use vmferry_handover::journal::{Journal, Record, recover_destination};
use vmferry_handover::{DestinationEffect, DestinationState, Register};
use vmferry_wire::{ControlMessage, SessionId, Token, number as numbers};

use self::session::Session;
use crate::absence::Absence;
use crate::disk::Disk;
use crate::guest::Guest;
use crate::host::Host;
use crate::hostile::forge;
use crate::network::{ChannelId, Event, Network};
use crate::plan::{Plan, Sabotage, Step};
use crate::source_host::brief;
use crate::witness::witness_id;

/// The longest random delay before a thread of the destination reports what it has done, in
/// microseconds: a few times the duration of an idle guest's round.
const LONGEST_SLEEP_US: u64 = 5_000;

/// The destination's host.
pub struct DestinationHost {
    /// The guest.
    pub guest: Guest,
    /// The guest survives when the process dies.
    outlives: bool,
    sabotage: Option<Sabotage>,
    disk: Disk,
    session_number: SessionId,
    /// Whether the process listens.
    listens: bool,
    session: Option<Session>,
    /// Query channels on which no question has arrived or whose answer is on its way.
    queries: Vec<ChannelId>,
    /// The number of processes and sessions so far.
    number: u64,
    timeouts: Timeouts,
    /// When this side was READY for the first time.
    pub ready_at: Option<Duration>,
    /// When it last received that the guest runs on at the source.
    pub withdrawn_at: Duration,
    /// How often a restarted process took over a guest that lacked pages.
    pub taken_over: u64,
    /// Slow steps of its process.
    pub absence: Absence<Input>,
}

impl DestinationHost {
    /// A host whose process has just greeted a control channel.
    pub fn new(
        guest: Guest,
        disk: Disk,
        session_number: SessionId,
        timeouts: Timeouts,
        control: ChannelId,
        plan: &Plan,
        network: &mut Network,
    ) -> Self {
        let token = Token(network.rng.u128(..).to_le_bytes());
        let (protocol, witness) = (network.protocol, network.witness.is_some().then(witness_id));
        let our_side = DestinationSide { protocol, witness, ..DestinationSide::default() };
        let machine = Destination::new(timeouts, token, our_side, network.now());
        let what = (plan.post_copy, plan.sabotage);
        let session = Session::new(machine, guest.attach(), token, Some(control), what);
        Self {
            guest,
            outlives: plan.outlives,
            sabotage: plan.sabotage,
            disk,
            session_number,
            listens: true,
            session: Some(session),
            queries: Vec::new(),
            number: 0,
            timeouts,
            ready_at: None,
            taken_over: 0,
            withdrawn_at: Duration::ZERO,
            absence: Absence::new(Host::Destination, plan.sabotage),
        }
    }

    /// Whether a process listens.
    pub fn listens(&self) -> bool {
        self.listens
    }

    /// Whether a session is in progress.
    pub fn is_busy(&self) -> bool {
        self.session.is_some()
    }

    /// When the machine next needs a tick.
    pub fn next_tick(&self) -> Option<Duration> {
        if self.absence.is_away() {
            return None;
        }
        self.session.as_ref().and_then(|session| session.machine.next_tick())
    }

    /// The phase of the migration.
    pub fn phase(&self) -> &'static str {
        self.session.as_ref().map_or("nothing", |session| session.machine.phase_name())
    }

    /// The answer from this host's journal, as a process that starts now would read it.
    pub fn recovered(&self) -> Option<DestinationState> {
        recover_destination(&self.disk.records(self.session_number)).map(|(state, _)| state)
    }

    /// The process dies, and with it the guest, unless the guest outlives it.
    pub fn crash(&mut self, network: &mut Network) {
        self.listens = false;
        self.number += 1;
        self.guest.detach(!self.outlives);
        self.absence.forget();
        if let Some(session) = self.session.take() {
            session.close(network);
        }
        for query in std::mem::take(&mut self.queries) {
            network.close(query, Host::Destination);
        }
    }

    /// A process is started again.
    pub fn restart(&mut self, network: &mut Network) {
        let records = self.disk.records(self.session_number);
        network.note(|| format!("destination: restarts with {records:?}"));
        self.listens = true;
        if self.guest.is_gone() && self.recovered().is_some_and(DestinationState::is_fetching) {
            self.note_crash(network);
            return;
        }
        if !self.outlives || self.sabotage == Some(Sabotage::LeaveUnfinished) {
            return;
        }
        // A guest that outlived the previous process is either run, or closed and discarded.
        if self.recovered_word(self.session_number, network).is_none() {
            if self.listens {
                // The process ends with an error and is started again.
                self.crash(network);
                network.after(Duration::from_secs(3), Event::Restart(Host::Destination));
            }
            return;
        }
        if self.recovered().is_some_and(DestinationState::is_fetching) {
            return self.take_over(network);
        }
        let recovered = recover_destination(&self.disk.records(self.session_number));
        let mut vm = self.guest.attach();
        for effect in recovered.map_or(&[][..], |(_, effects)| effects) {
            network.note(|| format!("destination: finishes with {effect:?}"));
            match effect {
                // A guest that can't be run has crashed.
                DestinationEffect::Run if self.guest.waits() => drop(vm.run()),
                DestinationEffect::Discard => vm.discard(),
                _ => {}
            }
        }
    }

    /// Writes that the guest has crashed while it lacked pages. If that fails, the process is
    /// started again.
    fn note_crash(&mut self, network: &mut Network) {
        let noted = match self.disk.reopen(self.session_number) {
            Ok(Some((mut journal, _))) => journal.append(&Record::Ended).is_ok(),
            other => panic!("the journal was there: {:?}", other.map(|_| ())),
        };
        if !noted || self.disk.takes_the_process_along() {
            self.crash(network);
            network.after(Duration::from_secs(3), Event::Restart(Host::Destination));
        }
    }

    /// The guest's VMM, a process of its own, ends while the guest lacks pages. Returns whether it
    /// does.
    pub fn guest_crashes(&mut self, network: &mut Network) -> bool {
        if !self.outlives || !self.guest.is_fetching() {
            return false;
        }
        network.note(|| "destination: the guest crashes".into());
        self.guest.crash();
        self.tell(Input::GuestEnded { in_order: false }, network);
        true
    }

    /// Fetches the missing pages of a guest that the previous process has left.
    fn take_over(&mut self, network: &mut Network) {
        let (journal, records) = match self.disk.reopen(self.session_number) {
            Ok(Some(found)) => found,
            other => panic!("the journal was there: {:?}", other.map(|_| ())),
        };
        let vm = self.guest.attach();
        let missing_pages = self.guest.adopt(self.sabotage == Some(Sabotage::ForgetMissing));
        self.taken_over += 1;
        let left = Left { session: self.session_number, missing_pages, paused: false };
        let our_side = DestinationSide { protocol: network.protocol, ..DestinationSide::default() };
        let now = network.now();
        let Some(machine) = Destination::recovered(self.timeouts, our_side, left, &records, now)
        else {
            panic!("the journal says that pages are missing");
        };
        self.session = Some(Session::of_left(machine, vm, journal, self.sabotage));
        self.pump(network);
    }

    /// Whether the guest has crashed while it lacked pages. Its source keeps the memory until an
    /// operator gives the guest up.
    pub fn lost_the_guest(&self) -> bool {
        let crashed =
            |state: DestinationState| state.is_fetching() || state == DestinationState::Ended;
        self.guest.is_gone() && self.session.is_none() && self.recovered().is_some_and(crashed)
    }

    /// Passes an input to the session's machine.
    pub fn input(&mut self, number: u64, input: Input, network: &mut Network) {
        if number == self.number
            && let Some(session) = &mut self.session
        {
            let input = match input {
                Input::Claimed(Err(_)) if self.sabotage == Some(Sabotage::RunUnclaimed) => {
                    Input::Claimed(Ok(Register::Claimed))
                }
                input => input,
            };
            session.machine.handle(network.now(), input);
            self.pump(network);
        }
    }

    /// Ends a slow step. Returns the events that arrived meanwhile.
    pub fn step_ended(&mut self, process: u64, network: &mut Network) -> Vec<Event> {
        let Some(back) = self.absence.end(process, network.now()) else { return Vec::new() };
        if let Some(session) = &mut self.session {
            session.machine.handle(network.now(), Input::Away { took: back.took });
            if let Some(result) = back.result {
                session.machine.handle(network.now(), result);
            }
        }
        self.pump(network);
        back.heard
    }

    /// The session's other thread checks whether to send a keepalive.
    pub fn sign_of_life(&self, process: u64, network: &mut Network) {
        if self.absence.says_that_it_lives(process, network)
            && let Some(session) = &self.session
            && let Some(control) = session.links.get(&LinkId::CONTROL)
        {
            network.say(*control, Host::Source, &ControlMessage::Ping { nonce: 0 });
        }
    }

    /// Passes the time or a user's request to the machine.
    pub fn tell(&mut self, input: Input, network: &mut Network) {
        if self.absence.is_away() && matches!(input, Input::Tick) {
            return;
        }
        self.input(self.number, input, network);
    }

    /// Bytes have arrived.
    pub fn deliver(&mut self, channel: ChannelId, bytes: &[u8], network: &mut Network) {
        if let Some(session) = &mut self.session {
            if let Some(lane) = session.lane_of(channel) {
                match session.place(lane, bytes, &self.guest, network) {
                    // The thread that has placed the last frame of a round may sleep before it
                    // reports that, while others continue.
                    Some(ended @ Input::LaneEnded { .. }) if network.rng.bool() => {
                        let sleeps = Duration::from_micros(network.rng.u64(..LONGEST_SLEEP_US));
                        network.after(sleeps, Event::Destination(self.number, ended));
                    }
                    Some(input) => self.tell(input, network),
                    None => {}
                }
                return;
            }
            if let Some(lane) = session.fetch_lane_of(channel) {
                if let Some(input) = session.heard_on_fetch_lane(lane, bytes, network) {
                    self.tell(input, network);
                }
                return;
            }
            let link = session.links.iter().find(|(_, at)| **at == channel).map(|(link, _)| *link);
            if let Some(link) = link {
                return self.heard(link, bytes, network);
            }
        }
        if let Some(at) = self.queries.iter().position(|query| *query == channel) {
            self.queries.swap_remove(at);
            return self.asked(channel, bytes, network);
        }
        self.greet(channel, bytes, network);
    }

    /// Delivers a message that the source may not send now.
    pub fn forged(&mut self, number: u16, network: &mut Network) {
        let Some(session) = &self.session else { return };
        let Some(channel) = session.links.get(&LinkId::CONTROL).copied() else { return };
        if number == numbers::COMMIT && session.machine.handover() == DestinationState::Ready {
            return;
        }
        network.note(|| format!("destination: hears a forged message {number}"));
        let mut bytes = Vec::new();
        forge(number, self.session_number).encode(network.protocol, &mut bytes);
        self.deliver(channel, &bytes, network);
    }

    fn heard(&mut self, link: LinkId, bytes: &[u8], network: &mut Network) {
        let Some(session) = &mut self.session else { return };
        let speaker = match link {
            LinkId::CONTROL => {
                Speaker::Source(FinalDue::of(&Arc::new(session.machine.wants_final().into())))
            }
            _ => Speaker::InDoubt,
        };
        let input = match ControlReader::new(bytes, network.protocol, speaker)
            .receive("waiting for the source")
        {
            Ok(message) => {
                match &message {
                    ControlMessage::Withdraw {} => self.withdrawn_at = network.now(),
                    ControlMessage::Final { .. } => session.heard_final = Some(message.clone()),
                    _ => {}
                }
                Input::Control { link, message }
            }
            // A query channel that ends or sends garbage needs no further answer.
            Err(_) if link != LinkId::CONTROL => return,
            Err(error @ MigrateError::Protocol { .. }) => Input::Failed(error),
            Err(error) => return self.control_lost(error, network),
        };
        self.tell(input, network);
    }

    fn control_lost(&mut self, error: MigrateError, network: &mut Network) {
        let Some(session) = &mut self.session else { return };
        if session.machine.may_resume()
            && let Some(control) = session.links.get(&LinkId::CONTROL)
        {
            // If only one direction is cut, the source must notice the end too.
            network.close(*control, Host::Destination);
        }
        self.tell(Input::LinkLost(error), network);
    }

    /// A channel has ended.
    pub fn closed(&mut self, channel: ChannelId, network: &mut Network) {
        self.queries.retain(|query| *query != channel);
        let Some(session) = &mut self.session else { return };
        let end = |name: &str| {
            lost(name, "waiting for the source", &std::io::ErrorKind::UnexpectedEof.into())
        };
        if let Some(lane) = session.lane_of(channel) {
            let error = end(&channel_name(Some(lane)));
            if let Some(input) = session.lane_lost(lane, error, network) {
                self.tell(input, network);
            }
        } else if let Some(lane) = session.fetch_lane_of(channel) {
            if let Some(input) = session.fetch_lane_lost(lane, network) {
                self.tell(input, network);
            }
        } else if session.links.get(&LinkId::CONTROL) == Some(&channel) {
            self.control_lost(end("control"), network);
        } else {
            session.links.retain(|_, at| *at != channel);
        }
    }

    /// Requests the pages that the guest has touched.
    pub fn request_faults(&mut self, network: &mut Network) {
        if let Some(session) = self.session.as_mut().filter(|_| !self.absence.is_away()) {
            session.request_faults(network);
        }
    }

    /// Carries out the machine's actions up to the session's end.
    pub fn pump(&mut self, network: &mut Network) {
        loop {
            if self.absence.is_away() {
                return;
            }
            let Some(session) = &mut self.session else { return };
            let Some(action) = session.machine.next_action() else { break };
            if matches!(&action, Action::Send { message: ControlMessage::Ready { .. }, .. }) {
                self.ready_at.get_or_insert(network.now());
            }
            network.note(|| format!("destination: {}", brief(&format!("{action:?}"))));
            let step = step_of(&action);
            let input = session.execute(action, self.number, &self.disk, network);
            let input = self.absence.after(step, self.number, input, network);
            if self.disk.takes_the_process_along() {
                network.note(|| "destination: dies with its write".into());
                self.crash(network);
                network.after(Duration::from_secs(3), Event::Restart(Host::Destination));
                return;
            }
            if let (Some(input), Some(session)) = (input, &mut self.session) {
                session.machine.handle(network.now(), input);
            }
        }
        let Some(session) = &mut self.session else { return };
        if let Some(ending) = session.machine.ending() {
            network.note(|| format!("destination: ended {ending:?}"));
            let stuck = matches!(ending, Ending::Stuck(_));
            if let Some(session) = self.session.take() {
                session.close(network);
            }
            self.number += 1;
            if stuck {
                // `receive` ends then, and its operator starts it again.
                self.crash(network);
                network.after(self.timeouts.commit, Event::Restart(Host::Destination));
            }
        }
    }
}

/// The step that an action is, if it may take long.
fn step_of(action: &Action) -> Option<Step> {
    match action {
        Action::Prepare { .. } => Some(Step::Prepare),
        Action::Open(_) => Some(Step::Open),
        Action::FetchMissing { .. } => Some(Step::FetchMissing),
        Action::Load { .. } => Some(Step::Load),
        Action::WriteIntent(_) => Some(Step::WriteIntent),
        Action::Run => Some(Step::Run),
        Action::WriteFetched | Action::WriteEnded => Some(Step::WriteFetched),
        _ => None,
    }
}
