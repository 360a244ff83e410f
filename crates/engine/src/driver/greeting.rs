//! The greeting on every channel: protocol versions and the channel's role.

use std::io::{self, Read, Write};
use std::ops::RangeInclusive;

use vmferry_transport::TransportError;
use vmferry_wire::{
    HELLO_BYTES, HELLO_REPLY_BYTES, Hello, HelloReply, HelloStatus, Reason, ReasonCode, Role,
    Token, common_version,
};

use crate::error::MigrateError;

/// The purpose of a channel.
#[derive(Clone, Copy, Debug)]
pub struct Purpose {
    /// Its role.
    pub role: Role,
    /// The lane of a data channel, 0 otherwise.
    pub lane: u8,
    /// The session's token on a data channel and a resumed control channel, zeros otherwise.
    pub token: Token,
    /// How often it was dialed before.
    pub attempt: u64,
}

impl Purpose {
    /// The purpose of a first control channel or a query channel.
    #[must_use]
    pub fn control(role: Role) -> Self {
        Self { role, lane: 0, token: Token([0; 16]), attempt: 0 }
    }
}

/// The destination's answer to a greeting.
#[derive(Clone, Copy, Debug)]
pub struct Greeted {
    /// The negotiated protocol version.
    pub version: u16,
    /// The number of the last placed frame of a data channel's lane.
    pub placed: u64,
}

/// Greets the peer on a new channel as a side that speaks `versions`, and waits for the answer.
///
/// # Errors
/// [`MigrateError::Refused`] if the peer refuses this channel, [`MigrateError::Transport`] if the
/// channel failed or the peer does not trust this side, [`MigrateError::Protocol`] if the answer is
/// not of this protocol.
pub fn greet(
    reader: &mut impl Read,
    writer: &mut impl Write,
    purpose: Purpose,
    versions: &RangeInclusive<u16>,
    peer: &str,
) -> Result<Greeted, MigrateError> {
    let Purpose { role, lane, token, attempt } = purpose;
    let (version_min, version_max) = (*versions.start(), *versions.end());
    let hello = Hello { version_min, version_max, role, lane, token, attempt };
    let failed = |error: io::Error| MigrateError::Transport(TransportError::from_io(error, peer));
    let sent = writer.write_all(&hello.encode()).and_then(|()| writer.flush());
    let mut reply = [0; HELLO_REPLY_BYTES];
    // A peer that rejects our certificate sends an alert before it closes, so the answer is read
    // first.
    match (reader.read_exact(&mut reply), sent) {
        (Ok(()), _) => {}
        (Err(error), Err(write)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(failed(write));
        }
        (Err(error), _) => return Err(failed(error)),
    }
    let protocol = |reason: String| MigrateError::protocol(channel_name(role, lane), 0, reason);
    let reply = HelloReply::parse(&reply).map_err(|error| protocol(error.to_string()))?;
    let (code, text) = match reply.status {
        HelloStatus::Ok if versions.contains(&reply.version) => {
            return Ok(Greeted { version: reply.version, placed: reply.placed });
        }
        HelloStatus::Ok => {
            let ours = words(versions);
            let text = format!("it speaks protocol {} to a side of {ours}", reply.version);
            return Err(protocol(text));
        }
        HelloStatus::Version => {
            (ReasonCode::Protocol, no_common_version("it", &reply.versions(), versions))
        }
        HelloStatus::Busy => (
            ReasonCode::Busy,
            "it is receiving or running another guest: start another `vmferry receive`".to_owned(),
        ),
        HelloStatus::BadToken => {
            (ReasonCode::Unauthorized, "the session token is not the one it gave".to_owned())
        }
        HelloStatus::BadLane => {
            (ReasonCode::Protocol, format!("lane {lane} is taken or was not announced"))
        }
        HelloStatus::TooLate => {
            (ReasonCode::TimedOut, "it had begun to load the guest's state already".to_owned())
        }
        HelloStatus::Refused => {
            (ReasonCode::Unauthorized, "it does not serve this kind of channel".to_owned())
        }
        HelloStatus::NoReceiver => (
            ReasonCode::TimedOut,
            "its receiver for this guest has ended: see what its daemon says".to_owned(),
        ),
        HelloStatus::Other(status) => {
            (ReasonCode::Other(status.into()), format!("status {status} of a newer release"))
        }
    };
    Err(MigrateError::Refused { peer: "destination", reason: Reason::new(code, &text) })
}

/// The protocol versions in the destination's answers.
#[derive(Clone, Debug)]
pub struct Versions {
    /// The versions that the destination speaks.
    pub ours: RangeInclusive<u16>,
    /// The negotiated version.
    pub version: u16,
}

/// Reads a greeting as a side that speaks `versions`. A greeting without a common version is
/// answered here.
///
/// # Errors
/// As [`greet`].
pub fn read_hello(
    reader: &mut impl Read,
    writer: &mut impl Write,
    versions: &RangeInclusive<u16>,
    peer: &str,
) -> Result<(Hello, Versions), MigrateError> {
    let mut bytes = [0; HELLO_BYTES];
    reader
        .read_exact(&mut bytes)
        .map_err(|error| MigrateError::Transport(TransportError::from_io(error, peer)))?;
    let hello = Hello::parse(&bytes)
        .map_err(|error| MigrateError::protocol("greeting", 0, error.to_string()))?;
    let common = common_version(versions, &hello.versions());
    let spoken = Versions { ours: versions.clone(), version: common.unwrap_or(*versions.end()) };
    if common.is_none() {
        let _ = answer(writer, &spoken, HelloStatus::Version, 0);
        let reason = no_common_version("the source", &hello.versions(), versions);
        return Err(MigrateError::Refused {
            peer: "destination",
            reason: Reason::new(ReasonCode::Incompatible, &reason),
        });
    }
    Ok((hello, spoken))
}

/// Why two sides have no common version, and what to do.
fn no_common_version(
    who: &str,
    theirs: &RangeInclusive<u16>,
    ours: &RangeInclusive<u16>,
) -> String {
    let older = if theirs.end() < ours.start() { "the other host" } else { "this host" };
    format!(
        "{who} speaks protocol {}, and this side {}: let both sides choose the version, or upgrade \
         vmferry on {older} to a release that speaks both",
        words(theirs),
        words(ours)
    )
}

fn words(versions: &RangeInclusive<u16>) -> String {
    let (oldest, newest) = (versions.start(), versions.end());
    if oldest == newest {
        format!("version {newest}")
    } else {
        format!("versions {oldest} to {newest}")
    }
}

/// Answers a greeting. For `placed` of a data channel's lane, see [`HelloReply`].
///
/// # Errors
/// The channel's error.
pub fn answer(
    writer: &mut impl Write,
    versions: &Versions,
    status: HelloStatus,
    placed: u64,
) -> io::Result<()> {
    let (version_min, version_max) = (*versions.ours.start(), *versions.ours.end());
    let version = versions.version;
    let reply = HelloReply { status, version_min, version_max, version, placed };
    writer.write_all(&reply.encode())?;
    writer.flush()
}

fn channel_name(role: Role, lane: u8) -> String {
    match role {
        Role::Control => "control".into(),
        Role::Data => format!("lane {lane}"),
        Role::Query => "query".into(),
        Role::Resume => "resumed control".into(),
        Role::Probe => "probe".into(),
        Role::Stream => "stream".into(),
        Role::Other(role) => format!("role {role}"),
    }
}
