//! A disk that holds journals and fails on command.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use vmferry_handover::WitnessId;
use vmferry_handover::journal::{Journal, JournalError, Record, Side, decode};
use vmferry_wire::SessionId;

use crate::guest::identity;
use crate::plan::WriteFault;

/// One host's disk, which outlives the host's processes. Clones are the same disk.
#[derive(Clone, Debug)]
pub struct Disk {
    state: Arc<Mutex<State>>,
    /// The side whose journals it holds.
    side: Side,
}

#[derive(Debug, Default)]
struct State {
    files: BTreeMap<[u8; 16], Vec<u8>>,
    writes: u64,
    faults: Vec<(u64, WriteFault, bool)>,
    /// The process must die now: its write was cut off.
    crash: bool,
    lies: bool,
}

impl Disk {
    /// An empty disk of this side's host.
    #[must_use]
    pub fn new(side: Side) -> Self {
        Self { state: Arc::default(), side }
    }

    /// Makes write number `number` fail. With `crash` the process dies with it.
    pub fn fail(&self, number: u64, how: WriteFault, crash: bool) {
        self.state.lock().faults.push((number, how, crash));
    }

    /// From now on the disk acknowledges writes and drops them.
    pub fn lie(&self) {
        self.state.lock().lies = true;
    }

    /// Whether the process that wrote must die. Resets the answer.
    pub fn takes_the_process_along(&self) -> bool {
        std::mem::take(&mut self.state.lock().crash)
    }

    /// Creates the journal of a session with `peer`, and writes its first record.
    ///
    /// # Errors
    /// If the journal exists, or the write fails.
    pub fn create(
        &self,
        session: SessionId,
        peer: &str,
        witness: Option<WitnessId>,
    ) -> Result<SimJournal, JournalError> {
        if self.state.lock().files.insert(session.0, Vec::new()).is_some() {
            return Err(JournalError::Exists { path: path() });
        }
        let mut journal = SimJournal { disk: self.clone(), session, poisoned: false };
        journal.append(&Record::Open {
            guest: identity(),
            peer: peer.to_owned(),
            peer_names: Vec::new(),
            at: 0,
            order: 0,
            process: None,
            witness,
        })?;
        Ok(journal)
    }

    /// Opens a session's journal as a restarted process does.
    ///
    /// # Errors
    /// If it is damaged.
    pub fn reopen(
        &self,
        session: SessionId,
    ) -> Result<Option<(SimJournal, Vec<Record>)>, JournalError> {
        let mut state = self.state.lock();
        let Some(bytes) = state.files.get_mut(&session.0) else { return Ok(None) };
        let (records, whole) = decode(bytes, self.side).map_err(|bad| JournalError::Damaged {
            path: path(),
            line: bad.line,
            reason: bad.reason.to_string(),
        })?;
        bytes.truncate(whole);
        Ok(Some((SimJournal { disk: self.clone(), session, poisoned: false }, records)))
    }

    /// The records of a session's journal.
    #[must_use]
    pub fn records(&self, session: SessionId) -> Vec<Record> {
        let state = self.state.lock();
        let bytes = state.files.get(&session.0).map_or(&[][..], Vec::as_slice);
        decode(bytes, self.side).map_or_else(|_| Vec::new(), |(records, _)| records)
    }
}

/// A session's journal on a simulated disk.
#[derive(Debug)]
pub struct SimJournal {
    disk: Disk,
    session: SessionId,
    poisoned: bool,
}

impl SimJournal {
    /// Accepts records again after a failed write. Returns the whole records.
    ///
    /// # Errors
    /// If the journal is damaged.
    pub fn renew(&mut self) -> Result<Vec<Record>, JournalError> {
        let reopened = self.disk.reopen(self.session)?;
        self.poisoned = false;
        Ok(reopened.map_or_else(Vec::new, |(_, records)| records))
    }
}

impl Journal for SimJournal {
    fn append(&mut self, record: &Record) -> Result<(), JournalError> {
        if self.poisoned {
            return Err(JournalError::Poisoned { path: path() });
        }
        let line = record.encode();
        let mut state = self.disk.state.lock();
        let number = state.writes;
        state.writes += 1;
        let fault = state.faults.iter().find(|(at, ..)| *at == number).copied();
        let kept = match fault {
            Some((_, WriteFault::Lost, _)) => 0,
            Some((_, WriteFault::Torn, _)) => line.len() / 2,
            Some((_, WriteFault::OnDisk, _)) => line.len(),
            None if state.lies => 0,
            None => line.len(),
        };
        if let Some(file) = state.files.get_mut(&self.session.0) {
            file.extend_from_slice(&line[..kept]);
        }
        let Some((_, _, crash)) = fault else { return Ok(()) };
        state.crash |= crash;
        self.poisoned = true;
        let source = io::Error::other("the simulated disk fails");
        Err(JournalError::Io { action: "write", path: path(), source })
    }
}

fn path() -> PathBuf {
    "simulated".into()
}
