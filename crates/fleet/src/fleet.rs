//! A fleet: the object at its prefix, which says that hosts there belong together.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::etcd::{Outcome, Transaction, Value, Watched};
use crate::host::{HostName, MAX_NAME_BYTES};
use crate::object::{BadObject, Kind, Object};
use crate::{Etcd, EtcdError};

/// The most bytes of a prefix: the name of a fleet's witness has the prefix in it.
const MAX_PREFIX_BYTES: usize = 48;

/// Where a fleet's keys are, such as `/vmferry`: two fleets of one etcd have two prefixes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetPrefix(String);

impl FleetPrefix {
    /// Checks a prefix: `/`, then letters, digits, `-`, `_`, `.` and further `/`; no `/` at its
    /// end.
    ///
    /// # Errors
    /// [`FleetError::Prefix`].
    pub fn new(text: &str) -> Result<Self, FleetError> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let parts = text.strip_prefix('/').unwrap_or("").split('/');
        let mut parts = parts.map(|part| !part.is_empty() && part.bytes().all(plain));
        match text.len() <= MAX_PREFIX_BYTES && parts.all(|fits| fits) {
            true => Ok(Self(text.to_owned())),
            false => Err(FleetError::Prefix { prefix: text.to_owned() }),
        }
    }

    /// The key of an object of this fleet.
    pub(crate) fn key(&self, name: &str) -> String {
        format!("{self}/{name}")
    }
}

impl fmt::Display for FleetPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a fleet can't be used.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// The prefix has characters that it may not have, or too many.
    #[error(
        "`{prefix}` can't be the prefix of a fleet: use `/`, then up to {} letters, digits, `-`, \
         `_`, `.` and `/`",
        MAX_PREFIX_BYTES - 1
    )]
    Prefix {
        /// The prefix.
        prefix: String,
    },
    /// etcd has no fleet there.
    #[error("etcd has no fleet at {prefix}: make one there, or correct the prefix")]
    Missing {
        /// The prefix.
        prefix: String,
    },
    /// etcd has another fleet there than before.
    #[error(
        "etcd's data at {prefix} was replaced or restored: it has incarnation {found}, and this \
         host has joined {known}. Nothing in it decides about guests that were moving"
    )]
    OtherIncarnation {
        /// The prefix.
        prefix: String,
        /// The incarnation that this host knows.
        known: Uuid,
        /// The one that etcd has.
        found: Uuid,
    },
    /// A host's name has other characters, or too many.
    #[error(
        "`{name}` can't be the name of a host: use up to {MAX_NAME_BYTES} letters, digits, `-`, \
         `_` and `.`"
    )]
    HostName {
        /// The name.
        name: String,
    },
    /// A user's name has other characters, or too many.
    #[error(
        "`{name}` can't be the name of an operator: use up to {MAX_NAME_BYTES} letters, digits, \
         `-`, `_` and `.`, as the common name of the operator's certificate has them"
    )]
    OperatorName {
        /// The name.
        name: String,
    },
    /// Another host has this name.
    #[error("the fleet has another host {name}, {why}: give this host another name")]
    NameTaken {
        /// The name.
        name: HostName,
        /// What is known of the other one.
        why: &'static str,
    },
    /// The fleet has no such host.
    #[error("the fleet at {prefix} has no host {name}")]
    UnknownHost {
        /// The prefix.
        prefix: String,
        /// The name.
        name: HostName,
    },
    /// The host was declared lost.
    #[error(
        "host {name} was fenced and declared lost: its guests may run elsewhere. Make sure that \
         none of them runs there, then readmit the host"
    )]
    DeclaredLost {
        /// The name.
        name: HostName,
    },
    /// The guest is on its way already.
    #[error("guest {guest} is being moved to {destination} already: wait, or cancel that")]
    MigrationUnderWay {
        /// The guest's name.
        guest: String,
        /// Where it goes.
        destination: HostName,
    },
    /// An object can't be read.
    #[error(transparent)]
    Object(#[from] BadObject),
    /// etcd.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
}

impl FleetError {
    /// Whether etcd has another fleet than the one that was joined, or none, or this host is not
    /// one of it any more.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        let other = matches!(self, Self::Etcd(EtcdError::OtherData(_)));
        let gone = matches!(self, Self::Missing { .. } | Self::OtherIncarnation { .. });
        other || gone || matches!(self, Self::NameTaken { .. } | Self::DeclaredLost { .. })
    }
}

/// The object of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    /// Changes when etcd's data was restored.
    incarnation: Uuid,
}

impl Kind for Identity {
    const NAME: &'static str = "fleet";
    const VERSION: u32 = 1;
}

/// A fleet that a host has joined.
#[derive(Debug)]
pub struct Fleet {
    etcd: Arc<Etcd>,
    prefix: FleetPrefix,
    cluster: u64,
    incarnation: Uuid,
    /// Of the fleet's key.
    pub(crate) revision: Mutex<i64>,
    /// What this process has written or read last, for first attempts.
    pub(crate) known: Mutex<HashMap<String, Value>>,
    /// The directories that it follows.
    pub(crate) watched: Mutex<HashMap<&'static str, Arc<Watched>>>,
}

impl Fleet {
    /// Makes a fleet, or leaves one that is there as it is. Returns whether it was made.
    ///
    /// # Errors
    /// The object there can't be read, or etcd does not answer.
    pub fn make(etcd: &Etcd, prefix: &FleetPrefix) -> Result<bool, FleetError> {
        let key = prefix.key("fleet");
        // A second attempt of a transaction that has been done finds this one.
        let identity = Object::new(Identity { incarnation: Uuid::new_v4() });
        let transaction =
            Transaction::new().only_if(&key, None).put(&key, identity.encode()).or_read(&key);
        match etcd.transact(transaction)? {
            Outcome::Done(_) => Ok(true),
            Outcome::Otherwise(values) => {
                let found = decode(prefix, values.into_iter().next().flatten().as_ref())?;
                Ok(found.value == identity.value)
            }
        }
    }

    /// Gives the fleet another incarnation, so that no session that began before can be decided by
    /// its data. For an administrator who has restored etcd from a backup.
    ///
    /// # Errors
    /// There is no fleet, or etcd does not answer.
    pub fn renew(etcd: &Etcd, prefix: &FleetPrefix) -> Result<(), FleetError> {
        let key = prefix.key("fleet");
        let identity = Identity { incarnation: Uuid::new_v4() };
        let mut found = read(etcd, &key)?;
        loop {
            let object = decode(prefix, found.as_ref())?;
            if object.value == identity {
                return Ok(());
            }
            let transaction = Transaction::new()
                .only_if(&key, found.map(|found| found.revision))
                .put(&key, object.with(identity.clone()).encode())
                .or_read(&key);
            match etcd.transact(transaction)? {
                Outcome::Done(_) => return Ok(()),
                Outcome::Otherwise(values) => found = values.into_iter().next().flatten(),
            }
        }
    }

    /// Joins the fleet at the prefix.
    ///
    /// # Errors
    /// There is none, or etcd does not answer.
    pub fn join(etcd: Arc<Etcd>, prefix: FleetPrefix) -> Result<Self, FleetError> {
        let found = read(&etcd, &prefix.key("fleet"))?;
        let incarnation = decode(&prefix, found.as_ref())?.value.incarnation;
        let revision = Mutex::new(found.map_or(0, |found| found.revision));
        let cluster = etcd.cluster().ok_or(EtcdError::BadAnswer { what: "header" })?;
        let (known, watched) = (Mutex::default(), Mutex::default());
        Ok(Self { etcd, prefix, cluster, incarnation, revision, known, watched })
    }

    /// Where its keys are.
    #[must_use]
    pub fn prefix(&self) -> &FleetPrefix {
        &self.prefix
    }

    /// A random number, another one after etcd's data was restored.
    #[must_use]
    pub fn incarnation(&self) -> Uuid {
        self.incarnation
    }

    /// The number of its etcd cluster.
    #[must_use]
    pub fn cluster(&self) -> u64 {
        self.cluster
    }

    pub(crate) fn etcd(&self) -> &Etcd {
        &self.etcd
    }

    /// Checks that etcd still has this fleet.
    ///
    /// # Errors
    /// It has another one, or none, or does not answer.
    pub fn check_incarnation(&self) -> Result<(), FleetError> {
        let found = read(&self.etcd, &self.prefix.key("fleet"))?;
        self.check(found.as_ref())
    }

    /// Checks that the fleet's object still says the same.
    pub(crate) fn check(&self, found: Option<&Value>) -> Result<(), FleetError> {
        let identity = decode(&self.prefix, found)?;
        let (known, found_now) = (self.incarnation, identity.value.incarnation);
        if found_now != known {
            let prefix = self.prefix.to_string();
            return Err(FleetError::OtherIncarnation { prefix, known, found: found_now });
        }
        *self.revision.lock() = found.map_or(0, |found| found.revision);
        Ok(())
    }
}

fn read(etcd: &Etcd, key: &str) -> Result<Option<Value>, EtcdError> {
    // No key has this revision, so the comparison fails.
    let transaction = Transaction::new().only_if(key, Some(i64::MAX)).or_read(key);
    Ok(match etcd.transact(transaction)? {
        Outcome::Done(_) => None,
        Outcome::Otherwise(values) => values.into_iter().next().flatten(),
    })
}

fn decode(prefix: &FleetPrefix, found: Option<&Value>) -> Result<Object<Identity>, FleetError> {
    let Some(found) = found else {
        return Err(FleetError::Missing { prefix: prefix.to_string() });
    };
    Ok(Object::decode(&prefix.key("fleet"), &found.bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_checked() {
        for good in ["/vmferry", "/a/b-1", "/x_y.z"] {
            assert_eq!(FleetPrefix::new(good).unwrap().to_string(), good);
        }
        let long = format!("/{}", "a".repeat(MAX_PREFIX_BYTES));
        for bad in ["", "/", "vmferry", "/a/", "//a", "/a b", "/ä", "/a\0", &long] {
            let error = FleetPrefix::new(bad).unwrap_err();
            assert!(error.to_string().contains("can't be the prefix"), "{bad:?}: {error}");
        }
    }
}
