//! A host's membership: its agent publishes what the host is and which guests it has.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use crate::etcd::LeaseId;
use crate::fleet::{Fleet, FleetError};
use crate::guest::Guest;
use crate::host::{Host, HostName, Presence};

/// How long a host that is not heard counts as present. Its guests are not affected by that.
const LEASE: Duration = Duration::from_secs(10);

/// The part of the available memory whose change is published.
const MEMORY_STEP: u64 = 16;

/// A host's membership. Its guests and what it says of itself stay published when this is dropped;
/// its presence ends with the lease.
#[derive(Debug)]
pub struct Membership {
    fleet: Arc<Fleet>,
    name: HostName,
    lease: LeaseId,
    presence: Presence,
    host: Host,
    guests: BTreeMap<Uuid, Guest>,
}

impl Membership {
    /// Joins, or joins again: the host's earlier agent may still count as present.
    ///
    /// # Errors
    /// [`FleetError::NameTaken`], or etcd does not answer.
    pub fn begin(fleet: Arc<Fleet>, name: HostName, host: Host) -> Result<Self, FleetError> {
        let presence = Presence { instance: host.instance, memory_available_bytes: None };
        let guests = BTreeMap::new();
        // A host that may not join gets no lease, however often it tries.
        let lease = LeaseId::NONE;
        let mut member = Self { fleet, name, lease, presence, host, guests };
        member.check()?;
        member.check_name()?;
        member.lease = member.fleet.etcd().grant(LEASE)?;
        member.publish_presence()?;
        member.publish_host()?;
        member.read_guests()?;
        Ok(member)
    }

    /// The fleet.
    #[must_use]
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// Checks that the fleet is still the same, and that this host was not declared lost.
    ///
    /// # Errors
    /// It is not the same, it was declared lost, or etcd does not answer.
    pub fn check(&self) -> Result<(), FleetError> {
        match self.fleet.orders(&self.name)?.lost {
            Some(_) => Err(FleetError::DeclaredLost { name: self.name.clone() }),
            None => Ok(()),
        }
    }

    /// Says that the host is there. To be called every few seconds.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn keep(&mut self, memory_available_bytes: Option<u64>) -> Result<(), FleetError> {
        let lives = self.fleet.etcd().keep_alive(self.lease)?;
        if !lives {
            self.lease = self.fleet.etcd().grant(LEASE)?;
        }
        let published = self.presence.memory_available_bytes;
        if !lives || has_changed(published, memory_available_bytes) {
            self.presence.memory_available_bytes = memory_available_bytes;
            self.publish_presence()?;
        }
        Ok(())
    }

    /// Publishes what the host says of itself, if that has changed.
    ///
    /// # Errors
    /// etcd does not answer, or what is there can't be read.
    pub fn describe(&mut self, host: Host) -> Result<(), FleetError> {
        if host != self.host {
            self.host = host;
            self.publish_host()?;
        }
        Ok(())
    }

    /// Publishes the host's guests, and removes those that it does not have any more. Only changes
    /// are written.
    ///
    /// # Errors
    /// etcd does not answer: the next call goes on. Or an object can't be read, and was left alone:
    /// the other guests are published.
    pub fn publish(&mut self, guests: Vec<Guest>) -> Result<(), FleetError> {
        let now: BTreeMap<Uuid, Guest> = guests.into_iter().map(|one| (one.uuid, one)).collect();
        let mut unreadable = None;
        for (uuid, guest) in &now {
            if self.guests.get(uuid) == Some(guest) {
                continue;
            }
            let key = self.guest_key(*uuid);
            match self.fleet.update(&key, |_: Option<&Guest>| Some(guest.clone())) {
                Ok(_) => drop(self.guests.insert(*uuid, guest.clone())),
                Err(error @ FleetError::Object(_)) => unreadable = Some(error),
                Err(error) => return Err(error),
            }
        }
        let gone = self.guests.keys().filter(|uuid| !now.contains_key(uuid));
        for uuid in gone.copied().collect::<Vec<_>>() {
            self.fleet.remove(&self.guest_key(uuid))?;
            self.guests.remove(&uuid);
        }
        unreadable.map_or(Ok(()), Err)
    }

    /// Ends the host's presence at once.
    ///
    /// # Errors
    /// etcd does not answer.
    pub fn end(self) -> Result<(), FleetError> {
        Ok(self.fleet.etcd().revoke(self.lease)?)
    }

    fn key(&self, object: &str) -> String {
        self.fleet.prefix().key(&self.name.key(object))
    }

    fn guest_key(&self, uuid: Uuid) -> String {
        self.key(&format!("guests/{uuid}"))
    }

    fn taken(&self, why: &'static str) -> FleetError {
        FleetError::NameTaken { name: self.name.clone(), why }
    }

    /// A host that has guests is not replaced by another one, also if it is not heard.
    fn check_name(&self) -> Result<(), FleetError> {
        let found = self.fleet.host(&self.name)?;
        let is_other = found.is_some_and(|found| found.instance != self.host.instance);
        if is_other && !self.fleet.list(&self.name.key("guests/"))?.is_empty() {
            return Err(self.taken("which has guests"));
        }
        Ok(())
    }

    fn publish_presence(&self) -> Result<(), FleetError> {
        let ours = &self.presence;
        let published = self.fleet.update_leased(
            &self.key("presence"),
            Some(self.lease),
            |found: Option<&Presence>| match found {
                Some(found) if found.instance != ours.instance => None,
                _ => Some(ours.clone()),
            },
        )?;
        match published {
            Some(found) if found.instance != ours.instance => Err(self.taken("whose daemon runs")),
            _ => Ok(()),
        }
    }

    fn publish_host(&self) -> Result<(), FleetError> {
        self.fleet.update(&self.key("self"), |found: Option<&Host>| {
            (found != Some(&self.host)).then(|| self.host.clone())
        })?;
        Ok(())
    }

    /// What an earlier agent of this host has published is removed or replaced by the first call of
    /// [`publish`](Self::publish).
    fn read_guests(&mut self) -> Result<(), FleetError> {
        for (uuid, _) in self.fleet.list(&self.name.key("guests/"))? {
            let Ok(uuid) = uuid.parse() else { continue };
            // Not what is there, so that it is written again.
            self.guests.insert(uuid, Guest::unknown(uuid));
        }
        Ok(())
    }
}

fn has_changed(published: Option<u64>, now: Option<u64>) -> bool {
    match (published, now) {
        (Some(published), Some(now)) => published.abs_diff(now) > published / MEMORY_STEP,
        (published, now) => published != now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_published_when_it_has_changed_much() {
        assert!(has_changed(None, Some(1)));
        assert!(has_changed(Some(1600), None));
        assert!(!has_changed(Some(1600), Some(1700)));
        assert!(has_changed(Some(1600), Some(1701)));
        assert!(has_changed(Some(1600), Some(1499)));
    }
}
