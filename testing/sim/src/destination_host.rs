//! The destination: its disk, and a process that listens and drives the engine's machine.

mod lane;
mod lanes;
mod session;

use std::sync::Arc;
use std::time::Duration;

use vmferry::link::{ControlReader, FinalDue, Speaker, channel_name, lost};
use vmferry::machine::destination::Destination;
use vmferry::machine::destination::io::{Action, Ending, Input, LinkId};
use vmferry::machine::peer::DestinationSide;
use vmferry::{DestinationVm, MigrateError, Timeouts};
use vmferry_handover::journal::{Journal, Record, recover_destination};
use vmferry_handover::{DestinationEffect, DestinationState};
use vmferry_wire::{
    ControlMessage, HELLO_BYTES, Hello, HelloReply, HelloStatus, PROTOCOL_VERSION_MIN, Role,
    SessionId, SessionWord, Token, common_version, number as numbers,
};

use self::session::Session;
use crate::absence::Absence;
use crate::disk::Disk;
use crate::guest::Guest;
use crate::hostile::forge;
use crate::network::{ChannelId, Event, Network};
use crate::plan::{Host, Plan, Sabotage, Step};
use crate::source_host::brief;

/// For how long a thread of the destination may be kept from saying what it has done, in microseconds: a few times
/// what a round of an idle guest takes.
const LONGEST_SLEEP_US: u64 = 5_000;

/// The destination's host.
pub struct DestinationHost {
    /// The guest.
    pub guest: Guest,
    /// The guest lives on when the process dies.
    outlives: bool,
    sabotage: Option<Sabotage>,
    disk: Disk,
    session_number: SessionId,
    /// The process listens.
    listens: bool,
    session: Option<Session>,
    /// Query channels on which nothing was asked yet, or whose answer is on its way.
    queries: Vec<ChannelId>,
    /// Counts the processes and sessions.
    number: u64,
    timeouts: Timeouts,
    /// When this side first had READY to say.
    pub ready_at: Option<Duration>,
    /// When it last heard that the guest runs on at the source.
    pub withdrawn_at: Duration,
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
        let our_side = DestinationSide { protocol: network.protocol, ..DestinationSide::default() };
        let machine = Destination::new(timeouts, token, our_side, network.now());
        let session = Session::new(machine, guest.attach(), token, control, plan.sabotage);
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
            withdrawn_at: Duration::ZERO,
            absence: Absence::new(Host::Destination, plan.sabotage),
        }
    }

    /// Whether a process listens.
    pub fn listens(&self) -> bool {
        self.listens
    }

    /// Whether a session is not done.
    pub fn is_busy(&self) -> bool {
        self.session.is_some()
    }

    /// When the machine wants to be told the time.
    pub fn next_tick(&self) -> Option<Duration> {
        if self.absence.is_away() {
            return None;
        }
        self.session.as_ref().and_then(|session| session.machine.next_tick())
    }

    /// What the migration is doing.
    pub fn phase(&self) -> &'static str {
        self.session.as_ref().map_or("nothing", |session| session.machine.phase_name())
    }

    /// The word of this host's journal, as a process that starts now would read it.
    pub fn recovered(&self) -> Option<DestinationState> {
        recover_destination(&self.disk.records(self.session_number)).map(|(state, _)| state)
    }

    /// The process dies, and with it the guest, unless that outlives it.
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
        if !self.outlives || self.sabotage == Some(Sabotage::LeaveUnfinished) {
            return;
        }
        // What outlived the process before is finished: run, or closed and thrown away.
        if self.recovered_word(self.session_number, network).is_none() {
            if self.listens {
                // It ends with an error, and is started again.
                self.crash(network);
                network.after(Duration::from_secs(3), Event::Restart(Host::Destination));
            }
            return;
        }
        let recovered = recover_destination(&self.disk.records(self.session_number));
        let mut vm = self.guest.attach();
        for effect in recovered.map_or(&[][..], |(_, effects)| effects) {
            network.note(|| format!("destination: finishes with {effect:?}"));
            match effect {
                // One that can't be run has crashed.
                DestinationEffect::Run if self.guest.waits() => drop(vm.run()),
                DestinationEffect::Discard => vm.discard(),
                _ => {}
            }
        }
    }

    /// Something happened.
    pub fn input(&mut self, number: u64, input: Input, network: &mut Network) {
        if number == self.number
            && let Some(session) = &mut self.session
        {
            session.machine.handle(network.now(), input);
            self.pump(network);
        }
    }

    /// A slow step is over. Returns what has happened meanwhile.
    pub fn step_ended(&mut self, process: u64, network: &mut Network) -> Vec<Event> {
        let Some(back) = self.absence.end(process, network.now()) else { return Vec::new() };
        if let (Some(result), Some(session)) = (back.result, &mut self.session) {
            session.machine.handle(network.now(), result);
        }
        self.pump(network);
        back.heard
    }

    /// The session's other thread looks whether to give a sign of life.
    pub fn sign_of_life(&self, process: u64, network: &mut Network) {
        if self.absence.says_that_it_lives(process, network)
            && let Some(session) = &self.session
            && let Some(control) = session.links.get(&LinkId::CONTROL)
        {
            send(network, *control, &ControlMessage::Ping { nonce: 0 });
        }
    }

    /// Time has passed, or the user wants something.
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
                    // Whoever has placed the last frame of a round may sleep before saying so, and others go on.
                    Some(ended @ Input::LaneEnded { .. }) if network.rng.bool() => {
                        let sleeps = Duration::from_micros(network.rng.u64(..LONGEST_SLEEP_US));
                        network.after(sleeps, Event::Destination(self.number, ended));
                    }
                    Some(input) => self.tell(input, network),
                    None => {}
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

    /// The source says what it may not say now.
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
            // A query channel that ends, or speaks nonsense, has been answered.
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
            // Where only one direction is cut, the source is to hear of it too.
            network.close(*control, Host::Destination);
        }
        self.tell(Input::LinkLost(error), network);
    }

    /// A channel that is new says what it is for.
    fn greet(&mut self, channel: ChannelId, bytes: &[u8], network: &mut Network) {
        let hello = <&[u8; HELLO_BYTES]>::try_from(bytes).ok().and_then(|b| Hello::parse(b).ok());
        let Some(hello) = hello else { return network.close(channel, Host::Destination) };
        let (version_min, version_max) = (PROTOCOL_VERSION_MIN, network.protocol);
        let common = common_version(&(version_min..=version_max), &hello.versions());
        // A greeting that was damaged on its way may say anything.
        let Some(version) = common.filter(|version| *version == network.protocol) else {
            return network.close(channel, Host::Destination);
        };
        let answer = match (hello.role, &mut self.session) {
            (Role::Query, _) => {
                self.queries.push(channel);
                Ok(0)
            }
            (Role::Data, Some(session)) => session.join(channel, &hello, network),
            (Role::Resume, Some(session)) => match session.resume(channel, &hello, network) {
                HelloStatus::Ok => Ok(0),
                status => Err(status),
            },
            (Role::Data | Role::Resume, None) => Err(HelloStatus::BadToken),
            (Role::Control, Some(session)) if session.machine.is_waiting_for_source() => {
                // What follows would be a session of its own.
                network.close(channel, Host::Destination);
                return self.tell(Input::Superseded, network);
            }
            _ => Err(HelloStatus::Busy),
        };
        let (status, placed) = match answer {
            Ok(placed) => (HelloStatus::Ok, placed),
            Err(status) => (status, 0),
        };
        let reply = HelloReply { status, version_min, version_max, version, placed };
        let sent = network.send(channel, Host::Source, "greeting", reply.encode().to_vec());
        if status != HelloStatus::Ok {
            network.close(channel, Host::Destination);
            return;
        }
        self.greeted(channel, &hello, sent, network);
    }

    /// A channel is this session's from now on.
    fn greeted(&mut self, channel: ChannelId, hello: &Hello, sent: bool, network: &mut Network) {
        let broken = std::io::ErrorKind::BrokenPipe.into();
        let Some(session) = &mut self.session else { return };
        match hello.role {
            Role::Data if sent => self.tell(Input::LaneJoined { lane: hello.lane }, network),
            Role::Data => {
                let error = lost(&channel_name(Some(hello.lane)), "the greeting", &broken);
                if let Some(input) = session.lane_lost(hello.lane, error, network) {
                    self.tell(input, network);
                }
            }
            Role::Resume if sent => {
                session.acknowledge(network);
                let keeps = session.sabotage == Some(Sabotage::KeepFinal);
                let heard = session.heard_final.take().filter(|_| keeps);
                self.tell(Input::Resumed, network);
                if let Some(message) = heard {
                    self.tell(Input::Control { link: LinkId::CONTROL, message }, network);
                }
            }
            Role::Resume => {
                network.close(channel, Host::Destination);
                self.tell(Input::LinkLost(lost("control", "the greeting", &broken)), network);
            }
            _ => {}
        }
    }

    /// A source in doubt asks.
    fn asked(&mut self, channel: ChannelId, bytes: &[u8], network: &mut Network) {
        let asked = ControlReader::new(bytes, network.protocol, Speaker::Asker)
            .receive("a question about a session");
        let Ok(ControlMessage::Query { session }) = asked else {
            return network.close(channel, Host::Destination);
        };
        if let Some(live) = &mut self.session
            && live.machine.session() == Some(session)
        {
            let link = LinkId(live.links.keys().map(|link| link.0).max().unwrap_or(0) + 1);
            live.links.insert(link, channel);
            let message = ControlMessage::Query { session };
            return self.tell(Input::Control { link, message }, network);
        }
        if let Some(word) = self.recovered_word(session, network) {
            network.note(|| format!("destination: its journal says {word:?}"));
            send(network, channel, &ControlMessage::Answer { session, word });
        }
        network.close(channel, Host::Destination);
    }

    /// As `vmferry_handover::journal::recovered_word` does with files.
    fn recovered_word(&mut self, session: SessionId, network: &mut Network) -> Option<SessionWord> {
        let (mut journal, records) = match self.disk.reopen(session) {
            Ok(Some(found)) => found,
            Ok(None) => return Some(SessionWord::Unknown),
            Err(error) => panic!("the simulated disk never damages a whole line: {error}"),
        };
        match recover_destination(&records) {
            None => Some(SessionWord::Unknown),
            Some((DestinationState::AbortWriting, _)) => {
                let reason = "the destination was restarted".to_owned();
                let written = journal.append(&Record::Aborted { reason });
                if self.disk.takes_the_process_along() {
                    self.crash(network);
                    network.after(Duration::from_secs(3), Event::Restart(Host::Destination));
                }
                written.is_ok().then_some(SessionWord::Aborted)
            }
            Some((state, _)) => Some(state.word()),
        }
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
        } else if session.links.get(&LinkId::CONTROL) == Some(&channel) {
            self.control_lost(end("control"), network);
        } else {
            session.links.retain(|_, at| *at != channel);
        }
    }

    /// Carries out what the machine wants, to the session's end.
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

/// What an action is, if it may take long.
fn step_of(action: &Action) -> Option<Step> {
    match action {
        Action::Prepare { .. } => Some(Step::Prepare),
        Action::Open(_) => Some(Step::Open),
        Action::Load { .. } => Some(Step::Load),
        Action::WriteIntent => Some(Step::WriteIntent),
        Action::Run => Some(Step::Run),
        _ => None,
    }
}

fn send(network: &mut Network, channel: ChannelId, message: &ControlMessage) -> bool {
    let mut bytes = Vec::new();
    message.encode(network.protocol, &mut bytes);
    network.send(channel, Host::Source, message.name(), bytes)
}
