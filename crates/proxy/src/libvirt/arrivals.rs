//! What this host has promised as the destination, for all sessions.
//!
//! A session is led, and its journal locked, while its connection to libvirt is open, while a word
//! is written or said, and while its journal can't be written. At all other times `vmferry resolve`
//! may lead it.

mod old;

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use vmferry_handover::journal::{JournalError, Side as JournalSide, records_of};
use vmferry_handover::{
    DestinationAction, DestinationFinish, DomainSeen, FinishAnswer, FinishEntry, FinishRecord,
    FinishWord, GuestIdentity, SessionId,
};
use vmferry_libvirt_rpc::Guest;
use vmferry_transport::PeerIdentity;

use super::ledger::{Ledger, LedgerError};

/// Asks this host's libvirt about a domain, on a connection of its own.
pub trait Domains: std::fmt::Debug + Send + Sync {
    /// The state of the domain with this UUID.
    fn look(&self, guest: &GuestIdentity) -> DomainState;
}

/// What this host's libvirt says about a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DomainState {
    /// What it says about the domain's Finish. A domain in post-copy waits, although it runs: after
    /// a successful answer the source's libvirt would kill the QEMU that has the rest of its memory.
    Seen(DomainSeen),
    /// The domain runs, and its post-copy has failed.
    PostCopyFailed,
}

/// The sessions that this daemon leads.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    led: Mutex<HashMap<SessionId, Arc<Mutex<Arrival>>>>,
    /// The number of sessions that have begun.
    begun: AtomicU64,
}

/// A session at the destination.
#[derive(Debug)]
struct Arrival {
    ledger: Ledger<DestinationFinish>,
    guest: GuestIdentity,
    /// The source's names, of which no other host may ask.
    names: Vec<String>,
    /// The connection to libvirt on which the Finish is written is open.
    connected: bool,
    /// The word, while it can't be written.
    unwritten: Option<FinishWord>,
}

/// A word that could not be written.
pub(crate) struct Unwritten {
    pub session: SessionId,
    pub guest: String,
    pub error: JournalError,
}

impl Arrivals {
    /// Begins a session.
    pub fn begin(
        &self,
        directory: &Path,
        session: SessionId,
        guest: &Guest,
        peer: &PeerIdentity,
    ) -> Result<(), JournalError> {
        if self.begun.fetch_add(1, Ordering::Relaxed).is_multiple_of(old::INTERVAL) {
            // What can't be removed now is tried again.
            let _ = old::remove_old(directory, old::MAX_OF_ONE);
        }
        let names = (peer.address.as_str(), &peer.names[..]);
        let ledger = Ledger::open(directory, session, DestinationFinish::NotPassed, guest, names)?;
        let guest = GuestIdentity { uuid: guest.uuid, name: guest.name.clone() };
        let names = peer.names.clone();
        let arrival = Arrival { ledger, guest, names, connected: true, unwritten: None };
        self.led.lock().insert(session, Arc::new(Mutex::new(arrival)));
        Ok(())
    }

    fn get(&self, session: SessionId) -> Option<Arc<Mutex<Arrival>>> {
        self.led.lock().get(&session).cloned()
    }

    /// Whether the session's Finish may be written to libvirt.
    pub fn pass(&self, session: SessionId) -> Result<bool, LedgerError> {
        let Some(arrival) = self.get(session) else { return Ok(false) };
        let mut arrival = arrival.lock();
        arrival.ledger.mend()?;
        let step = arrival.ledger.state().pass()?;
        match arrival.ledger.take(step) {
            Ok(action) => Ok(action == DestinationAction::Pass),
            Err(error) => {
                // PASSED may be on disk, and the Finish is not passed on.
                arrival.unwritten = Some(FinishWord::DoesNotRun);
                Err(error)
            }
        }
    }

    /// libvirt has replied to the session's Finish, or the Finish could not be written to it.
    ///
    /// # Errors
    /// The word is not in the journal yet. It is tried again.
    pub fn reply(&self, session: SessionId, word: FinishWord) -> Result<(), LedgerError> {
        let Some(arrival) = self.get(session) else { return Ok(()) };
        let mut arrival = arrival.lock();
        arrival.unwritten = Some(word);
        arrival.write_word()
    }

    /// The connection to libvirt has ended.
    pub fn disconnected(&self, session: SessionId) {
        if let Some(arrival) = self.get(session) {
            arrival.lock().connected = false;
            self.let_go(session, &arrival);
        }
    }

    /// Stops leading a session that this process knows no more about than its journal.
    fn let_go(&self, session: SessionId, arrival: &Mutex<Arrival>) {
        let mut led = self.led.lock();
        // Whoever uses it now lets it go afterwards.
        let Some(arrival) = arrival.try_lock() else { return };
        if !arrival.connected && arrival.unwritten.is_none() && arrival.ledger.is_sound() {
            led.remove(&session);
        }
    }

    /// Tries the journals that could not be written again. Returns those that failed once more.
    pub fn retry(&self) -> Vec<Unwritten> {
        let led: Vec<_> = self.led.lock().iter().map(|(key, one)| (*key, one.clone())).collect();
        let mut failed = Vec::new();
        for (session, arrival) in led {
            // A session that is used now is tried by its user.
            let Some(mut tried) = arrival.try_lock() else { continue };
            if tried.unwritten.is_none() && tried.ledger.is_sound() {
                continue;
            }
            let written = tried.write_word().and_then(|()| tried.ledger.mend());
            let guest = tried.guest.name.clone();
            drop(tried);
            match written {
                Err(LedgerError::Journal(error)) => {
                    failed.push(Unwritten { session, guest, error });
                }
                Err(_) => {}
                Ok(()) => self.let_go(session, &arrival),
            }
        }
        failed
    }

    /// A source asks for the word about its session.
    pub fn asked(
        &self,
        directory: &Path,
        session: SessionId,
        peer: &PeerIdentity,
        domains: Option<&dyn Domains>,
    ) -> Result<FinishAnswer, LedgerError> {
        let unknown = DomainState::Seen(DomainSeen::NoAnswer);
        let look = |guest: &GuestIdentity| domains.map_or(unknown, |all| all.look(guest));
        if let Some(arrival) = self.get(session) {
            let answer = arrival.lock().answer(peer, look);
            self.let_go(session, &arrival);
            return answer;
        }
        let side = JournalSide::Destination;
        let Some(entries) = records_of::<FinishEntry>(directory, session, side)? else {
            return Ok(FinishAnswer::Unknown);
        };
        let records: Vec<_> = entries.into_iter().map(|entry| entry.record).collect();
        let mut seen = None;
        if DestinationFinish::recover(&records)? == Some(DestinationFinish::Passed)
            && let Some((guest, names)) = opened(records)
        {
            if !is_host(&names, peer) {
                return Ok(FinishAnswer::Unknown);
            }
            // libvirt may take its time, and meanwhile an operator may decide.
            let now = look(&guest);
            let says_it = DomainState::Seen(DomainSeen::Runs);
            if now != says_it && now != DomainState::PostCopyFailed {
                return Ok(FinishAnswer::AskAgain);
            }
            seen = Some(now);
        }
        let Some(arrival) = self.recover(directory, session)? else {
            return Ok(FinishAnswer::Unknown);
        };
        let look = |guest: &GuestIdentity| seen.unwrap_or_else(|| look(guest));
        let answer = arrival.lock().answer(peer, look);
        self.let_go(session, &arrival);
        answer
    }

    /// Leads a session that an earlier connection or daemon has left in the journals.
    fn recover(
        &self,
        directory: &Path,
        session: SessionId,
    ) -> Result<Option<Arc<Mutex<Arrival>>>, LedgerError> {
        let reopened = match Ledger::reopen(directory, session) {
            Err(LedgerError::Journal(JournalError::Io { source, .. }))
                if source.kind() == io::ErrorKind::NotFound =>
            {
                None
            }
            reopened => reopened?,
        };
        let Some((ledger, records)) = reopened else { return Ok(None) };
        let Some((guest, names)) = opened(records) else { return Ok(None) };
        let arrival = Arrival { ledger, guest, names, connected: false, unwritten: None };
        let arrival = Arc::new(Mutex::new(arrival));
        self.led.lock().insert(session, Arc::clone(&arrival));
        Ok(Some(arrival))
    }
}

/// The guest, and the names of its source.
fn opened(records: Vec<FinishRecord>) -> Option<(GuestIdentity, Vec<String>)> {
    records.into_iter().find_map(|record| match record {
        FinishRecord::Open { guest, peer_names, .. } => Some((guest, peer_names)),
        _ => None,
    })
}

impl Arrival {
    /// Writes the word that this process knows and the journal does not have.
    fn write_word(&mut self) -> Result<(), LedgerError> {
        let Some(word) = self.unwritten else { return Ok(()) };
        self.ledger.mend()?;
        // If PASSED is not on disk, nothing was promised.
        if self.ledger.state() != DestinationFinish::NotPassed {
            let step = self.ledger.state().reply(word)?;
            self.ledger.take(step)?;
        }
        self.unwritten = None;
        Ok(())
    }

    fn answer(
        &mut self,
        peer: &PeerIdentity,
        look: impl FnOnce(&GuestIdentity) -> DomainState,
    ) -> Result<FinishAnswer, LedgerError> {
        if !is_host(&self.names, peer) {
            return Ok(FinishAnswer::Unknown);
        }
        self.write_word()?;
        self.ledger.mend()?;
        let step = self.ledger.state().asked();
        match self.ledger.take(step)? {
            DestinationAction::Answer(answer) => Ok(answer),
            // The reply will come.
            DestinationAction::Look if self.connected => Ok(FinishAnswer::AskAgain),
            DestinationAction::Look => {
                let step = match look(&self.guest) {
                    DomainState::Seen(seen) => self.ledger.state().looked(seen)?,
                    // libvirt's own reply is an error then. The source's libvirt does not resume
                    // its guest after it, but lets somebody resume the post-copy.
                    DomainState::PostCopyFailed => {
                        let failed = self.ledger.state().reply(FinishWord::DoesNotRun)?;
                        self.ledger.take(failed)?;
                        self.ledger.state().asked()
                    }
                };
                match self.ledger.take(step)? {
                    DestinationAction::Answer(answer) => Ok(answer),
                    _ => Ok(FinishAnswer::AskAgain),
                }
            }
            _ => Ok(FinishAnswer::AskAgain),
        }
    }
}

/// Whether a peer is the host that had these names. A renewed certificate may have other addresses,
/// but has the same first name.
fn is_host(names: &[String], peer: &PeerIdentity) -> bool {
    names.first() == peer.names.first()
}

#[cfg(test)]
mod tests;
