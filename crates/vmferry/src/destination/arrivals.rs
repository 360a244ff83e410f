//! Who comes to the listening address: connections are authenticated and greeted in threads of
//! their own, so that a slow or hostile one holds nobody up, and arrive here by role.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use vmferry_transport::{
    ChannelCloser, ChannelReader, ChannelWriter, Listener, ListenerCloser, PeerIdentity, Pending,
};
use vmferry_wire::{ControlMessage, HelloStatus, Role, SessionId, Token};

use crate::error::MigrateError;
use crate::greeting::{answer, read_hello};
use crate::link::{ControlReader, ControlWriter};

/// From the connection until its greeting, and for the question on a query channel.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

/// Connections that may be greeting at the same time: a migration has at most 18 channels, and
/// what comes beyond this is turned away unheard.
const MAX_GREETING: usize = 64;

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
    /// Was turned away.
    TurnedAway {
        /// Where it came from, if that is known.
        peer: String,
        /// Why.
        error: MigrateError,
    },
}

/// The open door.
pub struct Reception {
    /// Who has come.
    pub arrivals: Receiver<Arrival>,
    closer: ListenerCloser,
    acceptor: Option<JoinHandle<()>>,
}

impl Reception {
    /// Opens the door.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn open(listener: Listener) -> std::io::Result<Self> {
        let (sender, arrivals) = crossbeam_channel::unbounded();
        let closer = listener.closer();
        let acceptor = std::thread::Builder::new()
            .name("accept".into())
            .spawn(move || accept(&listener, &sender))?;
        Ok(Self { arrivals, closer, acceptor: Some(acceptor) })
    }
}

impl Drop for Reception {
    fn drop(&mut self) {
        self.closer.close();
        if let Some(acceptor) = self.acceptor.take() {
            // A panic there has closed the door already.
            let _ = acceptor.join();
        }
    }
}

fn accept(listener: &Listener, arrivals: &Sender<Arrival>) {
    let greeting = Arc::new(AtomicUsize::new(0));
    let mut failures = 0;
    loop {
        let pending = match listener.accept() {
            Ok(Some(pending)) => pending,
            Ok(None) => return,
            Err(error) => {
                let peer = "the listening socket".to_owned();
                let turned_away = Arrival::TurnedAway { peer, error: error.into() };
                failures += 1;
                if arrivals.send(turned_away).is_err() || failures > MAX_ACCEPT_FAILURES {
                    return;
                }
                // Out of descriptors, most likely: accepting again at once would spin.
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        failures = 0;
        if greeting.fetch_add(1, Ordering::Relaxed) >= MAX_GREETING {
            greeting.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (arrivals, count) = (arrivals.clone(), Arc::clone(&greeting));
        let spawned = std::thread::Builder::new().name("greet".into()).spawn(move || {
            let peer = pending.peer_address();
            let arrival = receive_greeting(pending)
                .unwrap_or_else(|error| Arrival::TurnedAway { peer, error });
            count.fetch_sub(1, Ordering::Relaxed);
            let _ = arrivals.send(arrival);
        });
        if spawned.is_err() {
            greeting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Failures to accept in a row, 100 ms apart, after which the door is given up.
const MAX_ACCEPT_FAILURES: u32 = 600;

fn receive_greeting(pending: Pending) -> Result<Arrival, MigrateError> {
    let channel = pending.handshake(GREETING_TIMEOUT)?;
    let (peer, closer) = (channel.peer().clone(), channel.closer());
    let (mut reader, mut writer) = channel.split();
    reader.set_timeout(Some(GREETING_TIMEOUT))?;
    writer.set_timeout(Some(GREETING_TIMEOUT))?;
    let hello = read_hello(&mut reader, &mut writer, &peer.address)?;
    let mut connection = Connection { reader, writer, closer, peer };
    Ok(match hello.role {
        Role::Control => Arrival::Control(connection),
        Role::Data => Arrival::Data {
            lane: hello.lane,
            token: hello.token,
            attempt: hello.attempt,
            connection,
        },
        Role::Resume => Arrival::Resume { token: hello.token, attempt: hello.attempt, connection },
        Role::Query => {
            reply(&mut connection, HelloStatus::Ok, 0)?;
            let mut reader = ControlReader::new(&mut connection.reader);
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

/// Answers a greeting. `placed`: the last frame up to which all of a data channel's lane are placed.
///
/// # Errors
/// The link's.
pub fn reply(
    connection: &mut Connection,
    status: HelloStatus,
    placed: u64,
) -> Result<(), MigrateError> {
    answer(&mut connection.writer, status, placed)
        .map_err(|error| crate::link::lost("greeting", "answering it", &error))
}

/// Answers a greeting with a refusal and closes the connection in order.
pub fn turn_away(mut connection: Connection, status: HelloStatus) {
    if answer(&mut connection.writer, status, 0).is_ok() {
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
    let word = crate::journal::recovered_word(directory, session)?;
    let writer = ControlWriter::new(connection.writer);
    writer
        .send(&ControlMessage::Answer { session, word })
        .and_then(|()| writer.finish())
        .map_err(|error| crate::link::lost("query", "answering it", &error))
}
