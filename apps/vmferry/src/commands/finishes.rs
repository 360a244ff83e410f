//! The journals of libvirt's Finish on this host: which host has each guest, and on what evidence.

mod words;

use std::path::Path;

use serde_json::{Value, json};
use uuid::Uuid;
use vmferry_handover::journal::{JournalError, Side, record_files};
use vmferry_handover::{
    DestinationFinish, DomainSeen, FinishEntry, FinishOwner, FinishRecord, GuestIdentity,
    SessionId, SourceFinish,
};

use super::daemon::domains::DomainLook;
use crate::exit::{Code, Failure};
pub use words::{advice, says};

/// A session in the journals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Its number.
    pub session: SessionId,
    /// What the journal promises.
    pub state: FinishState,
    /// The guest, by its name at the destination.
    pub guest: GuestIdentity,
    /// The other host.
    pub peer: String,
    /// The records with their times.
    pub entries: Vec<FinishEntry>,
    /// Whether a process leads the session now.
    pub led: bool,
}

/// What this host has promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishState {
    /// As the source.
    Source(SourceFinish),
    /// As the destination.
    Destination(DestinationFinish),
}

/// A journal that can't be read.
#[derive(Debug)]
pub struct UnreadableFinish {
    /// Its session.
    pub session: SessionId,
    /// Its side.
    pub side: Side,
    /// Why.
    pub reason: String,
}

/// All sessions of a directory.
#[derive(Debug, Default)]
pub struct Finishes {
    /// Those that can be read, the oldest first.
    pub all: Vec<Finish>,
    /// The others.
    pub unreadable: Vec<UnreadableFinish>,
}

impl FinishState {
    /// The side.
    pub fn side(self) -> Side {
        match self {
            Self::Source(_) => Side::Source,
            Self::Destination(_) => Side::Destination,
        }
    }

    /// What the records say; `None` if there are none.
    fn of(side: Side, entries: &[FinishEntry]) -> Result<Option<Self>, String> {
        let records: Vec<FinishRecord> = entries.iter().map(|one| one.record.clone()).collect();
        let state = match side {
            Side::Source => SourceFinish::recover(&records).map(|state| state.map(Self::Source)),
            Side::Destination => {
                DestinationFinish::recover(&records).map(|state| state.map(Self::Destination))
            }
        };
        state.map_err(|error| error.to_string())
    }
}

impl Finishes {
    /// Reads the journals. Changes nothing.
    pub fn read(directory: &Path) -> Result<Self, Failure> {
        let mut found = Self::default();
        for side in [Side::Source, Side::Destination] {
            let files = record_files::<FinishEntry>(directory, side);
            for file in files.map_err(|error| Failure::of(Code::Internal, error))? {
                let session = file.session;
                match Finish::of(session, side, file.records, file.led) {
                    Ok(finish) => found.all.extend(finish),
                    Err(reason) => {
                        found.unreadable.push(UnreadableFinish { session, side, reason });
                    }
                }
            }
        }
        found.all.sort_by_key(|finish| finish.entries.last().map_or(0, |entry| entry.at));
        Ok(found)
    }

    /// The sessions of a guest by its name, or the session by its number.
    pub fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Finish> {
        let is_it = move |one: &&Finish| one.guest.name == name || one.session.to_string() == name;
        self.all.iter().filter(is_it)
    }

    /// Whether this is the last session of its guest on this host. Only then libvirt's domain of
    /// that UUID is the one that the session was about.
    pub fn is_last(&self, finish: &Finish) -> bool {
        let mut of_guest = self.all.iter().filter(|one| one.guest.uuid == finish.guest.uuid);
        of_guest.next_back().is_some_and(|last| last.session == finish.session)
    }
}

impl Finish {
    fn of(
        session: SessionId,
        side: Side,
        entries: Result<Vec<FinishEntry>, JournalError>,
        led: bool,
    ) -> Result<Option<Self>, String> {
        let entries = entries.map_err(|error| vmferry::chain(&error))?;
        let Some(state) = FinishState::of(side, &entries)? else { return Ok(None) };
        let open = entries.iter().find_map(|entry| match &entry.record {
            FinishRecord::Open { guest, peer, peer_names } => {
                // The source knows the destination by its name in the configuration.
                let name = peer_names.first().unwrap_or(peer).clone();
                Some((guest.clone(), name))
            }
            _ => None,
        });
        let Some((guest, peer)) = open else { return Ok(None) };
        Ok(Some(Self { session, state, guest, peer, entries, led }))
    }

    /// Who has the guest, given what libvirt says.
    pub fn owner(&self, seen: DomainSeen) -> FinishOwner {
        match self.state {
            FinishState::Source(state) => state.owner(),
            FinishState::Destination(state) => state.owner(seen),
        }
    }

    /// Whether nobody on this host knows the word, and nobody waits for it.
    pub fn is_undecided(&self) -> bool {
        matches!(
            self.state,
            FinishState::Source(SourceFinish::Sent)
                | FinishState::Destination(DestinationFinish::Passed)
        )
    }

    /// Whether libvirt of this host, which is the destination, says that the guest runs.
    pub fn runs_here(&self) -> bool {
        matches!(self.state, FinishState::Destination(_))
            && DomainLook::at(self.guest.uuid).seen == DomainSeen::Runs
    }

    /// When the last record was written, in seconds since 1970.
    pub fn last_at(&self) -> u64 {
        self.entries.last().map_or(0, |entry| entry.at)
    }

    /// The session as JSON, with what libvirt says about the guest, if it was asked.
    pub fn to_json(&self, look: Option<&DomainLook>) -> Value {
        let seen = look.map_or(DomainSeen::NoAnswer, |look| look.seen);
        json!({
            "session": self.session,
            "side": self.state.side(),
            "guest": self.guest,
            "peer": self.peer,
            "led": self.led,
            "owner": self.owner(seen),
            "evidence": self.entries.last(),
            "libvirt": look.map(|look| look.said.as_str()),
            "records": self.entries,
            "says": says(self, look),
            "advice": advice(self, look),
        })
    }
}

/// What libvirt says about a guest, asked once for each guest.
#[derive(Debug, Default)]
pub struct Looks(Vec<(Uuid, DomainLook)>);

impl Looks {
    /// Asks libvirt.
    pub fn at(&mut self, uuid: Uuid) -> DomainLook {
        if let Some((_, look)) = self.0.iter().find(|(known, _)| *known == uuid) {
            return look.clone();
        }
        let look = DomainLook::at(uuid);
        self.0.push((uuid, look.clone()));
        look
    }
}

#[cfg(test)]
mod tests;
