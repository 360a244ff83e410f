//! The channels of a session at the destination.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_transport::ChannelReader;
use vmferry_wire::{Compared, ControlMessage, HelloStatus, Token};

use super::{FromControl, Link, Session};
use crate::config::DestinationConfig;
use crate::data::destination::memory_lanes::MemoryLanes;
use crate::data::destination::stream_lanes::StreamLanes;
use crate::data::destination::target::{LaneContext, LaneSet, Target};
use crate::driver::destination::arrivals::{Arrival, Connection, give_word, reply, turn_away};
use crate::driver::destination::notice::Notice;
use crate::error::MigrateError;
use crate::link::{ControlReader, ControlWriter, DataChannel, FinalDue, Speaker};
use crate::machine::destination::io::{Input, LinkId};
use crate::vmm::DestinationVm;

/// Simultaneous channels on which a source in doubt may query a session: a source closes the
/// previous one when it asks again.
const MOST_QUERIES: usize = 2;

/// How long a finished session waits for the source to receive the last message and close the
/// channel.
const LAST_WORDS: Duration = Duration::from_secs(1);

impl<V: DestinationVm> Session<'_, V> {
    pub(super) fn on_arrival(&mut self, arrival: Arrival, watch: &mut dyn FnMut(&Notice)) -> Input {
        match arrival {
            Arrival::Control(connection)
                if self.machine.is_waiting_for_source()
                    && connection.peer.is_same_as(&self.peer) =>
            {
                self.successor = Some(connection);
                return Input::Superseded;
            }
            Arrival::Control(connection) => {
                let reason = "it wants to migrate a guest, and a migration is going on";
                refuse(connection, HelloStatus::Busy, reason, watch);
            }
            Arrival::Data { lane, token, attempt, connection } => {
                return self
                    .join_lane(lane, token, attempt, connection, watch)
                    .unwrap_or_else(Input::Failed);
            }
            Arrival::Resume { token, attempt, connection } => {
                return self.resume(token, attempt, connection, watch);
            }
            // Messages on this channel may end or commit the session.
            Arrival::Query { session, connection, .. }
                if self.machine.session() == Some(session)
                    && !connection.peer.is_same_as(&self.peer) =>
            {
                watch(&Notice::TurnedAway {
                    reason: format!(
                        "it asks about the session of {}, and is {}",
                        self.peer, connection.peer
                    ),
                    peer: connection.peer.address,
                });
            }
            Arrival::Query { session, offer, connection }
                if self.machine.session() == Some(session) =>
            {
                match self.add_link(connection) {
                    Ok(link) => {
                        let message = ControlMessage::Query { session, offer };
                        return Input::Control { link, message };
                    }
                    Err(error) => watch(&Notice::turned_away("a question", &error)),
                }
            }
            Arrival::Query { session, connection, .. } => {
                let peer = connection.peer.address.clone();
                if let Err(error) = give_word(&self.config.journal_directory, session, connection) {
                    watch(&Notice::turned_away(&peer, &error));
                }
            }
            // It was already reported.
            Arrival::TurnedAway(_) => {}
            Arrival::Compare { answer, .. } => {
                // The peer may have stopped waiting.
                let _ = answer.send(Compared::Unknown("another guest is arriving there".into()));
            }
        }
        Input::Tick
    }

    /// Why a channel does not belong to this session's source, if it does not.
    fn stranger(&self, token: Token, connection: &Connection) -> Option<String> {
        if token != self.token {
            return Some("its token is not this session's".into());
        }
        let (thief, source) = (&connection.peer, &self.peer);
        (!thief.is_same_as(source))
            .then(|| format!("it shows this session's token and is {thief}, not {source}"))
    }

    fn join_lane(
        &mut self,
        lane: u8,
        token: Token,
        attempt: u64,
        mut connection: Connection,
        watch: &mut dyn FnMut(&Notice),
    ) -> Result<Input, MigrateError> {
        if let Some(reason) = self.stranger(token, &connection) {
            refuse(connection, HelloStatus::BadToken, &reason, watch);
            return Ok(Input::Tick);
        }
        if self.fetch_lanes.as_ref().is_some_and(|lanes| lanes.has(lane)) {
            return self.join_fetch_lane(lane, attempt, connection, watch);
        }
        let Some(target) = &self.target else {
            refuse(connection, HelloStatus::BadToken, "the session has no guest", watch);
            return Ok(Input::Tick);
        };
        if lane >= self.expected_lanes {
            let reason = format!("lane {lane} was not announced");
            refuse(connection, HelloStatus::BadLane, &reason, watch);
            return Ok(Input::Tick);
        }
        let lanes = match &mut self.lanes {
            Some(lanes) => lanes,
            none => {
                let context = LaneContext {
                    control: Arc::clone(&self.control),
                    results: self.inputs.0.clone(),
                    ends: Arc::clone(&self.ends),
                    cpu: self.cpu.clone(),
                    placed: Arc::clone(&self.placed),
                    lanes: self.expected_lanes,
                };
                none.insert(start_lanes(target, context, self.config)?)
            }
        };
        let Some(placed) = lanes.expect(lane, attempt) else {
            let reason = format!("lane {lane} has had attempt {attempt} already: a replay");
            refuse(connection, HelloStatus::BadLane, &reason, watch);
            return Ok(Input::Tick);
        };
        // A channel that breaks during the greeting is reestablished like any other.
        let greeted = reply(&mut connection, HelloStatus::Ok, placed).and_then(|()| {
            // An idle source sends nothing here. The control channel detects whether it is alive.
            Ok(connection.reader.set_timeout(None)?)
        });
        if let Err(error) = greeted {
            return Ok(Input::LaneLost { lane, attempt, error });
        }
        let Connection { reader, writer, closer, .. } = connection;
        lanes
            .join(lane, DataChannel { reader, writer, closer })
            .map_err(MigrateError::no_thread)?;
        Ok(Input::LaneJoined { lane })
    }

    /// A channel of a fetch lane.
    fn join_fetch_lane(
        &mut self,
        lane: u8,
        attempt: u64,
        mut connection: Connection,
        watch: &mut dyn FnMut(&Notice),
    ) -> Result<Input, MigrateError> {
        let Some(lanes) = &self.fetch_lanes else { return Ok(Input::Tick) };
        if !lanes.expect(lane, attempt) {
            let reason = format!("lane {lane} has had attempt {attempt} already: a replay");
            refuse(connection, HelloStatus::BadLane, &reason, watch);
            return Ok(Input::Tick);
        }
        if let Err(error) = reply(&mut connection, HelloStatus::Ok, 0) {
            return Ok(Input::LaneLost { lane, attempt, error });
        }
        let Connection { reader, writer, closer, .. } = connection;
        let joined = lanes.join(lane, DataChannel { reader, writer, closer });
        joined.map_err(MigrateError::no_thread)?;
        Ok(Input::LaneJoined { lane })
    }

    /// Whether a lane's present channel is the one that was dialed this number of times before.
    pub(super) fn is_at(&self, lane: u8, attempt: u64) -> bool {
        self.fetch_lanes.as_ref().is_some_and(|lanes| lanes.is_at(lane, attempt))
            || self.lanes.as_ref().is_some_and(|lanes| lanes.is_at(lane, attempt))
    }

    /// Continues with a source that has reestablished the control channel.
    fn resume(
        &mut self,
        token: Token,
        attempt: u64,
        mut connection: Connection,
        watch: &mut dyn FnMut(&Notice),
    ) -> Input {
        let refusal = if let Some(reason) = self.stranger(token, &connection) {
            Some((HelloStatus::BadToken, reason))
        } else if attempt <= self.attempt {
            let reason = format!("the control channel has had attempt {attempt} already: a replay");
            Some((HelloStatus::BadToken, reason))
        } else if !self.machine.may_resume() {
            let phase = self.machine.phase_name();
            Some((HelloStatus::TooLate, format!("the session is in {phase} already")))
        } else {
            None
        };
        if let Some((status, reason)) = refusal {
            refuse(connection, status, &reason, watch);
            return Input::Tick;
        }
        self.attempt = attempt;
        if let Some(old) = self.links.remove(&LinkId::CONTROL) {
            old.closer.close();
        }
        let begun = reply(&mut connection, HelloStatus::Ok, 0)
            .and_then(|()| self.begin_control(connection));
        if let Err(error) = begun {
            return Input::LinkLost(error);
        }
        if let Some(lanes) = &self.lanes {
            lanes.acknowledge();
        }
        Input::Resumed
    }

    /// Starts reading the session's control channel.
    pub(super) fn begin_control(&mut self, mut connection: Connection) -> Result<(), MigrateError> {
        // From here on a write timeout would end the session of a legitimate source. A host that
        // was suspended for less than the silence timeout keeps its channel.
        connection.writer.set_timeout(Some(self.config.timeouts.silence))?;
        let (heard, attempt) = (self.heard.0.clone(), self.attempt);
        let speaker = Speaker::Source(FinalDue::of(&self.wants_final));
        let link = self.start_reading(LinkId::CONTROL, connection, speaker, move |input| {
            heard.send(FromControl { attempt, input }).is_ok()
        })?;
        self.control.set(Arc::clone(&link.writer), link.closer.clone());
        self.links.insert(LinkId::CONTROL, link);
        Ok(())
    }

    /// Starts reading a query channel. Closes the oldest one if there are too many.
    fn add_link(&mut self, connection: Connection) -> Result<LinkId, MigrateError> {
        let id = LinkId(self.next_link);
        self.next_link += 1;
        let mut queries = self.links.keys().copied().filter(|link| *link != LinkId::CONTROL);
        if let Some(oldest) = queries.next()
            && queries.count() + 1 >= MOST_QUERIES
            && let Some(old) = self.links.remove(&oldest)
        {
            old.closer.close();
        }
        let asked = self.asked.0.clone();
        let link = self.start_reading(id, connection, Speaker::InDoubt, move |input| {
            // A query channel that ends has been answered.
            matches!(input, Input::Control { .. }) && asked.send(input).is_ok()
        })?;
        self.links.insert(id, link);
        Ok(id)
    }

    fn start_reading(
        &self,
        id: LinkId,
        connection: Connection,
        speaker: Speaker,
        hear: impl Fn(Input) -> bool + Send + 'static,
    ) -> Result<Link, MigrateError> {
        let Connection { mut reader, writer, closer, versions, .. } = connection;
        let version = versions.version;
        reader.set_timeout(None)?;
        let cpu = self.cpu.clone();
        std::thread::Builder::new()
            .name("control-read".into())
            .spawn(move || {
                let _cpu = cpu.count_this_thread();
                read_link(ControlReader::new(reader, version, speaker), id, &hear);
            })
            .map_err(MigrateError::no_thread)?;
        Ok(Link { writer: Arc::new(ControlWriter::new(writer, version)), closer })
    }

    /// Sends a message. An error on the control channel is a lost link. On a query channel it is
    /// ignored, and the peer asks again.
    pub(super) fn send(&mut self, id: LinkId, message: &ControlMessage) -> Option<Input> {
        // The channel may have been closed meanwhile.
        let link = self.links.get(&id)?;
        let error = link.writer.send(message).err()?;
        link.closer.close();
        self.links.remove(&id);
        (id == LinkId::CONTROL && !self.machine.handover().is_final())
            .then(|| Input::LinkLost(crate::link::lost("control", "sending", &error)))
    }

    pub(super) fn end_lanes(&mut self) {
        self.lanes = None;
    }

    /// Lets the last messages reach the source, then closes everything.
    pub(super) fn close(&mut self) {
        self.end_lanes();
        for link in self.links.values() {
            let _ = link.writer.finish();
        }
        // The source closes its side once it has received the last message; its silence bounds the
        // wait.
        let deadline = Instant::now() + LAST_WORDS;
        let mut open = !self.links.is_empty();
        while open {
            match self.heard.1.recv_deadline(deadline) {
                Ok(FromControl { attempt, input: Input::LinkLost(_) })
                    if attempt == self.attempt =>
                {
                    open = false;
                }
                Err(_) => open = false,
                Ok(_) => {}
            }
        }
        for link in self.links.values() {
            link.closer.close();
        }
        // Closed last, so that a source that still serves pages does not see them as lost.
        self.fetch_lanes = None;
    }
}

/// Forwards the messages of a link until it ends or the receiver is gone.
fn read_link(
    mut reader: ControlReader<ChannelReader>,
    link: LinkId,
    hear: &impl Fn(Input) -> bool,
) {
    loop {
        let (input, last) = match reader.receive("waiting for the source") {
            Ok(message) => {
                if link == LinkId::CONTROL && !reader.ignored().is_empty() {
                    let fields = reader.ignored().to_vec();
                    hear(Input::UnknownFields { message: message.name(), fields });
                }
                (Input::Control { link, message }, false)
            }
            Err(error @ MigrateError::Protocol { .. }) => (Input::Failed(error), true),
            Err(error) => (Input::LinkLost(error), true),
        };
        if !hear(input) || last {
            return;
        }
    }
}

fn refuse(
    connection: Connection,
    status: HelloStatus,
    reason: &str,
    watch: &mut dyn FnMut(&Notice),
) {
    let peer = connection.peer.address.clone();
    turn_away(connection, status);
    watch(&Notice::TurnedAway { peer, reason: reason.to_owned() });
}

/// Starts the lanes of a session.
///
/// # Errors
/// The system can't create a thread, or the VMM expects a different number of streams than there
/// are lanes.
fn start_lanes(
    target: &Target,
    context: LaneContext,
    config: &DestinationConfig,
) -> Result<Box<dyn LaneSet>, MigrateError> {
    Ok(match target {
        Target::Memory(target) => Box::new(
            MemoryLanes::start(context, target.clone(), config).map_err(MigrateError::no_thread)?,
        ),
        Target::Streams(target) => {
            let streams = target.sockets.lock().len();
            if streams != usize::from(context.lanes) {
                let lanes = context.lanes;
                let reason = format!("{lanes} lanes for the {streams} streams of a VMM");
                return Err(MigrateError::protocol("control", 0, reason));
            }
            Box::new(StreamLanes::new(context, target.clone()))
        }
    })
}
