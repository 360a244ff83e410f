//! What this host has promised about each guest's Finish, in journals.
//!
//! The step functions of [`vmferry_handover`] decide; a ledger writes their records before it says
//! what to do. The model in `testing/model` explores all that can happen between the hosts.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use vmferry_handover::journal::{JournalError, RecordFile, Side as JournalSide, record_files};
use vmferry_handover::{
    DestinationAction, DestinationFinish, DomainSeen, FinishAnswer, FinishError, FinishRecord,
    FinishStep, FinishWord, GuestIdentity, OperatorWord, SessionId, SourceAction, SourceFinish,
};
use vmferry_libvirt_rpc::Guest;
use vmferry_transport::PeerIdentity;

/// Asks this host's libvirt about a domain, on a connection of its own.
pub trait Domains: std::fmt::Debug + Send + Sync {
    /// The state of the domain with this UUID.
    fn look(&self, guest: &GuestIdentity) -> DomainSeen;
}

/// Why a step was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The record may or may not be on disk, so nothing was done.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The step is against the rules.
    #[error(transparent)]
    Finish(#[from] FinishError),
}

/// A session's state with its journal.
#[derive(Debug)]
pub(crate) struct Ledger<S> {
    state: S,
    file: RecordFile<FinishRecord>,
}

impl<S: Copy> Ledger<S> {
    /// Begins the session's journal.
    fn open(
        directory: &Path,
        session: SessionId,
        side: JournalSide,
        state: S,
        guest: &Guest,
        (peer, peer_names): (&str, &[String]),
    ) -> Result<Self, JournalError> {
        let mut file = RecordFile::create(directory, session, side)?;
        let at = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        file.write(&FinishRecord::Open {
            guest: GuestIdentity { uuid: guest.uuid, name: guest.name.clone() },
            peer: peer.to_owned(),
            peer_names: peer_names.to_vec(),
            at,
        })?;
        Ok(Self { state, file })
    }

    fn take<A>(&mut self, step: FinishStep<S, A>) -> Result<A, JournalError> {
        if let Some(record) = &step.journal {
            self.file.write(record)?;
        }
        self.state = step.state;
        Ok(step.action)
    }
}

/// The source's side of a session.
pub(crate) type SourceLedger = Ledger<SourceFinish>;

impl SourceLedger {
    pub fn begin(
        directory: &Path,
        session: SessionId,
        guest: &Guest,
        peer: &str,
    ) -> Result<Self, JournalError> {
        let (side, state) = (JournalSide::Source, SourceFinish::NotSent);
        Self::open(directory, session, side, state, guest, (peer, &[]))
    }

    /// The Finish may be sent on return.
    pub fn send(&mut self) -> Result<(), LedgerError> {
        let step = self.state.send()?;
        self.take(step)?;
        Ok(())
    }

    /// What to do after this answer.
    pub fn hear(&mut self, answer: FinishAnswer) -> Result<SourceAction, LedgerError> {
        let step = self.state.hear(answer)?;
        Ok(self.take(step)?)
    }

    /// What to do after an operator's decision.
    pub fn operator(&mut self, word: OperatorWord) -> Result<SourceAction, LedgerError> {
        let step = self.state.operator(word)?;
        Ok(self.take(step)?)
    }

    /// What to do after the link was lost, or a restart.
    pub fn resumed(&self) -> SourceAction {
        self.state.resumed()
    }
}

/// A session of a source that an earlier daemon has left.
pub(crate) struct Recovered {
    pub ledger: SourceLedger,
    pub guest: GuestIdentity,
    pub peer: String,
}

impl Recovered {
    /// Opens the journal of a session.
    pub fn open(directory: &Path, session: SessionId) -> Result<Option<Self>, LedgerError> {
        let (file, records) = RecordFile::reopen(directory, session, JournalSide::Source)?;
        let Some(state) = SourceFinish::recover(&records)? else { return Ok(None) };
        let open = records.into_iter().find_map(|record| match record {
            FinishRecord::Open { guest, peer, .. } => Some((guest, peer)),
            _ => None,
        });
        let ledger = Ledger { state, file };
        Ok(open.map(|(guest, peer)| Self { ledger, guest, peer }))
    }
}

/// The destination's side of all sessions.
#[derive(Debug, Default)]
pub(crate) struct DestinationLedgers {
    known: Mutex<HashMap<SessionId, Arc<Mutex<Arrival>>>>,
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
}

impl DestinationLedgers {
    /// Begins a session.
    pub fn begin(
        &self,
        directory: &Path,
        session: SessionId,
        guest: &Guest,
        peer: &PeerIdentity,
    ) -> Result<(), JournalError> {
        let (side, state) = (JournalSide::Destination, DestinationFinish::NotPassed);
        let names = (peer.address.as_str(), &peer.names[..]);
        let ledger = Ledger::open(directory, session, side, state, guest, names)?;
        let guest = GuestIdentity { uuid: guest.uuid, name: guest.name.clone() };
        let arrival = Arrival { ledger, guest, names: peer.names.clone(), connected: true };
        self.known.lock().insert(session, Arc::new(Mutex::new(arrival)));
        Ok(())
    }

    fn get(&self, session: SessionId) -> Option<Arc<Mutex<Arrival>>> {
        self.known.lock().get(&session).cloned()
    }

    /// Whether the session's Finish may be written to libvirt.
    pub fn pass(&self, session: SessionId) -> Result<bool, LedgerError> {
        let Some(arrival) = self.get(session) else { return Ok(false) };
        let ledger = &mut arrival.lock().ledger;
        let step = ledger.state.pass()?;
        Ok(ledger.take(step)? == DestinationAction::Pass)
    }

    /// libvirt has replied to the session's Finish.
    pub fn reply(&self, session: SessionId, word: FinishWord) -> Result<(), LedgerError> {
        let Some(arrival) = self.get(session) else { return Ok(()) };
        let ledger = &mut arrival.lock().ledger;
        let step = ledger.state.reply(word)?;
        ledger.take(step)?;
        Ok(())
    }

    /// The connection to libvirt has ended.
    pub fn disconnected(&self, session: SessionId) {
        if let Some(arrival) = self.get(session) {
            arrival.lock().connected = false;
        }
    }

    /// A source asks for the word about its session.
    pub fn asked(
        &self,
        directory: &Path,
        session: SessionId,
        peer: &PeerIdentity,
        domains: Option<&dyn Domains>,
    ) -> Result<FinishAnswer, LedgerError> {
        let arrival = match self.get(session) {
            Some(arrival) => arrival,
            None => match self.recover(directory, session)? {
                Some(arrival) => arrival,
                None => return Ok(FinishAnswer::Unknown),
            },
        };
        let mut arrival = arrival.lock();
        if arrival.names != peer.names {
            return Ok(FinishAnswer::Unknown);
        }
        let step = arrival.ledger.state.asked();
        match arrival.ledger.take(step)? {
            DestinationAction::Answer(answer) => Ok(answer),
            // The reply will come.
            DestinationAction::Look if arrival.connected => Ok(FinishAnswer::AskAgain),
            DestinationAction::Look => {
                let seen = domains.map_or(DomainSeen::NoAnswer, |all| all.look(&arrival.guest));
                let step = arrival.ledger.state.looked(seen)?;
                match arrival.ledger.take(step)? {
                    DestinationAction::Answer(answer) => Ok(answer),
                    _ => Ok(FinishAnswer::AskAgain),
                }
            }
            _ => Ok(FinishAnswer::AskAgain),
        }
    }

    /// A session that an earlier daemon has left in the journals.
    fn recover(
        &self,
        directory: &Path,
        session: SessionId,
    ) -> Result<Option<Arc<Mutex<Arrival>>>, LedgerError> {
        let side = JournalSide::Destination;
        let known = record_files::<FinishRecord>(directory, side)?;
        if !known.iter().any(|one| one.session == session) {
            return Ok(None);
        }
        let (file, records) = RecordFile::reopen(directory, session, side)?;
        let Some(state) = DestinationFinish::recover(&records)? else { return Ok(None) };
        let open = records.into_iter().find_map(|record| match record {
            FinishRecord::Open { guest, peer_names, .. } => Some((guest, peer_names)),
            _ => None,
        });
        let Some((guest, names)) = open else { return Ok(None) };
        let ledger = Ledger { state, file };
        let arrival = Arc::new(Mutex::new(Arrival { ledger, guest, names, connected: false }));
        self.known.lock().insert(session, Arc::clone(&arrival));
        Ok(Some(arrival))
    }
}
