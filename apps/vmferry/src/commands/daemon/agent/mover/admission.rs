//! Admitting guests that come here.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use serde_json::json;
use vmferry::config::policy::{Admission, DefinitionRules};
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

/// How long a source waits for a daemon whose agent has just started, and has not said yet which
/// guests are admitted. An agent that can't reach etcd never says it.
const AGENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The guests that the fleet admits to this host, as the daemon knows them. `None` before its agent
/// has said it first.
#[derive(Debug, Default)]
pub struct Admitted {
    guests: Mutex<Option<Vec<AdmittedGuest>>>,
    said: Condvar,
}

impl Admitted {
    /// Replaces them.
    pub fn set(&self, guests: Vec<AdmittedGuest>) {
        *self.guests.lock() = Some(guests);
        self.said.notify_all();
    }

    fn has(&self, source: &PeerIdentity, guest: Option<&GuestIdentity>) -> bool {
        let mut guests = self.guests.lock();
        if guests.is_none() {
            self.said.wait_while_for(&mut guests, |guests| guests.is_none(), AGENT_TIMEOUT);
        }
        guests.iter().flatten().any(|admitted| {
            admitted.source.as_ref() == source.names.first()
                && guest.is_none_or(|guest| *guest == admitted.guest)
        })
    }
}

/// Admits what the fleet admits, and what the host's policy allows.
#[derive(Debug)]
pub struct FleetAdmission {
    /// The fleet's.
    pub admitted: Arc<Admitted>,
    /// The host's.
    pub policy: Arc<dyn Admission>,
}

impl Admission for FleetAdmission {
    fn check_source(&self, source: &PeerIdentity) -> Result<(), String> {
        // What the policy allows waits for nothing.
        self.policy.check_source(source).or_else(|refusal| match self.admitted.has(source, None) {
            true => Ok(()),
            false => Err(refusal),
        })
    }

    fn check_guest(&self, source: &PeerIdentity, guest: &GuestIdentity) -> Result<(), String> {
        self.policy.check_guest(source, guest).or_else(|refusal| {
            match self.admitted.has(source, Some(guest)) {
                true => Ok(()),
                false => Err(refusal),
            }
        })
    }

    fn definition_rules(
        &self,
        source: &PeerIdentity,
        guest: &GuestIdentity,
    ) -> Vec<Arc<DefinitionRules>> {
        // The fleet admits guests to templates. libvirt defines only what the policy allows.
        match self.policy.check_guest(source, guest) {
            Ok(()) => self.policy.definition_rules(source, guest),
            Err(_) => Vec::new(),
        }
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
        let source = fleet.host(&migration.source)?;
        let objection = self.objection(migration, source.as_ref(), all);
        let answer = match objection {
            _ if migration.cancel => MigrationPhase::Cancelled,
            Some(reason) => MigrationPhase::Failed { reason },
            // Before the source knows: it sends at once.
            None if !self.tell_admitted(fleet, all, Some(migration), tell)? => return Ok(()),
            None => MigrationPhase::Admitted { address: self.address_for(source.as_ref()) },
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
    fn objection(
        &self,
        migration: &Migration,
        source: Option<&Host>,
        all: &[Migration],
    ) -> Option<String> {
        let config = match Configuration::read(&self.config) {
            Ok(config) => config,
            Err(failure) => return Some(failure.to_string()),
        };
        let Migration { template, destination, .. } = migration;
        if config.template(template).is_none() {
            return Some(format!("{destination} has no template {template}"));
        }
        // It could not be told from others.
        if self.about.identity.is_some() && source.is_none_or(|host| host.identity.is_none()) {
            return Some(format!("{} has no certificate by which it is known", migration.source));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A policy that allows one guest.
    #[derive(Debug)]
    struct Only(&'static str);

    impl Admission for Only {
        fn check_source(&self, _: &PeerIdentity) -> Result<(), String> {
            Err("not by the policy".to_owned())
        }

        fn check_guest(&self, _: &PeerIdentity, guest: &GuestIdentity) -> Result<(), String> {
            if guest.name == self.0 { Ok(()) } else { Err("not by the policy".to_owned()) }
        }
    }

    /// A source that is admitted may come before the next agent has said so.
    #[test]
    fn source_waits_for_an_agent_that_has_just_started() {
        let admitted = Arc::new(Admitted::default());
        let (source, uuid) = (PeerIdentity::default(), uuid::Uuid::nil());
        let guest = GuestIdentity { uuid, name: "web".into() };
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| admitted.has(&source, Some(&guest)));
            admitted.set(vec![AdmittedGuest { source: None, guest: guest.clone() }]);
            assert!(asks.join().unwrap());
        });
    }

    #[test]
    fn fleet_admits_one_guest_of_one_source_and_no_definition() {
        let admitted = Arc::new(Admitted::default());
        let policy = Arc::new(Only("other"));
        let admission = FleetAdmission { admitted: Arc::clone(&admitted), policy };
        let source = |name: &str| {
            let names = vec![name.to_owned()];
            PeerIdentity { names, ..PeerIdentity::default() }
        };
        let guest = |name: &str| {
            let uuid = uuid::Uuid::from_bytes([name.len() as u8; 16]);
            GuestIdentity { uuid, name: name.into() }
        };
        let (a, b) = (source("spiffe://vmferry/host/a"), source("spiffe://vmferry/host/b"));
        admitted.set(Vec::new());
        assert!(admission.check_source(&a).is_err());
        let of_a = Some(a.names[0].clone());
        admitted.set(vec![AdmittedGuest { source: of_a, guest: guest("web") }]);
        assert_eq!(admission.check_source(&a), Ok(()));
        assert_eq!(admission.check_guest(&a, &guest("web")), Ok(()));
        assert!(admission.definition_rules(&a, &guest("web")).is_empty());
        // The same name with another UUID.
        let twin = GuestIdentity { uuid: uuid::Uuid::nil(), ..guest("web") };
        assert!(admission.check_guest(&a, &twin).is_err());
        assert!(admission.check_guest(&b, &guest("web")).is_err());
        // What the policy allows stays allowed.
        assert_eq!(admission.check_guest(&b, &guest("other")), Ok(()));
        assert_eq!(admission.definition_rules(&b, &guest("other")).len(), 1);
        admitted.set(Vec::new());
        assert!(admission.check_guest(&a, &guest("web")).is_err());
    }
}
