//! Who migrates: sessions, their tokens and the guest's identity.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

/// Longest name of a guest, in bytes.
pub const MAX_NAME_BYTES: usize = 128;

/// The number of one attempt to migrate a guest: random, and used once.
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
            .map_err(|error| format!("`{text}` is no session: {error}"))
    }
}

// As text where people read it (journals, `--json`), as 16 bytes on the wire.
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

/// What a data channel shows to join its session. Secret: it is given on the control channel
/// only and never printed.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Token(pub [u8; 16]);

impl PartialEq for Token {
    /// Takes the same time wherever the first difference is.
    fn eq(&self, other: &Self) -> bool {
        let differences = self.0.iter().zip(&other.0).fold(0, |all, (a, b)| all | (a ^ b));
        std::hint::black_box(differences) == 0
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(secret)")
    }
}

/// Who a guest is, on every host that it visits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestIdentity {
    /// Never changes.
    pub uuid: Uuid,
    /// For people; at most [`MAX_NAME_BYTES`].
    pub name: String,
}

impl fmt::Display for GuestIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.uuid)
    }
}

/// What a destination knows of a session, and may be held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SessionWord {
    /// It has no record of the session. This is *not* [`Aborted`](Self::Aborted): the record may
    /// be on another host, or lost.
    Unknown,
    /// It has neither run the guest nor given it up: it waits for COMMIT.
    Pending,
    /// It has journalled that it will never run the guest.
    Aborted,
    /// It has journalled that it runs the guest.
    Owns,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_reads_as_it_prints() {
        let session = SessionId([0xab; 16]);
        assert_eq!(session.to_string().parse(), Ok(session));
        assert!("x".parse::<SessionId>().unwrap_err().contains("no session"));
    }

    #[test]
    fn a_token_is_not_printed() {
        assert_eq!(format!("{:?}", Token([7; 16])), "Token(secret)");
        assert_eq!(Token([7; 16]), Token([7; 16]));
        let mut other = [7; 16];
        other[15] = 8;
        assert_ne!(Token([7; 16]), Token(other));
    }
}
