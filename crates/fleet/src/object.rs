//! Objects in etcd: one key, one JSON object with the version of the release that wrote it.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A kind of object.
pub(crate) trait Kind: Serialize + DeserializeOwned {
    /// What operators call it.
    const NAME: &'static str;
    /// The version that this release writes. A new member that older releases may ignore does not
    /// change it.
    const VERSION: u32;
}

/// An object as etcd has it. Members that this release does not know are kept.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Object<T> {
    pub(crate) value: T,
    others: Map<String, Value>,
}

/// A value that is not an object that this release can read.
#[derive(Debug, thiserror::Error)]
pub enum BadObject {
    /// It was edited or damaged.
    #[error(
        "the key {key} of etcd should have a {kind} and has `{value}`: was it edited? Restore it, \
         then try again"
    )]
    Damaged {
        /// The key.
        key: String,
        /// What it should be.
        kind: &'static str,
        /// The start of its value.
        value: String,
        /// Why it can't be read.
        #[source]
        source: serde_json::Error,
    },
    /// A newer release has written it.
    #[error(
        "the key {key} of etcd has a {kind} of version {version}, and this release reads up to \
         version {newest}: upgrade vmferry on this host"
    )]
    Newer {
        /// The key.
        key: String,
        /// What it is.
        kind: &'static str,
        /// Its version.
        version: u32,
        /// The newest version that this release reads.
        newest: u32,
    },
}

impl<T: Kind> Object<T> {
    /// An object that was not there yet.
    pub(crate) fn new(value: T) -> Self {
        Self { value, others: Map::new() }
    }

    /// The same object with another value.
    pub(crate) fn with(self, value: T) -> Self {
        Self { value, ..self }
    }

    /// The bytes of its key.
    ///
    /// # Panics
    /// Never: every kind has members with strings as names.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut all = Map::new();
        all.insert(VERSION.to_owned(), T::VERSION.into());
        all.extend(members(&self.value));
        for (name, value) in &self.others {
            all.entry(name.clone()).or_insert_with(|| value.clone());
        }
        serde_json::to_vec(&all).expect("an object has only strings as keys")
    }

    pub(crate) fn decode(key: &str, bytes: &[u8]) -> Result<Self, BadObject> {
        let damaged = |source| BadObject::Damaged {
            key: key.to_owned(),
            kind: T::NAME,
            value: String::from_utf8_lossy(bytes)
                .chars()
                .take(80)
                .map(|character| if character.is_control() { ' ' } else { character })
                .collect(),
            source,
        };
        /// What every release can read.
        #[derive(Deserialize)]
        struct Any {
            version: u32,
        }
        let Any { version } = serde_json::from_slice(bytes).map_err(damaged)?;
        if version > T::VERSION {
            let (key, kind, newest) = (key.to_owned(), T::NAME, T::VERSION);
            return Err(BadObject::Newer { key, kind, version, newest });
        }
        let value: T = serde_json::from_slice(bytes).map_err(damaged)?;
        let mut others: Map<String, Value> = serde_json::from_slice(bytes).map_err(damaged)?;
        let known = members(&value);
        others.retain(|name, _| name != VERSION && !known.contains_key(name));
        Ok(Self { value, others })
    }
}

/// The member with the version.
const VERSION: &str = "version";

/// The members that a value has.
fn members<T: Kind>(value: &T) -> Map<String, Value> {
    match serde_json::to_value(value) {
        Ok(Value::Object(members)) => members,
        // No kind is written like this.
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct Ship {
        name: String,
    }

    impl Kind for Ship {
        const NAME: &'static str = "ship";
        const VERSION: u32 = 2;
    }

    #[test]
    fn members_that_are_not_known_are_kept() {
        let text = r#"{"version":2,"name":"a","later":{"a":[1]}}"#;
        let mut object = Object::<Ship>::decode("k", text.as_bytes()).unwrap();
        object.value.name = "b".to_owned();
        let expected = text.replace(r#""a","later"#, r#""b","later"#);
        assert_eq!(String::from_utf8(object.encode()).unwrap(), expected);
        let new = Object::new(Ship { name: "c".to_owned() });
        assert_eq!(Object::decode("k", &new.encode()).unwrap(), new);
    }

    #[test]
    fn older_version_is_read() {
        assert!(Object::<Ship>::decode("k", br#"{"version":1,"name":"a"}"#).is_ok());
    }

    #[test]
    fn newer_and_damaged_objects_are_refused_by_name() {
        let newer = Object::<Ship>::decode("k", br#"{"version":3}"#).unwrap_err().to_string();
        assert!(newer.contains("key k of etcd has a ship of version 3"), "{newer}");
        for bad in [&b"{"[..], b"", b"{}", b"\xff", br#"{"version":2,"name":7}"#, b"[1]"] {
            let error = Object::<Ship>::decode("k", bad).unwrap_err().to_string();
            assert!(error.contains("was it edited"), "{error}");
            assert!(!error.contains(char::is_control), "{error:?}");
        }
    }
}
