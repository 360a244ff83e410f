//! Identifiers of the session and the guest. They are the same on every host.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

/// Maximum length of a guest's name, in bytes.
pub const MAX_NAME_BYTES: usize = 128;

/// The identifier of one attempt to migrate a guest. It is random and used once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub [u8; 16]);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Uuid::from_bytes(self.0))
    }
}

impl FromStr for SessionId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Uuid::from_str(text)
            .map(|uuid| Self(*uuid.as_bytes()))
            .map_err(|error| format!("`{text}` is not a session number: {error}"))
    }
}

// Text where people read it (journals, `--json`), 16 bytes on the wire.
impl Serialize for SessionId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            self.0.serialize(serializer)
        }
    }
}

impl<'de> Deserialize<'de> for SessionId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
        } else {
            <[u8; 16]>::deserialize(deserializer).map(Self)
        }
    }
}

/// The identity of a guest. It is the same on every host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestIdentity {
    /// The UUID, which never changes.
    pub uuid: Uuid,
    /// The name, for people; at most [`MAX_NAME_BYTES`].
    pub name: String,
}

impl fmt::Display for GuestIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.uuid)
    }
}

/// When the destination has all pages of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SessionKind {
    /// Before it runs the guest.
    PreCopy,
    /// Possibly later: the running guest fetches the pages that it lacks from the source.
    PostCopy,
}

/// A destination's answer about a session. It is final, except that `Pending` is followed by
/// another word, and `Fetching` by `Owns` or `Ended`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SessionWord {
    /// The destination has no record of the session. This is *not* [`Aborted`](Self::Aborted): the
    /// record may be on another host, or lost.
    Unknown,
    /// The destination has neither run the guest nor aborted. It waits for COMMIT.
    Pending,
    /// The destination's journal says that it will never run the guest.
    Aborted,
    /// The destination's journal says that it runs the guest and needs nothing of the source.
    Owns,
    /// The destination's journal says that it runs the guest, which still lacks pages that only the
    /// source has.
    Fetching,
    /// The destination's journal says that the guest has run there, and has crashed while it lacked
    /// pages that only the source has.
    Ended,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_id_round_trips() {
        let session = SessionId([0xab; 16]);
        assert_eq!(session.to_string().parse(), Ok(session));
        assert!("x".parse::<SessionId>().unwrap_err().contains("not a session number"));
    }
}
