//! What a newer release says in JSON, on the control socket and in a guest's configuration.
//!
//! A member that this release does not know is refused by name: it may be what keeps a guest safe. What may be left out
//! stands in a member of its own, `optional`, whose content a release reads as far as it knows it.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// The member that may be left out.
const OPTIONAL: &str = "optional";

/// Reads an object without what may be left out of it.
///
/// # Errors
/// What is no such JSON, and members that are not known, by name.
pub fn read<T: DeserializeOwned>(json: &[u8]) -> serde_json::Result<T> {
    let mut value: Value = serde_json::from_slice(json)?;
    if let Value::Object(members) = &mut value {
        members.remove(OPTIONAL);
    }
    serde_json::from_value(value)
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
    fn what_is_optional_is_left_out_and_anything_else_refused_by_name() {
        for json in [r#"{"a":1}"#, r#"{"a":1,"optional":{"b":2}}"#, r#"{"optional":7,"a":1}"#] {
            assert_eq!(read::<Known>(json.as_bytes()).unwrap(), Known { a: 1 }, "{json}");
        }
        let error = read::<Known>(br#"{"a":1,"b":2}"#).unwrap_err().to_string();
        assert!(error.contains("unknown field `b`"), "{error}");
        for bad in [&b""[..], b"[]", b"{}", b"{\"a\":1} x"] {
            assert!(read::<Known>(bad).is_err());
        }
    }
}
