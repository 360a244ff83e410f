//! Forward compatibility of JSON, on the control socket and in a guest's configuration.
//!
//! A member that this release does not know is an error that names the member, because ignoring it
//! might be unsafe for the guest. Members that older releases may ignore are inside a member
//! `optional`, whose content each release reads as far as it knows it.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The member that a release may ignore.
const OPTIONAL: &str = "optional";

/// Reads an object, ignoring its `optional` member.
///
/// # Errors
/// Invalid JSON, and unknown members, by name.
pub fn read<T: DeserializeOwned>(json: &[u8]) -> serde_json::Result<T> {
    let mut value: Value = serde_json::from_slice(json)?;
    if let Value::Object(members) = &mut value {
        members.remove(OPTIONAL);
    }
    serde_json::from_value(value)
}

/// Reads one of the members inside `optional`. `None` if it is absent or is of another type.
#[must_use]
pub fn optional<T: DeserializeOwned>(json: &[u8], member: &str) -> Option<T> {
    let mut value: Value = serde_json::from_slice(json).ok()?;
    serde_json::from_value(value.get_mut(OPTIONAL)?.get_mut(member)?.take()).ok()
}

/// Adds a member to the `optional` part of an object.
pub fn add_optional(object: &mut Value, member: &str, value: &impl Serialize) {
    object[OPTIONAL][member] = serde_json::json!(value);
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Known {
        a: u8,
    }

    #[test]
    fn unknown_optional_members_are_ignored_and_others_refused_by_name() {
        for json in [r#"{"a":1}"#, r#"{"a":1,"optional":{"b":2}}"#, r#"{"optional":7,"a":1}"#] {
            assert_eq!(read::<Known>(json.as_bytes()).unwrap(), Known { a: 1 }, "{json}");
        }
        let mut written = serde_json::json!({ "a": 1 });
        add_optional(&mut written, "b", &2);
        let written = written.to_string();
        assert_eq!(written, r#"{"a":1,"optional":{"b":2}}"#);
        assert_eq!(optional::<u8>(written.as_bytes(), "b"), Some(2));
        assert_eq!(optional::<String>(written.as_bytes(), "b"), None);
        assert_eq!(optional::<u8>(br#"{"a":1}"#, "b"), None);
        let error = read::<Known>(br#"{"a":1,"b":2}"#).unwrap_err().to_string();
        assert!(error.contains("unknown field `b`"), "{error}");
        for bad in [&b""[..], b"[]", b"{}", b"{\"a\":1} x"] {
            assert!(read::<Known>(bad).is_err());
        }
    }
}
