//! The channels of a session at the destination.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use vmferry_transport::ChannelReader;
use vmferry_wire::{ControlMessage, HelloStatus, Token};

use super::{Link, Session};
use crate::destination::arrivals::{Arrival, Connection, give_word, reply, turn_away};
use crate::destination::io::{Input, LinkId};
use crate::destination::lanes::{LaneContext, Lanes};
use crate::destination::receive::Notice;
use crate::error::MigrateError;
use crate::link::{ControlReader, ControlWriter};
use crate::vm::DestinationVm;

/// How long a finished session waits for the source to hear its last message and hang up.
const LAST_WORDS: Duration = Duration::from_secs(1);

impl<V: DestinationVm> Session<'_, V> {
    pub(super) fn on_arrival(&mut self, arrival: Arrival, watch: &mut dyn FnMut(&Notice)) -> Input {
        match arrival {
            Arrival::Control(connection) => {
                watch(&Notice::TurnedAway {
                    peer: connection.peer.address.clone(),
                    reason: "it wants to migrate a guest, and a migration is going on".into(),
                });
                turn_away(connection, HelloStatus::Busy);
            }
            Arrival::Data { token, connection, .. }
                if token == self.token && !connection.peer.is_same_as(&self.peer) =>
            {
                let (thief, source) = (&connection.peer, &self.peer);
                watch(&Notice::TurnedAway {
                    peer: thief.address.clone(),
                    reason: format!("it shows this session's token and is {thief}, not {source}"),
                });
                turn_away(connection, HelloStatus::BadToken);
            }
            Arrival::Data { lane, token, connection } => {
                return self.join_lane(lane, token, connection).unwrap_or_else(Input::Failed);
            }
            // What is said on this channel may end or commit the session.
            Arrival::Query { session, connection }
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
            Arrival::Query { session, connection } if self.machine.session() == Some(session) => {
                match self.add_link(connection) {
                    Ok(link) => {
                        return Input::Control { link, message: ControlMessage::Query { session } };
                    }
                    Err(error) => watch(&Notice::turned_away("a question", &error)),
                }
            }
            Arrival::Query { session, connection } => {
                let peer = connection.peer.address.clone();
                if let Err(error) = give_word(&self.config.journal_directory, session, connection) {
                    watch(&Notice::turned_away(&peer, &error));
                }
            }
            Arrival::TurnedAway(notice) => watch(&notice),
        }
        Input::Tick
    }

    pub(super) fn join_lane(
        &mut self,
        lane: u8,
        token: Token,
        mut connection: Connection,
    ) -> Result<Input, MigrateError> {
        let (Some((memory, hashes)), Some(control)) =
            (&self.memory, self.links.get(&LinkId::CONTROL))
        else {
            turn_away(connection, HelloStatus::BadToken);
            return Ok(Input::Tick);
        };
        if token != self.token {
            turn_away(connection, HelloStatus::BadToken);
            return Ok(Input::Tick);
        }
        let taken = self.lanes.as_ref().is_some_and(|lanes| lanes.has(lane));
        if lane >= self.expected_lanes || taken {
            turn_away(connection, HelloStatus::BadLane);
            return Ok(Input::Tick);
        }
        reply(&mut connection, HelloStatus::Ok)?;
        // A source that thinks sends nothing; the control channel tells whether it lives.
        connection.reader.set_timeout(None)?;
        let context = LaneContext {
            memory: memory.clone(),
            hashes: Arc::clone(hashes),
            control: Arc::clone(&control.writer),
            results: self.inputs.0.clone(),
            cpu: self.cpu.clone(),
            placed: Arc::clone(&self.placed),
            lanes: self.expected_lanes,
        };
        let no_thread = |source| MigrateError::Local { action: "start a thread", source };
        let lanes = match &mut self.lanes {
            Some(lanes) => lanes,
            none => none.insert(Lanes::start(context, self.config).map_err(no_thread)?),
        };
        let Connection { reader, writer, closer, .. } = connection;
        lanes.join(lane, reader, writer, closer).map_err(no_thread)?;
        Ok(Input::Tick)
    }

    /// Listens to a control or query channel.
    pub(super) fn add_link(&mut self, connection: Connection) -> Result<LinkId, MigrateError> {
        let link = LinkId(self.next_link);
        self.next_link += 1;
        let Connection { mut reader, writer, closer, .. } = connection;
        reader.set_timeout(None)?;
        let (inputs, cpu) = (self.inputs.0.clone(), self.cpu.clone());
        std::thread::Builder::new()
            .name("control-read".into())
            .spawn(move || {
                let _cpu = cpu.count_this_thread();
                read_link(reader, link, &inputs);
            })
            .map_err(|source| MigrateError::Local { action: "start a thread", source })?;
        self.links.insert(link, Link { writer: Arc::new(ControlWriter::new(writer)), closer });
        Ok(link)
    }

    /// A message that can't be sent on the control channel is a lost link; on a query channel it
    /// is the asker's loss, and it asks again.
    pub(super) fn send(&mut self, id: LinkId, message: &ControlMessage) -> Option<Input> {
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

    /// Lets the last words reach the source, then closes everything.
    pub(super) fn close(&mut self) {
        self.end_lanes();
        for link in self.links.values() {
            let _ = link.writer.finish();
        }
        // The source closes its side once it has heard; its silence bounds the wait.
        let deadline = Instant::now() + LAST_WORDS;
        let mut open = !self.links.is_empty();
        while open {
            match self.inputs.1.recv_deadline(deadline) {
                Ok(Input::LinkLost(_)) | Err(_) => open = false,
                Ok(_) => {}
            }
        }
        for link in self.links.values() {
            link.closer.close();
        }
    }
}

fn read_link(reader: ChannelReader, link: LinkId, inputs: &Sender<Input>) {
    let mut reader = ControlReader::new(reader);
    loop {
        let input = match reader.receive("waiting for the source") {
            Ok(message) => Input::Control { link, message },
            Err(error) => {
                // A query channel that ends has been answered.
                if link == LinkId::CONTROL {
                    let _ = inputs.send(match error {
                        error @ MigrateError::Protocol { .. } => Input::Failed(error),
                        error => Input::LinkLost(error),
                    });
                }
                return;
            }
        };
        if inputs.send(input).is_err() {
            return;
        }
    }
}
