//! The guests that libvirt moves through this daemon.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use uuid::Uuid;
use vmferry_handover::{OperatorWord, SessionId};
use vmferry_libvirt_rpc::{Call, Guest, Reply};

use super::arrivals::Arrivals;
use super::reserved::ReservedSockets;
use super::settle::Decision;
use crate::event::Side;

/// Migrations that have ended and are still listed.
const MAX_ENDED: usize = 64;

/// How far a migration has come, by what libvirt said on the RPC connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The destination's libvirt is starting QEMU.
    Preparing,
    /// Disks and memory are copied, or about to be.
    Copying,
    /// The destination's libvirt has been told to run the guest, and has not answered.
    Finishing,
    /// The destination's libvirt has said that the guest runs there.
    Moved,
    /// The guest was not moved. Contains libvirt's error, or what happened to the connection.
    Failed(String),
    /// The connection ended after the destination's libvirt had been told to run the guest and
    /// before its answer came.
    Unanswered,
}

/// A migration in the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationStatus {
    /// The guest's name at the destination.
    pub guest: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// The other host.
    pub peer: String,
    /// Which side this host is.
    pub side: Side,
    /// How far it has come.
    pub phase: Phase,
    /// When it began.
    pub begun: Instant,
}

/// All migrations of a daemon.
#[derive(Debug, Default)]
pub(crate) struct Migrations {
    all: Mutex<Vec<Migration>>,
    doubts: Mutex<Vec<Doubt>>,
    /// The sockets of guests that arrive.
    pub sockets: ReservedSockets,
    /// What this host has promised as the destination.
    pub arrivals: Arrivals,
    /// Connections whose stream has failed, on which libvirt's answer to a Finish is awaited.
    awaited: Mutex<HashSet<u64>>,
}

/// A Finish whose answer is lost.
#[derive(Debug)]
struct Doubt {
    session: SessionId,
    status: DoubtStatus,
    decision: Arc<Decision>,
}

/// A guest of this host that may run at another one, because the answer is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoubtStatus {
    /// The session.
    pub session: SessionId,
    /// The guest's name.
    pub guest: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// The other host.
    pub peer: String,
}

/// A migration.
#[derive(Clone, Debug)]
struct Migration {
    /// Distinguishes connections.
    session: u64,
    status: MigrationStatus,
}

impl Migrations {
    /// All migrations, the oldest first.
    pub fn list(&self) -> Vec<MigrationStatus> {
        self.all.lock().iter().map(|migration| migration.status.clone()).collect()
    }

    /// A Finish is in doubt. An operator may decide it.
    pub fn in_doubt(&self, session: SessionId, guest: &Guest, peer: &str) -> Arc<Decision> {
        let Guest { name, uuid } = guest.clone();
        let status = DoubtStatus { session, guest: name, uuid, peer: peer.to_owned() };
        let decision = Arc::new(Decision::default());
        self.doubts.lock().push(Doubt { session, status, decision: Arc::clone(&decision) });
        decision
    }

    /// The Finish is in doubt no longer.
    pub fn settled(&self, session: SessionId) {
        self.doubts.lock().retain(|doubt| doubt.session != session);
    }

    /// All that are in doubt.
    pub fn doubts(&self) -> Vec<DoubtStatus> {
        self.doubts.lock().iter().map(|doubt| doubt.status.clone()).collect()
    }

    /// An operator decides. Returns whether the session is in doubt.
    pub fn decide(&self, session: SessionId, word: OperatorWord) -> bool {
        let doubts = self.doubts.lock();
        let doubt = doubts.iter().find(|doubt| doubt.session == session);
        doubt.map(|doubt| doubt.decision.set(word)).is_some()
    }

    /// An answer is awaited on a connection whose stream has failed.
    pub fn awaits(&self, session: u64) {
        self.awaited.lock().insert(session);
    }

    /// It is not awaited any more.
    pub fn awaits_no_more(&self, session: u64) {
        self.awaited.lock().remove(&session);
    }

    /// The number of such connections.
    pub fn awaited(&self) -> usize {
        self.awaited.lock().len()
    }

    /// The name of the guest of a connection, empty if there is none.
    pub fn guest_of(&self, session: u64) -> String {
        let all = self.all.lock();
        let its = all.iter().rfind(|migration| migration.session == session);
        its.map_or_else(String::new, |migration| migration.status.guest.clone())
    }

    /// A call is about to be passed on.
    pub fn called(&self, session: u64, peer: &str, side: Side, call: &Call) {
        let mut all = self.all.lock();
        match call {
            Call::Prepare(_) => {
                let Guest { name, uuid } = call.guest().clone();
                let (peer, begun) = (peer.to_owned(), Instant::now());
                let status = MigrationStatus {
                    guest: name,
                    uuid,
                    peer,
                    side,
                    phase: Phase::Preparing,
                    begun,
                };
                all.push(Migration { session, status });
                let ended = all.iter().filter(|one| one.status.phase.is_end()).count();
                if ended > MAX_ENDED
                    && let Some(oldest) = all.iter().position(|one| one.status.phase.is_end())
                {
                    all.remove(oldest);
                }
            }
            Call::Finish(finish) => {
                for one in all.iter_mut().filter(|one| one.is_of(session)) {
                    if one.status.guest == call.guest().name && !finish.cancelled {
                        one.status.phase = Phase::Finishing;
                    }
                }
            }
        }
    }

    /// A reply has come. Returns the migrations that have changed.
    pub fn replied(&self, session: u64, reply: &Reply) -> Vec<MigrationStatus> {
        let phase = match reply {
            Reply::Prepare(reply) => match &reply.result {
                Ok(()) => Phase::Copying,
                Err(error) => Phase::Failed(error.message.clone()),
            },
            Reply::Finish(reply) => match &reply.result {
                Ok(()) => Phase::Moved,
                Err(error) => Phase::Failed(error.message.clone()),
            },
        };
        self.set(session, &phase)
    }

    /// The connection has ended. Returns the migrations that have changed.
    pub fn ended(&self, session: u64) -> Vec<MigrationStatus> {
        let mut all = self.all.lock();
        let mut changed = Vec::new();
        for one in all.iter_mut().filter(|one| one.is_of(session)) {
            one.status.phase = match one.status.phase {
                Phase::Finishing => Phase::Unanswered,
                _ => Phase::Failed("libvirt's connection ended before the migration did".into()),
            };
            changed.push(one.status.clone());
        }
        self.sockets.ended(session);
        changed
    }

    fn set(&self, session: u64, phase: &Phase) -> Vec<MigrationStatus> {
        let mut all = self.all.lock();
        let mut changed = Vec::new();
        for one in all.iter_mut().filter(|one| one.is_of(session)) {
            one.status.phase = phase.clone();
            changed.push(one.status.clone());
        }
        changed
    }
}

impl Migration {
    /// Whether it is under way on this connection. libvirt moves one guest on each.
    fn is_of(&self, session: u64) -> bool {
        self.session == session && !self.status.phase.is_end()
    }
}

impl Phase {
    fn is_end(&self) -> bool {
        matches!(self, Self::Moved | Self::Failed(_) | Self::Unanswered)
    }
}
