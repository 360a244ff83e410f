//! The greeting on every channel. These layouts are frozen. Every later change of the protocol is
//! announced by the version numbers in the greeting.

use std::ops::RangeInclusive;

use crate::error::WireError;
use crate::field;
use crate::session::Token;

/// Oldest protocol version that this release speaks.
pub const PROTOCOL_VERSION_MIN: u16 = 1;
/// Newest protocol version that this release speaks.
pub const PROTOCOL_VERSION_MAX: u16 = 2;

/// The newest version that both sides speak, or `None` if there is no common version.
#[must_use]
pub fn common_version(ours: &RangeInclusive<u16>, theirs: &RangeInclusive<u16>) -> Option<u16> {
    let newest = *ours.end().min(theirs.end());
    (ours.contains(&newest) && theirs.contains(&newest)).then_some(newest)
}

/// Length of a [`Hello`].
pub const HELLO_BYTES: usize = 40;
/// Length of a [`HelloReply`].
pub const HELLO_REPLY_BYTES: usize = 24;

/// Ends with a line feed and is followed by non-text bytes, so that a transfer in text mode is
/// detected.
const HELLO_MAGIC: [u8; 8] = *b"VMFERRY\n";
const REPLY_MAGIC: [u8; 8] = *b"VMFERRY\r";

/// What a channel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// 1: the session's control channel.
    Control,
    /// 2: one lane's data channel.
    Data,
    /// 3: a control channel on which a source that is in doubt asks for the destination's word.
    Query,
    /// 4: the control channel of a session that continues after its link was lost.
    Resume,
    /// 5: a channel without a session, on which a source asks what a host has; see
    /// [`ProbeMessage`](crate::ProbeMessage).
    Probe,
    /// 6: a link of one stream that daemons carry. The token is the stream's.
    Stream,
    /// A role of a newer release.
    Other(u8),
}

impl From<u8> for Role {
    fn from(number: u8) -> Self {
        match number {
            1 => Self::Control,
            2 => Self::Data,
            3 => Self::Query,
            4 => Self::Resume,
            5 => Self::Probe,
            6 => Self::Stream,
            other => Self::Other(other),
        }
    }
}

impl From<Role> for u8 {
    fn from(role: Role) -> Self {
        match role {
            Role::Control => 1,
            Role::Data => 2,
            Role::Query => 3,
            Role::Resume => 4,
            Role::Probe => 5,
            Role::Stream => 6,
            Role::Other(other) => other,
        }
    }
}

/// The source's first bytes on a channel.
///
/// ```text
///  0      8             10            12    13    14       16         32
///  +------+-------------+-------------+-----+-----+--------+----------+---------+
///  | magic| version_min | version_max | role| lane|    0   |  token   | attempt |
///  +------+-------------+-------------+-----+-----+--------+----------+---------+ 40
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Oldest protocol version that the source speaks.
    pub version_min: u16,
    /// Newest protocol version that the source speaks.
    pub version_max: u16,
    /// What the channel is for.
    pub role: Role,
    /// The lane of a data channel, 0 otherwise.
    pub lane: u8,
    /// The session's token on a data channel and a resumed control channel, zeros otherwise.
    pub token: Token,
    /// Number of earlier attempts to connect this lane or this session's control channel. The
    /// destination rejects an attempt that is not higher than the last one, because it may be a
    /// replay.
    pub attempt: u64,
}

impl Hello {
    /// The versions that the source speaks.
    #[must_use]
    pub fn versions(&self) -> RangeInclusive<u16> {
        self.version_min..=self.version_max
    }

    /// Encodes the greeting.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&HELLO_MAGIC);
        bytes[8..10].copy_from_slice(&self.version_min.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.version_max.to_le_bytes());
        bytes[12] = self.role.into();
        bytes[13] = self.lane;
        bytes[16..32].copy_from_slice(&self.token.0);
        bytes[32..40].copy_from_slice(&self.attempt.to_le_bytes());
        bytes
    }

    /// Parses a greeting. Reserved bytes are left to later versions and ignored.
    ///
    /// # Errors
    /// [`WireError::NotVmferry`], which names the protocol that the peer seems to speak.
    pub fn parse(bytes: &[u8; HELLO_BYTES]) -> Result<Self, WireError> {
        check_magic(bytes, HELLO_MAGIC)?;
        Ok(Self {
            version_min: u16::from_le_bytes(field(bytes, 8)),
            version_max: u16::from_le_bytes(field(bytes, 10)),
            role: bytes[12].into(),
            lane: bytes[13],
            token: Token(field(bytes, 16)),
            attempt: u64::from_le_bytes(field(bytes, 32)),
        })
    }
}

/// The destination's answer to a greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HelloStatus {
    /// 0: continue.
    Ok,
    /// 1: no common version.
    Version,
    /// 2: the destination is busy with another migration, or a guest already runs in its VMM.
    Busy,
    /// 3: the token does not belong to this session.
    BadToken,
    /// 4: the lane was not announced, or this attempt is not newer than the last one.
    BadLane,
    /// 5: the destination does not serve this role.
    Refused,
    /// 6: the session has passed the point up to which its link can be reestablished.
    TooLate,
    /// 7: there is no receiver for the connection's ticket.
    NoReceiver,
    /// A status of a newer release.
    Other(u8),
}

impl From<u8> for HelloStatus {
    fn from(number: u8) -> Self {
        match number {
            0 => Self::Ok,
            1 => Self::Version,
            2 => Self::Busy,
            3 => Self::BadToken,
            4 => Self::BadLane,
            5 => Self::Refused,
            6 => Self::TooLate,
            7 => Self::NoReceiver,
            other => Self::Other(other),
        }
    }
}

impl From<HelloStatus> for u8 {
    fn from(status: HelloStatus) -> Self {
        match status {
            HelloStatus::Ok => 0,
            HelloStatus::Version => 1,
            HelloStatus::Busy => 2,
            HelloStatus::BadToken => 3,
            HelloStatus::BadLane => 4,
            HelloStatus::Refused => 5,
            HelloStatus::TooLate => 6,
            HelloStatus::NoReceiver => 7,
            HelloStatus::Other(other) => other,
        }
    }
}

/// The destination's reply to a greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloReply {
    /// Whether the source may continue.
    pub status: HelloStatus,
    /// Oldest protocol version that the destination speaks.
    pub version_min: u16,
    /// Newest protocol version that the destination speaks.
    pub version_max: u16,
    /// The negotiated version.
    pub version: u16,
    /// On a data channel: the sequence number of the last frame of its lane that was placed, 0 if
    /// none.
    pub placed: u64,
}

impl HelloReply {
    /// The versions that the destination speaks.
    #[must_use]
    pub fn versions(&self) -> RangeInclusive<u16> {
        self.version_min..=self.version_max
    }

    /// Encodes the reply.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_REPLY_BYTES] {
        let mut bytes = [0; HELLO_REPLY_BYTES];
        bytes[..8].copy_from_slice(&REPLY_MAGIC);
        bytes[8] = self.status.into();
        bytes[10..12].copy_from_slice(&self.version_min.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.version_max.to_le_bytes());
        bytes[14..16].copy_from_slice(&self.version.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.placed.to_le_bytes());
        bytes
    }

    /// Parses a reply.
    ///
    /// # Errors
    /// [`WireError::NotVmferry`].
    pub fn parse(bytes: &[u8; HELLO_REPLY_BYTES]) -> Result<Self, WireError> {
        check_magic(bytes, REPLY_MAGIC)?;
        Ok(Self {
            status: bytes[8].into(),
            version_min: u16::from_le_bytes(field(bytes, 10)),
            version_max: u16::from_le_bytes(field(bytes, 12)),
            version: u16::from_le_bytes(field(bytes, 14)),
            placed: u64::from_le_bytes(field(bytes, 16)),
        })
    }
}

fn check_magic(bytes: &[u8], magic: [u8; 8]) -> Result<(), WireError> {
    if bytes.starts_with(&magic) {
        return Ok(());
    }
    let what = match bytes {
        [0x15 | 0x16, 0x03, ..] => "TLS".to_owned(),
        _ if [HELLO_MAGIC, REPLY_MAGIC].iter().any(|other| bytes.starts_with(other)) => {
            "vmferry in the other direction".to_owned()
        }
        _ if ["GET ", "POST", "HEAD", "PUT ", "HTTP", "PRI "]
            .iter()
            .any(|verb| bytes.starts_with(verb.as_bytes())) =>
        {
            "HTTP".to_owned()
        }
        _ if bytes.starts_with(b"SSH-") => "SSH".to_owned(),
        _ => format!("an unknown protocol that begins with {}", bytes[..8].escape_ascii()),
    };
    Err(WireError::NotVmferry { what })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frozen: if this test fails, the code is wrong.
    #[test]
    fn golden_bytes() {
        let hello = Hello {
            version_min: 1,
            version_max: 0x0203,
            role: Role::Data,
            lane: 7,
            token: Token([0xaa; 16]),
            attempt: 0x0304,
        };
        let mut expected =
            *b"VMFERRY\n\x01\x00\x03\x02\x02\x07\x00\x00________________\x04\x03\0\0\0\0\0\0";
        expected[16..32].fill(0xaa);
        assert_eq!(hello.encode(), expected);
        assert_eq!(Hello::parse(&expected), Ok(hello));

        let reply = HelloReply {
            status: HelloStatus::Version,
            version_min: 1,
            version_max: 2,
            version: 2,
            placed: 5,
        };
        let expected = *b"VMFERRY\r\x01\x00\x01\x00\x02\x00\x02\x00\x05\0\0\0\0\0\0\0";
        assert_eq!(reply.encode(), expected);
        assert_eq!(HelloReply::parse(&expected), Ok(reply));
    }

    #[test]
    fn common_version_is_the_newest() {
        let common = |ours: RangeInclusive<u16>, theirs: RangeInclusive<u16>| {
            let common = common_version(&ours, &theirs);
            assert_eq!(common, common_version(&theirs, &ours), "both sides say the same");
            common
        };
        assert_eq!(common(1..=2, 1..=2), Some(2));
        assert_eq!(common(1..=2, 1..=1), Some(1));
        assert_eq!(common(1..=2, 2..=9), Some(2));
        assert_eq!(common(1..=2, 3..=9), None);
        assert_eq!(common(2..=2, 1..=1), None);
        // A peer may send a range that is empty.
        assert_eq!(common(1..=2, RangeInclusive::new(2, 1)), None);
        assert_eq!(common(1..=2, RangeInclusive::new(9, 0)), None);
    }

    #[test]
    fn other_protocols_are_recognized() {
        let cases: [(&[u8], &str); 5] = [
            (b"\x16\x03\x01\x02\x00", "TLS"),
            (b"GET / HTTP/1.1\r\n", "HTTP"),
            (b"SSH-2.0-OpenSSH", "SSH"),
            (b"VMFERRY\r", "other direction"),
            (b"\x00\x01garbage", "\\x00\\x01garbag"),
        ];
        for (start, expected) in cases {
            let mut bytes = [0; HELLO_BYTES];
            bytes[..start.len()].copy_from_slice(start);
            let error = Hello::parse(&bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn unknown_numbers_are_kept() {
        for number in 0..=255_u8 {
            assert_eq!(u8::from(Role::from(number)), number);
            assert_eq!(u8::from(HelloStatus::from(number)), number);
        }
    }
}
