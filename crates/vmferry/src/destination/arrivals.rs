//! Who comes to the listening address: what a connection wants, and the first answers to it.

use std::ops::RangeInclusive;
use std::time::Duration;

use crossbeam_channel::Sender;
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter, PeerIdentity, Pending};
use vmferry_wire::{
    ControlMessage, HelloStatus, Reason, ReasonCode, Release, Role, SessionId, Token,
};

use super::receive::Notice;

use crate::error::MigrateError;
use crate::greeting::{Versions, answer, read_hello};
use crate::link::{ANSWER_TIMEOUT, ControlReader, ControlWriter, Speaker};
use crate::policy::Admission;
use crate::probe::{self, Gate, HostFacts};

/// A greeted connection.
pub struct Connection {
    /// What it sends.
    pub reader: ChannelReader,
    /// What it is told.
    pub writer: ChannelWriter,
    /// Closes it from any thread.
    pub closer: ChannelCloser,
    /// Who it is.
    pub peer: PeerIdentity,
    /// The versions of the protocol that this side speaks, and the one that both do.
    pub versions: Versions,
    /// To the thread that has greeted it, which turns it away if that is wanted. Dropped, it is
    /// taken.
    back: Option<Sender<(Connection, LastWords)>>,
}

/// What a connection is told that is not taken.
#[allow(clippy::large_enum_variant, reason = "there is one for each connection at most")]
pub enum LastWords {
    /// The answer to its greeting.
    Status(HelloStatus),
    /// The answer to its question.
    Answer(ControlMessage),
}

impl Connection {
    /// Gives it back to the thread that has greeted it: a peer that does not read the answer holds
    /// up nobody else.
    fn give_back(mut self, words: LastWords) {
        if let Some(back) = self.back.take() {
            // Without that thread it is closed without an answer.
            let _ = back.send((self, words));
        }
    }

    /// Says the last words, for which the peer may take so long, and closes the connection in
    /// order.
    ///
    /// # Errors
    /// The link's.
    pub fn dismiss(mut self, words: &LastWords, patience: Duration) -> Result<(), MigrateError> {
        self.writer.set_timeout(Some(patience))?;
        match words {
            LastWords::Status(status) => {
                reply(&mut self, *status, 0)?;
                self.writer
                    .finish()
                    .map_err(|error| crate::link::lost("greeting", "answering it", &error))
            }
            LastWords::Answer(message) => {
                let writer = ControlWriter::new(self.writer, self.versions.version);
                writer
                    .send(message)
                    .and_then(|()| writer.finish())
                    .map_err(|error| crate::link::lost("query", "answering it", &error))
            }
        }
    }
}

/// A connection that has said what it wants and waits for the answer to its greeting.
pub enum Arrival {
    /// Wants to migrate a guest.
    Control(Connection),
    /// Wants to be a lane of the session.
    Data {
        /// Which lane.
        lane: u8,
        /// The session's token, if it is honest.
        token: Token,
        /// How often the lane's channel was dialled before.
        attempt: u64,
        /// The connection.
        connection: Connection,
    },
    /// Wants to go on with a session whose control channel was lost.
    Resume {
        /// The session's token, if it is honest.
        token: Token,
        /// How often the control channel was dialled before.
        attempt: u64,
        /// The connection.
        connection: Connection,
    },
    /// Was answered, and has asked for this host's word.
    Query {
        /// About this session.
        session: SessionId,
        /// The connection.
        connection: Connection,
    },
    /// Was turned away, or many were.
    TurnedAway(Notice),
}

/// What this host answers when a peer [asks](crate::probe) what it has.
#[derive(Debug)]
pub struct Probes {
    /// One at a time.
    pub gate: Gate,
    /// The host.
    pub host: HostFacts,
}

impl Arrival {
    /// Makes it ready for the session's thread, which answers from now on, and says where its
    /// connection goes if it is turned away.
    pub fn give_back_to(&mut self, back: Sender<(Connection, LastWords)>) {
        match self {
            Self::Control(connection)
            | Self::Data { connection, .. }
            | Self::Resume { connection, .. }
            | Self::Query { connection, .. } => {
                connection.back = Some(back);
                // A descriptor that can't be asked for this fails at the answer.
                let _ = connection.writer.set_timeout(Some(ANSWER_TIMEOUT));
            }
            Self::TurnedAway(_) => {}
        }
    }
}

/// Authenticates a connection and hears what it wants, for `timeout` at each step; the caller
/// bounds the whole. A source that `policy` has nothing for is told so. `versions`: of the
/// protocol, that this side speaks. One that has only asked what this host has is answered here,
/// and nothing arrives.
///
/// # Errors
/// What is wrong with the peer.
pub fn receive_greeting(
    pending: Pending,
    timeout: Duration,
    versions: &RangeInclusive<u16>,
    policy: Option<&dyn Admission>,
    probes: &Probes,
) -> Result<Option<Arrival>, MigrateError> {
    let channel = pending.handshake(timeout)?;
    let (peer, closer) = (channel.peer().clone(), channel.closer());
    let (mut reader, mut writer) = channel.split();
    reader.set_timeout(Some(timeout))?;
    writer.set_timeout(Some(timeout))?;
    let (hello, versions) = read_hello(&mut reader, &mut writer, versions, &peer.address)?;
    let version = versions.version;
    let mut connection = Connection { reader, writer, closer, peer, versions, back: None };
    Ok(Some(match hello.role {
        Role::Control => {
            if let Some(Err(refusal)) = policy.map(|policy| policy.check_source(&connection.peer)) {
                return Err(refuse_source(connection, &refusal));
            }
            Arrival::Control(connection)
        }
        Role::Data => Arrival::Data {
            lane: hello.lane,
            token: hello.token,
            attempt: hello.attempt,
            connection,
        },
        Role::Resume => Arrival::Resume { token: hello.token, attempt: hello.attempt, connection },
        Role::Query => {
            reply(&mut connection, HelloStatus::Ok, 0)?;
            let mut reader = ControlReader::new(&mut connection.reader, version, Speaker::Asker);
            match reader.receive("a question about a session")? {
                ControlMessage::Query { session } => Arrival::Query { session, connection },
                other => {
                    return Err(MigrateError::Protocol {
                        channel: "query".into(),
                        offset: 0,
                        reason: format!("{} is no question", other.name()),
                    });
                }
            }
        }
        Role::Probe => {
            let Some(_pass) = probes.gate.enter() else {
                // A peer that does not wait for the answer loses nothing.
                let _ = connection.dismiss(&LastWords::Status(HelloStatus::Busy), timeout);
                let reason = Reason::new(ReasonCode::Busy, "another host is asking");
                return Err(MigrateError::Refused { peer: "destination", reason });
            };
            reply(&mut connection, HelloStatus::Ok, 0)?;
            let Connection { reader, writer, peer, .. } = &mut connection;
            probe::answer(reader, writer, peer, policy, &probes.host)?;
            return Ok(None);
        }
        Role::Other(role) => {
            reply(&mut connection, HelloStatus::Refused, 0)?;
            return Err(MigrateError::Protocol {
                channel: "greeting".into(),
                offset: 0,
                reason: format!("unknown role {role}"),
            });
        }
    }))
}

/// Tells a source that it may send nothing here. No session is begun for it.
fn refuse_source(mut connection: Connection, refusal: &str) -> MigrateError {
    let reason = Reason::new(ReasonCode::Unauthorised, refusal);
    let refused = MigrateError::Refused { peer: "destination", reason: reason.clone() };
    // It listens once it has announced its guest. A peer that does not wait for the answer loses
    // nothing.
    let version = connection.versions.version;
    let mut reader = ControlReader::new(&mut connection.reader, version, Speaker::Applicant);
    if answer(&mut connection.writer, &connection.versions, HelloStatus::Ok, 0).is_ok()
        && reader.receive("a guest's announcement").is_ok()
    {
        let writer = ControlWriter::new(connection.writer, version);
        let refuse = ControlMessage::Refuse { reason, release: Some(Release::of_this("")) };
        let said = writer.send(&refuse).and_then(|()| writer.finish());
        if said.is_ok() {
            // Closed with something unread in it, the connection would be reset, and the answer lost.
            while reader.receive("the end").is_ok() {}
        }
    }
    refused
}

/// Answers a greeting. `placed`: the last frame up to which all of a data channel's lane are placed.
///
/// # Errors
/// The link's.
pub fn reply(
    connection: &mut Connection,
    status: HelloStatus,
    placed: u64,
) -> Result<(), MigrateError> {
    answer(&mut connection.writer, &connection.versions, status, placed)
        .map_err(|error| crate::link::lost("greeting", "answering it", &error))
}

/// Has a greeting answered with a refusal and the connection closed in order, in another thread.
pub fn turn_away(connection: Connection, status: HelloStatus) {
    connection.give_back(LastWords::Status(status));
}

/// Has a question about a session that is not live answered with what the journals say, in another
/// thread.
pub fn give_word(
    directory: &std::path::Path,
    session: SessionId,
    connection: Connection,
) -> Result<(), MigrateError> {
    let source = crate::journal::source_of(directory, session)?;
    if source.is_some() && source.as_ref() != connection.peer.names.first() {
        // A word may make ABORTED of an open session: it is for its source only.
        let text = format!("session {session} is not one of {}", connection.peer);
        let reason = Reason::new(ReasonCode::Unauthorised, &text);
        return Err(MigrateError::Refused { peer: "destination", reason });
    }
    let word = crate::journal::recovered_word(directory, session)?;
    connection.give_back(LastWords::Answer(ControlMessage::Answer { session, word }));
    Ok(())
}
