//! Listening for guests, with consecutive sessions, until a guest runs here.

use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use vmferry_transport::Listener;
use vmferry_wire::{Compared, GuestIdentity, HelloStatus, ReasonCode, SessionId};

use super::arrivals::{Arrival, Connection, give_word, turn_away};
use super::notice::Notice;
use super::reception::Reception;
use super::session::{Ended, Session};
use crate::causes::chain;
use crate::config::DestinationConfig;
use crate::error::MigrateError;
use crate::machine::destination::io::Ending;
use crate::stats::DestinationStats;
use crate::vmm::{DestinationVm, GuestDescription, PrepareError};

/// The result of receiving.
pub enum Received<V> {
    /// This host owns the guest.
    Owns(Box<Owned<V>>),
    /// No guest runs here.
    Nothing {
        /// The VMM, without a guest.
        vm: V,
        /// The reason.
        error: MigrateError,
    },
}

/// A guest that was received.
pub struct Owned<V> {
    /// The VMM that runs it.
    pub vm: V,
    /// The session ID.
    pub session: Option<SessionId>,
    /// The guest.
    pub guest: Option<GuestIdentity>,
    /// Whether it stays paused because it was paused at the source before the migration.
    pub paused: bool,
    /// Set if the guest was handed over but could not be started: the guest has crashed.
    pub crash: Option<MigrateError>,
    /// The statistics.
    pub stats: DestinationStats,
    /// Continues to answer queries about this host's sessions.
    pub responder: Responder,
}

/// Ends [`receive`] from another thread. Has no effect once a guest is handed over.
#[derive(Clone, Debug)]
pub struct Stop(Sender<()>, Receiver<()>);

impl Default for Stop {
    fn default() -> Self {
        let (sender, receiver) = crossbeam_channel::bounded(1);
        Self(sender, receiver)
    }
}

impl Stop {
    /// What [`stop`](Self::stop) sends to.
    pub(super) fn stops(&self) -> &Receiver<()> {
        &self.1
    }

    /// Ends the wait, or cancels the running migration.
    pub fn stop(&self) {
        // A second call has no further effect.
        let _ = self.0.try_send(());
    }
}

/// Receives a guest on the calling thread.
///
/// Connections that are not authenticated, speak another protocol or come at the wrong time are
/// turned away with a [`Notice`]. After a failed attempt, listening continues unless
/// [`DestinationConfig::once`] is set or the VMM is [spent](DestinationVm::is_spent).
///
/// ```
/// use std::sync::Arc;
///
/// use vmferry::destination::{Owned, Received, Stop, receive};
/// use vmferry::{DestinationConfig, DestinationVm};
/// use vmferry_transport::{IdentityFiles, Listener, TlsIdentity};
///
/// /// Waits for a guest. Keep the result as long as the guest is here: its responder answers for
/// /// it.
/// fn wait<V: DestinationVm>(vm: V, stop: &Stop) -> Result<Owned<V>, Box<dyn std::error::Error>> {
///     let files = IdentityFiles::in_directory("/etc/vmferry/tls".as_ref());
///     let identity = Arc::new(TlsIdentity::new(files)?);
///     let listener = Listener::bind(&"tls:0.0.0.0:7001".parse()?, Some(identity))?;
///     let config = DestinationConfig::new("/var/lib/firebird/journals".into());
///     match receive(listener, vm, &config, stop, &mut |notice| println!("{notice:?}")) {
///         Received::Owns(owned) => Ok(*owned),
///         Received::Nothing { error, .. } => Err(error.into()),
///     }
/// }
/// ```
pub fn receive<V: DestinationVm>(
    listener: Listener,
    mut vm: V,
    config: &DestinationConfig,
    stop: &Stop,
    watch: &mut dyn FnMut(&Notice),
) -> Received<V> {
    let reception = match Reception::open(listener, config) {
        Ok(reception) => reception,
        Err(source) => {
            return Received::Nothing { vm, error: MigrateError::no_thread(source) };
        }
    };
    let directory = &config.journal_directory;
    let mut successor = None;
    loop {
        let connection = match successor.take() {
            Some(connection) => connection,
            None => match await_source(&mut vm, &reception, directory, stop, watch) {
                Ok(connection) => connection,
                Err(error) => return Received::Nothing { vm, error },
            },
        };
        if connection.peer.tls {
            watch(&Notice::authenticated(&connection.peer));
        }
        let peer = connection.peer.address.clone();
        let session = Session::begin(&mut vm, config, &reception, &stop.1, connection);
        let failure = match session.map(|session| session.run(watch)) {
            Err(error) => (error, false),
            Ok(Ended { ending: Ending::Owns(crash), session, guest, paused, stats, .. }) => {
                let responder = Responder::start(reception, config.journal_directory.clone());
                let owned = Owned { vm, session, guest, paused, crash, stats, responder };
                return Received::Owns(Box::new(owned));
            }
            Ok(Ended { ending: Ending::Stuck(error), .. }) => (error, true),
            // A guest that the source may not send does not count as a failed attempt.
            Ok(Ended {
                ending: Ending::Refused(error), successor: next, stopped: false, ..
            }) if is_unauthorised(&error) => {
                reception.tell_of(&Notice::turned_away(&peer, &error));
                successor = next;
                continue;
            }
            Ok(Ended {
                ending: Ending::Aborted(error) | Ending::Refused(error),
                successor: next,
                stopped,
                ..
            }) => {
                successor = next;
                (error, stopped)
            }
        };
        let (error, last) = failure;
        if last || config.once || vm.is_spent() {
            return Received::Nothing { vm, error };
        }
        watch(&Notice::AttemptFailed { reason: chain(&error) });
    }
}

/// Waits for a source that wants to migrate a guest, and answers all other connections.
fn await_source(
    vm: &mut impl DestinationVm,
    reception: &Reception,
    directory: &std::path::Path,
    stop: &Stop,
    watch: &mut dyn FnMut(&Notice),
) -> Result<Connection, MigrateError> {
    loop {
        crossbeam_channel::select! {
            recv(reception.arrivals) -> arrival => match arrival {
                Ok(Arrival::Control(connection)) => return Ok(connection),
                Ok(Arrival::TurnedAway(notice)) => watch(&notice),
                Ok(Arrival::Compare { guest, answer }) => {
                    // The peer may have stopped waiting.
                    let _ = answer.send(compare(vm, &guest));
                }
                Ok(other) => {
                    if let Some(notice) = answer_idle(other, directory, HelloStatus::Busy) {
                        reception.tell_of(&notice);
                    }
                }
                Err(_) => {
                    let source = std::io::Error::other("the listening socket fails");
                    return Err(MigrateError::Local { action: "listen", source });
                }
            },
            recv(stop.1) -> _ => {
                return Err(MigrateError::Cancelled { during: "the wait for a source" });
            }
        }
    }
}

/// Answers a probe's question about a machine.
fn compare(vm: &mut impl DestinationVm, guest: &GuestDescription) -> Compared {
    match vm.would_take(guest) {
        None => Compared::Unknown("the VMM there compares no machines beforehand".into()),
        Some(Ok(())) => Compared::Fits,
        Some(Err(PrepareError::Vm(error))) => Compared::Unknown(chain(&*error)),
        Some(Err(differs)) => Compared::Differs(chain(&differs)),
    }
}

/// Keeps listening while the guest runs: queries of a source in doubt are answered, and a second
/// guest is refused. Ends when dropped.
pub struct Responder {
    stop: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Responder {
    /// Answers queries about the sessions in the journals and accepts no guest. This is for a host
    /// whose guest arrived in an earlier process.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn listen(listener: Listener, config: &DestinationConfig) -> Result<Self, MigrateError> {
        let reception = Reception::open(listener, config).map_err(MigrateError::no_thread)?;
        Ok(Self::start(reception, config.journal_directory.clone()))
    }

    pub(super) fn start(reception: Reception, journal_directory: PathBuf) -> Self {
        let (stop, stopped) = crossbeam_channel::bounded::<()>(0);
        let spawned = std::thread::Builder::new().name("responder".into()).spawn(move || {
            loop {
                crossbeam_channel::select! {
                    recv(reception.arrivals) -> arrival => match arrival {
                        Ok(arrival) => {
                            let busy = HelloStatus::Busy;
                            // No observer is left; the peer receives the answer itself.
                            let _ = answer_idle(arrival, &journal_directory, busy);
                        }
                        Err(_) => return,
                    },
                    recv(stopped) -> _ => return,
                }
            }
        });
        // Without this thread no query is answered. The source then stays in doubt until a restart
        // here or `vmferry resolve` there, and the guest is safe.
        Self { stop, thread: spawned.ok() }
    }

    /// Listens for at least this time, then ends.
    pub fn linger(self, time: Duration) {
        let (_keep, never) = crossbeam_channel::bounded::<()>(0);
        let _ = never.recv_timeout(time);
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        let (closed, _) = crossbeam_channel::bounded(0);
        drop(std::mem::replace(&mut self.stop, closed));
        if let Some(thread) = self.thread.take() {
            // A panic there has already ended it.
            let _ = thread.join();
        }
    }
}

fn is_unauthorised(error: &MigrateError) -> bool {
    matches!(error, MigrateError::Refused { reason, .. } if reason.code == ReasonCode::Unauthorized)
}

/// Answers an arrival while no session is active.
fn answer_idle(
    arrival: Arrival,
    directory: &std::path::Path,
    on_control: HelloStatus,
) -> Option<Notice> {
    match arrival {
        Arrival::Control(connection) => {
            let peer = connection.peer.address.clone();
            turn_away(connection, on_control);
            Some(Notice::TurnedAway { peer, reason: "a guest runs here already".into() })
        }
        Arrival::Data { connection, .. } => {
            let peer = connection.peer.address.clone();
            turn_away(connection, HelloStatus::BadToken);
            Some(Notice::TurnedAway { peer, reason: "a data channel of no session".into() })
        }
        Arrival::Resume { connection, .. } => {
            let peer = connection.peer.address.clone();
            turn_away(connection, HelloStatus::BadToken);
            Some(Notice::TurnedAway {
                peer,
                reason: "it goes on with a session that is over".into(),
            })
        }
        Arrival::Query { session, connection, .. } => {
            let peer = connection.peer.address.clone();
            let answered = give_word(directory, session, connection);
            answered.err().map(|error| Notice::turned_away(&peer, &error))
        }
        Arrival::TurnedAway(notice) => Some(notice),
        Arrival::Compare { answer, .. } => {
            // The peer may have stopped waiting.
            let _ = answer.send(Compared::Unknown("a guest runs there already".into()));
            None
        }
    }
}
