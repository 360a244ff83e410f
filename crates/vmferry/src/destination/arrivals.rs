//! Who comes to the listening address: what a connection wants, and the first answers to it.

use std::ops::RangeInclusive;
use std::time::Duration;

use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter, PeerIdentity, Pending};
use vmferry_wire::{
    ControlMessage, HelloStatus, Reason, ReasonCode, Release, Role, SessionId, Token,
};

use super::receive::Notice;

use crate::error::MigrateError;
use crate::greeting::{Versions, answer, read_hello};
use crate::link::{ControlReader, ControlWriter};
use crate::policy::Admission;

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

/// Authenticates a connection and hears what it wants, for so long at each step; whoever calls bounds the
/// whole. A source that `policy` has nothing for is told so. `versions`: of the protocol, that this side speaks.
///
/// # Errors
/// What is wrong with the peer.
pub fn receive_greeting(
    pending: Pending,
    timeout: Duration,
    versions: &RangeInclusive<u16>,
    policy: Option<&dyn Admission>,
) -> Result<Arrival, MigrateError> {
    let channel = pending.handshake(timeout)?;
    let (peer, closer) = (channel.peer().clone(), channel.closer());
    let (mut reader, mut writer) = channel.split();
    reader.set_timeout(Some(timeout))?;
    writer.set_timeout(Some(timeout))?;
    let (hello, versions) = read_hello(&mut reader, &mut writer, versions, &peer.address)?;
    let version = versions.version;
    let mut connection = Connection { reader, writer, closer, peer, versions };
    Ok(match hello.role {
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
            let mut reader = ControlReader::new(&mut connection.reader, version);
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
        Role::Other(role) => {
            reply(&mut connection, HelloStatus::Refused, 0)?;
            return Err(MigrateError::Protocol {
                channel: "greeting".into(),
                offset: 0,
                reason: format!("unknown role {role}"),
            });
        }
    })
}

/// Tells a source that it may send nothing here. No session is begun for it.
fn refuse_source(mut connection: Connection, refusal: &str) -> MigrateError {
    let reason = Reason::new(ReasonCode::Unauthorised, refusal);
    let refused = MigrateError::Refused { peer: "destination", reason: reason.clone() };
    // It listens once it has announced its guest. Whoever does not wait for the answer has lost nothing.
    let version = connection.versions.version;
    let mut reader = ControlReader::new(&mut connection.reader, version);
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

/// Answers a greeting with a refusal and closes the connection in order.
pub fn turn_away(mut connection: Connection, status: HelloStatus) {
    if answer(&mut connection.writer, &connection.versions, status, 0).is_ok() {
        // Whoever does not wait for the answer has lost nothing.
        let _ = connection.writer.finish();
    }
}

/// Answers a question about a session that is not live with what the journals say, and closes.
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
    let writer = ControlWriter::new(connection.writer, connection.versions.version);
    writer
        .send(&ControlMessage::Answer { session, word })
        .and_then(|()| writer.finish())
        .map_err(|error| crate::link::lost("query", "answering it", &error))
}
