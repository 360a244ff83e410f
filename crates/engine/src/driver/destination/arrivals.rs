//! Connections to the listening address: their greetings, and the first answers to them.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter, PeerIdentity, Pending};
use vmferry_wire::{
    Compared, ControlMessage, HelloStatus, LaneOffer, Reason, ReasonCode, Release, Role, SessionId,
    SessionWord, Token,
};

use super::notice::Notice;
use crate::config::policy::Admission;
use crate::driver::greeting::{Versions, answer, read_hello};
use crate::error::MigrateError;
use crate::link::{ANSWER_TIMEOUT, ControlReader, ControlWriter, Speaker};
use crate::probe;
use crate::probe::{Comparer, Gate, HostFacts};
use crate::vmm::GuestDescription;

/// A greeted connection.
pub struct Connection {
    /// The receiving half.
    pub reader: ChannelReader,
    /// The sending half.
    pub writer: ChannelWriter,
    /// Closes it from any thread.
    pub closer: ChannelCloser,
    /// The peer's identity.
    pub peer: PeerIdentity,
    /// The protocol versions that this side speaks, and the negotiated one.
    pub versions: Versions,
    /// Returns the connection to the thread that has greeted it, which sends the refusal. Dropped
    /// when the connection is accepted.
    back: Option<Sender<(Connection, LastWords)>>,
}

/// The answer to a connection that is not accepted.
#[allow(clippy::large_enum_variant, reason = "there is one for each connection at most")]
pub enum LastWords {
    /// The answer to its greeting.
    Status(HelloStatus),
    /// The answer to its query.
    Answer(ControlMessage),
}

impl Connection {
    /// Returns the connection to the thread that has greeted it, so that a peer that does not read
    /// the answer delays only that thread.
    fn give_back(mut self, words: LastWords) {
        if let Some(back) = self.back.take() {
            // If that thread has ended, the connection is closed without an answer.
            let _ = back.send((self, words));
        }
    }

    /// Sends the answer, waiting at most `patience` for the peer, and closes the connection
    /// gracefully.
    ///
    /// # Errors
    /// The link's error.
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

/// A connection that has sent its greeting and waits for the answer.
pub enum Arrival {
    /// A source that wants to migrate a guest.
    Control(Connection),
    /// A data channel for a lane of the session.
    Data {
        /// The lane.
        lane: u8,
        /// The token presented, which may be wrong.
        token: Token,
        /// How often the lane's channel was dialed before.
        attempt: u64,
        /// The connection.
        connection: Connection,
    },
    /// A source that wants to resume a session whose control channel was lost.
    Resume {
        /// The token presented, which may be wrong.
        token: Token,
        /// How often the control channel was dialed before.
        attempt: u64,
        /// The connection.
        connection: Connection,
    },
    /// A query about a session, from a peer whose greeting was answered.
    Query {
        /// The session.
        session: SessionId,
        /// The fetch lanes that the source offers.
        offer: Option<LaneOffer>,
        /// The connection.
        connection: Connection,
    },
    /// One or more connections that were turned away.
    TurnedAway(Notice),
    /// A probe asks whether the waiting VMM could take this machine.
    Compare {
        /// The guest.
        guest: GuestDescription,
        /// Receives the answer.
        answer: Sender<Compared>,
    },
}

/// Answers this host's [probes](crate::probe).
#[derive(Debug)]
pub struct Probes {
    /// Admits one probe at a time.
    pub gate: Gate,
    /// The facts about this host.
    pub host: HostFacts,
}

/// Asks the thread that has the VMM to compare a machine with it.
pub fn compare(
    arrivals: Option<&Sender<Arrival>>,
    guest: GuestDescription,
    timeout: Duration,
) -> Compared {
    let deadline = Instant::now() + timeout;
    let (answer, answers) = crossbeam_channel::bounded(1);
    let question = Arrival::Compare { guest, answer };
    if arrivals.is_none_or(|arrivals| arrivals.send_deadline(question, deadline).is_err()) {
        return Compared::Unknown("nothing listens there for guests now".into());
    }
    let busy = |_| Compared::Unknown("the VMM there is busy with another guest".into());
    answers.recv_deadline(deadline).unwrap_or_else(busy)
}

impl Arrival {
    /// Prepares the arrival for the session's thread, which answers from now on. `back` receives
    /// the connection if it is turned away.
    pub fn give_back_to(&mut self, back: Sender<(Connection, LastWords)>) {
        match self {
            Self::Control(connection)
            | Self::Data { connection, .. }
            | Self::Resume { connection, .. }
            | Self::Query { connection, .. } => {
                connection.back = Some(back);
                // If the timeout can't be set on this descriptor, the answer fails.
                let _ = connection.writer.set_timeout(Some(ANSWER_TIMEOUT));
            }
            Self::TurnedAway(_) | Self::Compare { .. } => {}
        }
    }
}

/// Authenticates a connection and reads its greeting, with `timeout` for each step; the caller
/// bounds the total. A source for which `policy` has no rule is refused. `versions` are the
/// protocol versions that this side speaks. A probe is answered here, with the help of `comparer`,
/// and does not result in an arrival.
///
/// # Errors
/// The peer's error or violation of the protocol.
pub fn receive_greeting(
    pending: Pending,
    timeout: Duration,
    versions: &RangeInclusive<u16>,
    policy: Option<&dyn Admission>,
    probes: &Probes,
    comparer: Comparer<'_>,
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
                ControlMessage::Query { session, offer } => {
                    Arrival::Query { session, offer, connection }
                }
                other => {
                    let reason = format!("{} is no question", other.name());
                    return Err(MigrateError::protocol("query", 0, reason));
                }
            }
        }
        Role::Probe => {
            let Some(pass) = probes.gate.enter() else {
                // A peer that does not wait for the answer loses nothing.
                let _ = connection.dismiss(&LastWords::Status(HelloStatus::Busy), timeout);
                let reason = Reason::new(ReasonCode::Busy, "another host is asking");
                return Err(MigrateError::Refused { peer: "destination", reason });
            };
            reply(&mut connection, HelloStatus::Ok, 0)?;
            let Connection { reader, writer, peer, .. } = &mut connection;
            probe::answer(reader, writer, peer, policy, &probes.host, Some(comparer), pass)?;
            return Ok(None);
        }
        Role::Stream | Role::Other(_) => {
            reply(&mut connection, HelloStatus::Refused, 0)?;
            let role = u8::from(hello.role);
            return Err(MigrateError::protocol(
                "greeting",
                0,
                format!("role {role} is not served"),
            ));
        }
    }))
}

/// Refuses a source that may send nothing here. No session is started for it.
fn refuse_source(mut connection: Connection, refusal: &str) -> MigrateError {
    let reason = Reason::new(ReasonCode::Unauthorized, refusal);
    let refused = MigrateError::Refused { peer: "destination", reason: reason.clone() };
    // The source reads the answer once it has announced its guest. A peer that does not wait for
    // the answer loses nothing.
    let version = connection.versions.version;
    let mut reader = ControlReader::new(&mut connection.reader, version, Speaker::Applicant);
    if answer(&mut connection.writer, &connection.versions, HelloStatus::Ok, 0).is_ok()
        && reader.receive("a guest's announcement").is_ok()
    {
        let writer = ControlWriter::new(connection.writer, version);
        let refuse = ControlMessage::Refuse { reason, release: Some(Release::of_this("")) };
        let said = writer.send(&refuse).and_then(|()| writer.finish());
        if said.is_ok() {
            // Closing with unread data would reset the connection, and the answer would be lost.
            while reader.receive("the end").is_ok() {}
        }
    }
    refused
}

/// Answers a greeting. `placed` is the last frame up to which all frames of a data channel's lane
/// are placed.
///
/// # Errors
/// The link's error.
pub fn reply(
    connection: &mut Connection,
    status: HelloStatus,
    placed: u64,
) -> Result<(), MigrateError> {
    answer(&mut connection.writer, &connection.versions, status, placed)
        .map_err(|error| crate::link::lost("greeting", "answering it", &error))
}

/// Has another thread refuse the greeting and close the connection gracefully.
pub fn turn_away(connection: Connection, status: HelloStatus) {
    connection.give_back(LastWords::Status(status));
}

/// Has another thread answer a query about an inactive session from the journals.
pub fn give_word(
    directory: &std::path::Path,
    session: SessionId,
    connection: Connection,
) -> Result<(), MigrateError> {
    let word = word_for(directory, session, &connection.peer)?;
    let answer = ControlMessage::Answer { session, word, token: None };
    connection.give_back(LastWords::Answer(answer));
    Ok(())
}

/// The word about an inactive session for this peer.
///
/// # Errors
/// The session is another host's, or its journal can't be read or written.
pub fn word_for(
    directory: &std::path::Path,
    session: SessionId,
    peer: &PeerIdentity,
) -> Result<SessionWord, MigrateError> {
    let source = vmferry_handover::journal::source_of(directory, session)?;
    if source.is_some() && source.as_ref() != peer.names.first() {
        // An answer may turn an open session into ABORTED, so only its source may ask.
        let text = format!("session {session} is not one of {peer}");
        let reason = Reason::new(ReasonCode::Unauthorized, &text);
        return Err(MigrateError::Refused { peer: "destination", reason });
    }
    Ok(vmferry_handover::journal::recovered_word(directory, session)?)
}
