//! Migrations: what was ordered, and how far it has come. Each step is one transaction, by the
//! agent that the table names; if that agent is killed, the next one of its host goes on.
//!
//! | phase | written by | what comes next |
//! | --- | --- | --- |
//! | ordered | an operator | the destination's agent admits the guest, or refuses |
//! | admitted | the destination | the source's agent sends the guest |
//! | sending | the source | the source's agent follows the process that sends it |
//! | done, failed, cancelled | either agent | nothing: the next order replaces it |

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vmferry_handover::{GuestIdentity, SessionId};

use crate::etcd::Watch;
use crate::fleet::{Fleet, FleetError};
use crate::host::HostName;
use crate::object::{BadObject, Kind, Object};

/// Where migrations are, below the fleet's prefix.
const DIRECTORY: &str = "migrations/";

/// The migration of a guest: `migrations/UUID`, with the guest's UUID, so that there is one at a
/// time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Migration {
    /// Another number for each order.
    pub id: Uuid,
    /// The guest.
    pub guest: GuestIdentity,
    /// The host that has it.
    pub source: HostName,
    /// The host that it goes to.
    pub destination: HostName,
    /// Why it goes there.
    pub why: String,
    /// The destination's template.
    pub template: String,
    /// The guest's memory in bytes, which the destination keeps for it.
    pub memory_bytes: u64,
    /// Bandwidth limit in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bandwidth: Option<u64>,
    /// When it was ordered, in seconds since 1970.
    pub ordered_at: u64,
    /// An operator wants it to end.
    #[serde(default)]
    pub cancel: bool,
    /// How far it has come.
    #[serde(flatten)]
    pub phase: MigrationPhase,
}

/// How far a migration has come.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "kebab-case")]
pub enum MigrationPhase {
    /// The destination has not answered yet.
    Ordered,
    /// The destination takes the guest, from this source only.
    Admitted {
        /// Where the source sends it, HOST:PORT.
        address: String,
    },
    /// A process of the source sends it.
    Sending {
        /// Where to.
        address: String,
        /// Its session, once the process has begun one.
        session: Option<SessionId>,
        /// What that process has said last about its progress.
        progress: Option<MigrationProgress>,
    },
    /// The guest is at the destination, with all its pages.
    Done {
        /// Its session.
        session: Option<SessionId>,
        /// The time that the guest was paused, in milliseconds.
        downtime_ms: Option<f64>,
        /// Why QEMU's own migration was carried, which takes longer; `None` if vmferry has moved
        /// the memory itself.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        carried: Option<String>,
    },
    /// The guest has not moved, or was lost on its way.
    Failed {
        /// What has happened to it, and why.
        reason: String,
    },
    /// The guest is at the source, as an operator wanted.
    Cancelled,
}

/// The progress of a process that sends a guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MigrationProgress {
    /// Such as `pre-copy`.
    pub phase: String,
    /// Bytes sent.
    pub sent_bytes: u64,
    /// When it is expected to end, in milliseconds from then.
    pub eta_ms: Option<f64>,
    /// The handover is in doubt.
    #[serde(default)]
    pub in_doubt: bool,
}

impl MigrationPhase {
    /// Whether nothing comes next.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Done { .. } | Self::Failed { .. } | Self::Cancelled)
    }
}

impl Kind for Migration {
    const NAME: &'static str = "migration";
    const VERSION: u32 = 1;
}

/// A migration as all members see it.
#[derive(Debug)]
pub struct MigrationView {
    /// The guest's UUID, as it is in the key.
    pub guest: String,
    /// An error if it can't be read.
    pub migration: Result<Migration, BadObject>,
}

impl Fleet {
    /// All migrations, those that are over too.
    ///
    /// # Errors
    /// etcd does not answer.
    pub fn migrations(&self) -> Result<Vec<MigrationView>, FleetError> {
        Ok(self.migrations_of(self.list(DIRECTORY)?))
    }

    /// Keeps a copy of all migrations from now on, until the watch is dropped. `changed` is called
    /// after each change, from another thread, and must return at once.
    pub fn follow_migrations(&self, changed: impl Fn() + Send + Sync + 'static) -> Watch {
        self.follow(DIRECTORY, changed)
    }

    /// All migrations as the copy has them, which may be late; `None` until it was read.
    #[must_use]
    pub fn followed_migrations(&self) -> Option<Vec<MigrationView>> {
        Some(self.migrations_of(self.followed(DIRECTORY)?))
    }

    fn migrations_of(&self, objects: Vec<(String, Vec<u8>)>) -> Vec<MigrationView> {
        let view = |(guest, bytes): (String, Vec<u8>)| {
            let key = self.prefix().key(&format!("{DIRECTORY}{guest}"));
            let migration = Object::decode(&key, &bytes).map(|object| object.value);
            MigrationView { guest, migration }
        };
        objects.into_iter().map(view).collect()
    }

    /// Orders a migration.
    ///
    /// # Errors
    /// [`FleetError::MigrationUnderWay`], or etcd does not answer.
    pub fn order_migration(&self, order: &Migration) -> Result<(), FleetError> {
        let now =
            self.update(&self.migration_key(order.guest.uuid), |found: Option<&Migration>| {
                match found {
                    Some(found) if !found.phase.is_over() => None,
                    _ => Some(order.clone()),
                }
            })?;
        match now {
            Some(found) if found.id != order.id => Err(FleetError::MigrationUnderWay {
                guest: found.guest.name,
                destination: found.destination,
            }),
            _ => Ok(()),
        }
    }

    /// Changes a migration that was read before, unless another order has replaced it. `change`
    /// returns `None` to leave it. Returns the migration then; `None` if it was replaced.
    ///
    /// # Errors
    /// etcd does not answer.
    pub fn change_migration(
        &self,
        read: &Migration,
        change: impl Fn(&Migration) -> Option<Migration>,
    ) -> Result<Option<Migration>, FleetError> {
        let now = self
            .update(&self.migration_key(read.guest.uuid), |found: Option<&Migration>| {
                found.filter(|found| found.id == read.id).and_then(&change)
            })?;
        Ok(now.filter(|now| now.id == read.id))
    }

    fn migration_key(&self, guest: Uuid) -> String {
        self.prefix().key(&format!("{DIRECTORY}{guest}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phase_is_a_member_beside_the_others() {
        let name = |name: &str| HostName::new(name).unwrap();
        let migration = Migration {
            id: Uuid::nil(),
            guest: GuestIdentity { uuid: Uuid::nil(), name: "web".into() },
            source: name("a"),
            destination: name("b"),
            why: "it has most memory".into(),
            template: "usual".into(),
            memory_bytes: 1,
            max_bandwidth: None,
            ordered_at: 7,
            cancel: false,
            phase: MigrationPhase::Admitted { address: "b:7002".into() },
        };
        let text = serde_json::to_value(&migration).unwrap();
        assert_eq!((&text["phase"], &text["address"]), (&"admitted".into(), &"b:7002".into()));
        assert_eq!(serde_json::from_value::<Migration>(text).unwrap(), migration);
        for phase in [
            MigrationPhase::Ordered,
            MigrationPhase::Sending {
                address: "b:7002".into(),
                session: Some(SessionId([7; 16])),
                progress: Some(MigrationProgress {
                    phase: "pre-copy".into(),
                    sent_bytes: 1 << 40,
                    eta_ms: Some(1.5),
                    in_doubt: false,
                }),
            },
            MigrationPhase::Done {
                session: None,
                downtime_ms: Some(2.5),
                carried: Some("its memory is private".into()),
            },
            MigrationPhase::Failed { reason: "why".into() },
            MigrationPhase::Cancelled,
        ] {
            let object = Object::new(Migration { phase, ..migration.clone() });
            assert_eq!(Object::decode("k", &object.encode()).unwrap(), object);
        }
    }
}
