//! Admitting guests that come here.

use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::json;
use vmferry::config::policy::Admission;
use vmferry::probe::HostFacts;
use vmferry_fleet::placement::HEADROOM_BYTES;
use vmferry_fleet::{Fleet, FleetError, Host, HostName, Migration, MigrationPhase};
use vmferry_transport::PeerIdentity;
use vmferry_wire::GuestIdentity;

use super::{Mover, Tell};
use crate::commands::daemon::config::Configuration;

/// A guest that may come, and from where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmittedGuest {
    /// The first name in the source's certificate; `None` on networks without certificates.
    pub source: Option<String>,
    /// The guest.
    pub guest: GuestIdentity,
}

/// A guest that may come, and the host that has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coming {
    source: HostName,
    guest: GuestIdentity,
}

impl Coming {
    fn of(migration: &Migration) -> Self {
        Self { source: migration.source.clone(), guest: migration.guest.clone() }
    }
}

/// The guests that the fleet admits to this host, as the daemon knows them.
#[derive(Debug, Default)]
pub struct Admitted(Mutex<Vec<AdmittedGuest>>);

impl Admitted {
    /// Replaces them.
    pub fn set(&self, guests: Vec<AdmittedGuest>) {
        *self.0.lock() = guests;
    }

    fn has(&self, source: &PeerIdentity, guest: Option<&GuestIdentity>) -> bool {
        self.0.lock().iter().any(|admitted| {
            admitted.source.as_ref() == source.names.first()
                && guest.is_none_or(|guest| *guest == admitted.guest)
        })
    }
}

/// Admits what the fleet admits, and what the host's policy allows.
#[derive(Debug)]
pub struct FleetAdmission {
    /// The fleet's.
    pub admitted: std::sync::Arc<Admitted>,
    /// The host's.
    pub policy: std::sync::Arc<dyn Admission>,
}

impl Admission for FleetAdmission {
    fn check_source(&self, source: &PeerIdentity) -> Result<(), String> {
        match self.admitted.has(source, None) {
            true => Ok(()),
            false => self.policy.check_source(source),
        }
    }

    fn check_guest(&self, source: &PeerIdentity, guest: &GuestIdentity) -> Result<(), String> {
        match self.admitted.has(source, Some(guest)) {
            true => Ok(()),
            false => self.policy.check_guest(source, guest),
        }
    }

    fn definition_rules(
        &self,
        source: &PeerIdentity,
        guest: &GuestIdentity,
    ) -> Vec<std::sync::Arc<vmferry::config::policy::DefinitionRules>> {
        self.policy.definition_rules(source, guest)
    }
}

impl Mover {
    /// Answers an order: the guest may come, or why not.
    pub(super) fn admit(
        &mut self,
        fleet: &Fleet,
        migration: &Migration,
        all: &[Migration],
        tell: Tell<'_>,
    ) -> Result<(), FleetError> {
        let name = &migration.guest.name;
        let answer = match migration.cancel {
            true => MigrationPhase::Cancelled,
            false => match self.objection(migration, all) {
                Some(reason) => MigrationPhase::Failed { reason },
                None => {
                    // Before the source knows: it sends at once.
                    if !self.tell_admitted(fleet, all, Some(migration), tell)? {
                        return Ok(());
                    }
                    let source = fleet.host(&migration.source)?;
                    MigrationPhase::Admitted { address: self.address_for(source.as_ref()) }
                }
            },
        };
        let text = match &answer {
            MigrationPhase::Failed { reason } => format!("refused guest {name}: {reason}"),
            MigrationPhase::Admitted { .. } => {
                format!("admitted guest {name} of {}", migration.source)
            }
            _ => format!("the move of guest {name} here was cancelled"),
        };
        if Self::set(fleet, migration, answer)? {
            tell(json!({ "event": "move-answered", "guest": migration.guest }), &text);
        }
        Ok(())
    }

    /// Why the guest can't come.
    fn objection(&self, migration: &Migration, all: &[Migration]) -> Option<String> {
        let config = match Configuration::read(&self.config) {
            Ok(config) => config,
            Err(failure) => return Some(failure.to_string()),
        };
        let Migration { template, destination, .. } = migration;
        if config.template(template).is_none() {
            return Some(format!("{destination} has no template {template}"));
        }
        let arriving = all.iter().filter(|one| {
            one.destination == *destination && one.id != migration.id && is_arriving(one)
        });
        let reserved: u64 = arriving.map(|one| one.memory_bytes).sum();
        let needed = reserved + migration.memory_bytes + HEADROOM_BYTES;
        let available = HostFacts::default().with_memory().memory_available.unwrap_or(u64::MAX);
        (available < needed).then(|| {
            format!(
                "{destination} has {} MiB available, and needs {} MiB with the guests that are \
                 arriving",
                available >> 20,
                needed >> 20
            )
        })
    }

    /// Where this host receives guests of another one: on the first network of that host that both
    /// have.
    fn address_for(&self, source: Option<&Host>) -> String {
        let networks = source.map(|host| &host.networks[..]).unwrap_or_default();
        let shared = networks
            .iter()
            .find_map(|theirs| self.about.networks.iter().find(|ours| ours.name == theirs.name));
        shared.map_or(&self.about.address, |network| &network.address).clone()
    }

    /// Tells the daemon which guests it admits, with `one_more`, if that has changed. Returns
    /// whether it uses that.
    pub(super) fn tell_admitted(
        &mut self,
        fleet: &Fleet,
        all: &[Migration],
        one_more: Option<&Migration>,
        tell: Tell<'_>,
    ) -> Result<bool, FleetError> {
        let coming = all.iter().filter(|one| one.destination == self.name && is_arriving(one));
        let coming: Vec<Coming> = coming.chain(one_more).map(Coming::of).collect();
        if self.admitted.as_ref() != Some(&coming) {
            let mut guests = Vec::new();
            for Coming { source, guest } in coming.clone() {
                let source = fleet.host(&source)?.and_then(|host| host.identity);
                guests.push(AdmittedGuest { source, guest });
            }
            self.number = self.daemon.next_number();
            tell(json!({ "event": ADMITS, "guests": guests, "number": self.number }), "");
            self.admitted = Some(coming);
        }
        Ok(self.daemon.uses(self.number, DAEMON_TIMEOUT))
    }
}

/// How long the daemon may take to use a list of admitted guests. Otherwise it is asked again.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(2);

/// The agent's event by which the daemon learns which guests the fleet admits.
pub const ADMITS: &str = "fleet-admits";

/// Whether its memory is needed here and not taken yet, for all that is known.
fn is_arriving(migration: &Migration) -> bool {
    use MigrationPhase::{Admitted, Sending};
    matches!(migration.phase, Admitted { .. } | Sending { .. })
}
