//! Hosts: what each says of itself.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vmferry::probe::HostFacts;

use crate::etcd::Watch;
use crate::fleet::{Fleet, FleetError};
use crate::guest::Guest;
use crate::loss::Loss;
use crate::object::{BadObject, Kind, Object};

/// Where hosts are, below the fleet's prefix.
const HOSTS: &str = "hosts/";

/// Where orders about hosts are.
const ORDERS: &str = "orders/";

/// Maximum length of a host's name.
pub(crate) const MAX_NAME_BYTES: usize = 64;

/// The name of a host in its fleet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostName(String);

impl TryFrom<String> for HostName {
    type Error = FleetError;

    fn try_from(name: String) -> Result<Self, FleetError> {
        Self::new(&name)
    }
}

impl From<HostName> for String {
    fn from(name: HostName) -> Self {
        name.0
    }
}

impl HostName {
    /// Checks a name.
    ///
    /// # Errors
    /// [`FleetError::HostName`].
    pub fn new(name: &str) -> Result<Self, FleetError> {
        match is_name(name) {
            true => Ok(Self(name.to_owned())),
            false => Err(FleetError::HostName { name: name.to_owned() }),
        }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key of one of its own objects, below the fleet's prefix.
    pub(crate) fn key(&self, object: &str) -> String {
        format!("{HOSTS}{self}/{object}")
    }
}

/// Whether a host or a user can have this name. A certificate's common name has at most 64 bytes.
pub(crate) fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(plain)
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a host says of itself: `hosts/NAME/self`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// A random number that its state directory keeps: another one is another host.
    pub instance: Uuid,
    /// Where other hosts reach its daemon, HOST:PORT.
    pub address: String,
    /// The first name in its certificate; `None` without TLS.
    #[serde(default)]
    pub identity: Option<String>,
    /// Number of processors.
    pub cpus: usize,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// The operator's labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Networks that guests are sent over, the preferred one first.
    #[serde(default)]
    pub networks: Vec<HostNetwork>,
    /// The names of its templates of receivers.
    #[serde(default)]
    pub templates: Vec<String>,
    /// Release, kernel and processors.
    pub facts: HostFacts,
}

/// A network that a host sends and receives guests over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostNetwork {
    /// The same on all hosts that it connects.
    pub name: String,
    /// Where the host's daemon listens on it, HOST:PORT.
    pub address: String,
    /// Bytes per second in each direction; `None` if the operator has not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<u64>,
}

impl Kind for Host {
    const NAME: &'static str = "host";
    const VERSION: u32 = 1;
}

/// That a host's agent is heard, `hosts/NAME/presence`: it ends with the agent's lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Presence {
    /// The host's [`Host::instance`].
    pub instance: Uuid,
    /// Memory available without swapping, in bytes.
    pub memory_available_bytes: Option<u64>,
}

impl Kind for Presence {
    const NAME: &'static str = "presence";
    const VERSION: u32 = 1;
}

/// What operators have ordered about a host: `orders/NAME`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostOrders {
    /// No guest is sent there unless an operator names the host.
    #[serde(default)]
    pub cordoned: bool,
    /// The host was fenced and declared lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<Loss>,
}

impl Kind for HostOrders {
    const NAME: &'static str = "host's orders";
    const VERSION: u32 = 1;
}

/// A host as all members see it.
#[derive(Debug)]
pub struct HostView {
    /// Its name.
    pub name: HostName,
    /// What it says of itself; an error if that can't be read.
    pub host: Result<Host, BadObject>,
    /// `None` if its agent is not heard. This says nothing of its guests.
    pub presence: Option<Presence>,
    /// What operators have ordered.
    pub orders: HostOrders,
    /// Its guests, as it has published them; an error for each one that can't be read.
    pub guests: Vec<Result<Guest, BadObject>>,
}

impl Fleet {
    /// All hosts, by their names.
    ///
    /// # Errors
    /// etcd does not answer, or an order can't be read.
    pub fn hosts(&self) -> Result<Vec<HostView>, FleetError> {
        self.hosts_of(self.list(HOSTS)?, self.list(ORDERS)?)
    }

    /// Keeps a copy of all hosts from now on, until the watches are dropped. `changed` is called
    /// after each change, from another thread, and must return at once.
    pub fn follow_hosts(&self, changed: impl Fn() + Clone + Send + Sync + 'static) -> [Watch; 2] {
        [self.follow(HOSTS, changed.clone()), self.follow(ORDERS, changed)]
    }

    /// All hosts as the copy has them, which may be late; `None` until it was read.
    ///
    /// # Errors
    /// An order can't be read.
    pub fn followed_hosts(&self) -> Option<Result<Vec<HostView>, FleetError>> {
        Some(self.hosts_of(self.followed(HOSTS)?, self.followed(ORDERS)?))
    }

    /// The hosts that these objects describe: the rest of each key, and its bytes.
    fn hosts_of(
        &self,
        hosts: Vec<(String, Vec<u8>)>,
        orders: Vec<(String, Vec<u8>)>,
    ) -> Result<Vec<HostView>, FleetError> {
        /// The objects of one host.
        #[derive(Default)]
        struct Found {
            host: Option<Vec<u8>>,
            presence: Option<Vec<u8>>,
            guests: Vec<(String, Vec<u8>)>,
        }
        let mut found: BTreeMap<HostName, Found> = BTreeMap::new();
        for (rest, bytes) in hosts {
            let Some((name, object)) = rest.split_once('/') else { continue };
            // Keys that somebody else has put there are left alone.
            let Ok(name) = HostName::new(name) else { continue };
            let of = found.entry(name).or_default();
            match object.split_once('/') {
                None if object == "self" => of.host = Some(bytes),
                None if object == "presence" => of.presence = Some(bytes),
                Some(("guests", uuid)) => of.guests.push((uuid.to_owned(), bytes)),
                _ => {}
            }
        }
        let mut orders: BTreeMap<String, Vec<u8>> = orders.into_iter().collect();
        let mut views = Vec::new();
        for (name, Found { host, presence, guests }) in found {
            let key = |object: &str| self.prefix().key(&name.key(object));
            let Some(host) = host else { continue };
            let host = decode::<Host>(&key("self"), &host);
            let presence = presence.and_then(|bytes| decode(&key("presence"), &bytes).ok());
            let guest =
                |(uuid, bytes): (String, Vec<u8>)| decode(&key(&format!("guests/{uuid}")), &bytes);
            let guests = guests.into_iter().map(guest).collect();
            let orders = match orders.remove(name.as_str()) {
                Some(bytes) => decode(&self.prefix().key(&format!("{ORDERS}{name}")), &bytes)?,
                None => HostOrders::default(),
            };
            views.push(HostView { name, host, presence, orders, guests });
        }
        Ok(views)
    }
}

impl Fleet {
    /// What a host says of itself; `None` if there is no such host.
    ///
    /// # Errors
    /// etcd does not answer, or it can't be read.
    pub fn host(&self, name: &HostName) -> Result<Option<Host>, FleetError> {
        self.update(&self.prefix().key(&name.key("self")), |_: Option<&Host>| None)
    }

    /// What is ordered about a host.
    ///
    /// # Errors
    /// etcd does not answer, or it can't be read.
    pub fn orders(&self, name: &HostName) -> Result<HostOrders, FleetError> {
        let key = self.prefix().key(&format!("{ORDERS}{name}"));
        Ok(self.update(&key, |_: Option<&HostOrders>| None)?.unwrap_or_default())
    }

    /// Changes what is ordered about a host. Returns whether that was a change.
    ///
    /// # Errors
    /// There is no such host, or etcd does not answer.
    pub fn order(
        &self,
        name: &HostName,
        change: impl Fn(&HostOrders) -> HostOrders,
    ) -> Result<bool, FleetError> {
        if self.host(name)?.is_none() {
            let (prefix, name) = (self.prefix().to_string(), name.clone());
            return Err(FleetError::UnknownHost { prefix, name });
        }
        let changed = std::cell::Cell::new(false);
        let key = self.prefix().key(&format!("{ORDERS}{name}"));
        self.update(&key, |found: Option<&HostOrders>| {
            let before = found.cloned().unwrap_or_default();
            let after = change(&before);
            changed.set(after != before);
            (after != before).then_some(after)
        })?;
        Ok(changed.get())
    }
}

fn decode<T: Kind>(key: &str, bytes: &[u8]) -> Result<T, BadObject> {
    Ok(Object::decode(key, bytes)?.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for good in ["host-a", "10.0.0.1", "h_1.example"] {
            assert_eq!(HostName::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "a/b", "a b", "\u{e4}", &"a".repeat(65)] {
            assert!(HostName::new(bad).is_err(), "{bad:?}");
        }
    }
}
