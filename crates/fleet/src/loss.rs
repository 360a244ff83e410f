//! Hosts that were declared lost: an operator has fenced them, so nothing runs there any more.

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vmferry::witness::{Register, WitnessRequest};

use crate::fleet::{Fleet, FleetError};
use crate::guest::GuestPhase;
use crate::host::{HostName, HostOrders, HostView};
use crate::migration::{Migration, MigrationPhase};
use crate::witness::Session;

/// That a host was fenced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loss {
    /// When, in seconds since 1970.
    pub at: u64,
    /// The command that has fenced it.
    pub fence: String,
}

/// A guest of a host that was declared lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LostGuest {
    /// Its UUID.
    pub uuid: Uuid,
    /// Its name.
    pub name: String,
    /// What has become of it.
    #[serde(flatten)]
    pub fate: Fate,
}

/// What has become of a guest of a lost host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "fate", rename_all = "kebab-case")]
pub enum Fate {
    /// It has ended with its host. No handover that began before gives it to another one, so it may
    /// be started elsewhere from its disks.
    Free,
    /// Another host has it.
    Elsewhere {
        /// That host.
        host: HostName,
    },
    /// Another host has it, and it lacks pages that the lost host had.
    Lacking {
        /// That host.
        host: HostName,
    },
    /// Another host has claimed it, and has not said yet whether it runs there.
    Claimed {
        /// That host.
        host: HostName,
    },
    /// It was on its way to the lost host, and the host that has sent it does not know whether it
    /// has run there; or that host's VMM does not answer.
    InDoubt {
        /// The host that has sent it.
        host: HostName,
    },
}

impl Fate {
    /// Whether it is known which host has the guest, or that none has it.
    #[must_use]
    pub fn is_decided(&self) -> bool {
        !matches!(self, Self::Claimed { .. } | Self::InDoubt { .. })
    }
}

impl Fleet {
    /// Declares a host lost, after it was fenced: what it was sending is not claimed any more, and
    /// its agent can't join until [`readmit`](Self::readmit). May be repeated. Returns what has
    /// become of the guests that the host had published. They stay published until its agent has
    /// joined again.
    ///
    /// # Errors
    /// There is no such host, etcd does not answer, or an object can't be read. Then it may be done
    /// in part: it must be repeated.
    pub fn declare_lost(&self, name: &HostName, loss: &Loss) -> Result<Vec<LostGuest>, FleetError> {
        self.order(name, |found| {
            let lost = found.lost.clone().or_else(|| Some(loss.clone()));
            HostOrders { lost, ..found.clone() }
        })?;
        let mut hosts = self.hosts()?;
        let lost = hosts.extract_if(.., |view| view.name == *name).flat_map(|view| view.guests);
        let guests = lost.map(|guest| guest.map(|guest| (guest.uuid, guest.name)));
        let guests = guests.collect::<Result<Vec<_>, _>>()?;
        let mut sessions = self.sessions()?;
        // First of all: what another host has not claimed by now, it never will. The session of a
        // guest that runs on another host is one of that host's.
        for (key, session, revision) in &mut sessions {
            let is_ours = guests.iter().any(|(uuid, _)| *uuid == session.guest)
                && !on(&hosts, session.guest).any(|(_, phase)| phase.is_here());
            let is_leaving = is_ours && session.destination != *name;
            if is_leaving && session.register == Register::Open {
                session.register = self.ask(key, Some(WitnessRequest::Free))?;
                *revision = i64::MAX;
            }
        }
        let mut fates = Vec::new();
        for (uuid, guest_name) in guests {
            let of_guest = sessions.iter().filter(|(_, session, _)| session.guest == uuid);
            let fate = fate(name, uuid, &hosts, of_guest);
            fates.push(LostGuest { uuid, name: guest_name, fate });
        }
        self.end_migrations(name, &fates)?;
        Ok(fates)
    }

    /// Lets a host that was declared lost join again. Returns whether it was.
    ///
    /// # Errors
    /// There is no such host, or etcd does not answer.
    pub fn readmit(&self, name: &HostName) -> Result<bool, FleetError> {
        self.order(name, |found| HostOrders { lost: None, ..found.clone() })
    }

    /// Ends the orders that a lost host can't carry out any more.
    fn end_migrations(&self, name: &HostName, fates: &[LostGuest]) -> Result<(), FleetError> {
        for view in self.migrations()? {
            let migration = view.migration?;
            if migration.phase.is_over() {
                continue;
            }
            let uuid = migration.guest.uuid;
            let fate = fates.iter().find(|guest| guest.uuid == uuid).map(|guest| &guest.fate);
            let failed = || MigrationPhase::Failed { reason: format!("{name} was declared lost") };
            let phase = match (&migration.phase, fate) {
                (MigrationPhase::Ordered | MigrationPhase::Admitted { .. }, None)
                    if migration.destination == *name =>
                {
                    failed()
                }
                _ if migration.source != *name => continue,
                (_, Some(Fate::Elsewhere { host })) if *host == migration.destination => {
                    MigrationPhase::Done { session: None, downtime_ms: None, carried: None }
                }
                (_, Some(fate)) if !fate.is_decided() => continue,
                _ => failed(),
            };
            self.change_migration(&migration, |found| {
                let open = !found.phase.is_over();
                open.then(|| Migration { phase: phase.clone(), ..found.clone() })
            })?;
        }
        Ok(())
    }
}

/// The hosts that have published a guest, and what it does there.
fn on(hosts: &[HostView], uuid: Uuid) -> impl Iterator<Item = (&HostName, GuestPhase)> {
    let of = move |view: &HostView| {
        view.guests.iter().flatten().find(|it| it.uuid == uuid).map(|it| it.phase)
    };
    hosts.iter().filter_map(move |view| Some((&view.name, of(view)?)))
}

/// What has become of a guest, by what the other hosts say and by its sessions.
fn fate<'a>(
    lost: &HostName,
    uuid: Uuid,
    hosts: &[HostView],
    sessions: impl Iterator<Item = &'a (String, Session, i64)>,
) -> Fate {
    let mut doubt = None;
    for (host, phase) in on(hosts, uuid) {
        let host = host.clone();
        match phase {
            GuestPhase::Fetching => return Fate::Lacking { host },
            phase if phase.is_here() => return Fate::Elsewhere { host },
            GuestPhase::InDoubt | GuestPhase::Silent => doubt = Some(Fate::InDoubt { host }),
            // It served pages to the lost host, or keeps a QEMU without the guest.
            _ => {}
        }
    }
    if let Some(doubt) = doubt {
        return doubt;
    }
    // The last session in which a host has claimed the guest says where it went.
    let claimed = sessions.filter(|(_, session, _)| {
        use Register::{Claimed, Ended, Fetching, Owns};
        matches!(session.register, Claimed | Owns | Fetching | Ended)
    });
    let last = claimed.max_by_key(|(_, _, revision)| *revision);
    let Some((_, session, _)) = last.filter(|(_, session, _)| session.destination != *lost) else {
        return Fate::Free;
    };
    let host = session.destination.clone();
    match session.register {
        Register::Claimed => Fate::Claimed { host },
        Register::Owns => Fate::Elsewhere { host },
        Register::Fetching => Fate::Lacking { host },
        _ => Fate::Free,
    }
}
