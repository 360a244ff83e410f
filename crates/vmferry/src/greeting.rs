//! The first bytes on every channel: who speaks, which protocol versions, which role.

use std::io::{self, Read, Write};

use vmferry_transport::TransportError;
use vmferry_wire::{
    HELLO_BYTES, HELLO_REPLY_BYTES, Hello, HelloReply, HelloStatus, PROTOCOL_VERSION_MAX,
    PROTOCOL_VERSION_MIN, Reason, ReasonCode, Role, Token,
};

use crate::error::MigrateError;

/// What a channel is for.
#[derive(Clone, Copy, Debug)]
pub struct Purpose {
    /// Its role.
    pub role: Role,
    /// The lane of a data channel, 0 otherwise.
    pub lane: u8,
    /// The session's token on a data channel and a resumed control channel, zeros otherwise.
    pub token: Token,
    /// How often it was dialled before.
    pub attempt: u64,
}

impl Purpose {
    /// A first control or query channel.
    #[must_use]
    pub fn control(role: Role) -> Self {
        Self { role, lane: 0, token: Token([0; 16]), attempt: 0 }
    }
}

/// Greets the other side on a fresh channel and waits for its answer. Returns the number of the last frame
/// that is placed of a data channel's lane.
///
/// # Errors
/// [`MigrateError::Refused`] when it does not want this channel, [`MigrateError::Transport`] when
/// the channel or the peer's trust in us failed, [`MigrateError::Protocol`] when what came is not
/// this protocol.
pub fn greet(
    reader: &mut impl Read,
    writer: &mut impl Write,
    purpose: Purpose,
    peer: &str,
) -> Result<u64, MigrateError> {
    let Purpose { role, lane, token, attempt } = purpose;
    let hello = Hello {
        version_min: PROTOCOL_VERSION_MIN,
        version_max: PROTOCOL_VERSION_MAX,
        role,
        lane,
        token,
        attempt,
    };
    let failed = |error: io::Error| MigrateError::Transport(TransportError::from_io(error, peer));
    let sent = writer.write_all(&hello.encode()).and_then(|()| writer.flush());
    let mut reply = [0; HELLO_REPLY_BYTES];
    // A peer that refused our certificate has said so before it closed: read that first.
    match (reader.read_exact(&mut reply), sent) {
        (Ok(()), _) => {}
        (Err(error), Err(write)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(failed(write));
        }
        (Err(error), _) => return Err(failed(error)),
    }
    let reply = HelloReply::parse(&reply).map_err(|error| MigrateError::Protocol {
        channel: channel_name(role, lane),
        offset: 0,
        reason: error.to_string(),
    })?;
    let (code, text) = match reply.status {
        HelloStatus::Ok => return Ok(reply.placed),
        HelloStatus::Version => (
            ReasonCode::Protocol,
            format!(
                "it speaks protocol versions {} to {}, this side {PROTOCOL_VERSION_MIN} to \
                 {PROTOCOL_VERSION_MAX}: use the same vmferry release on both hosts",
                reply.version_min, reply.version_max
            ),
        ),
        HelloStatus::Busy => (
            ReasonCode::Busy,
            "it is receiving or running another guest: start another `vmferry receive`".to_owned(),
        ),
        HelloStatus::BadToken => {
            (ReasonCode::Unauthorised, "the session token is not the one it gave".to_owned())
        }
        HelloStatus::BadLane => {
            (ReasonCode::Protocol, format!("lane {lane} is taken or was not announced"))
        }
        HelloStatus::TooLate => {
            (ReasonCode::TimedOut, "it had begun to load the guest's state already".to_owned())
        }
        HelloStatus::Refused => {
            (ReasonCode::Unauthorised, "it does not serve this kind of channel".to_owned())
        }
        HelloStatus::Other(status) => {
            (ReasonCode::Other(status.into()), format!("status {status} of a newer release"))
        }
    };
    Err(MigrateError::Refused { peer: "destination", reason: Reason::new(code, &text) })
}

/// Reads a greeting. A version that is not ours is answered here.
///
/// # Errors
/// As [`greet`].
pub fn read_hello(
    reader: &mut impl Read,
    writer: &mut impl Write,
    peer: &str,
) -> Result<Hello, MigrateError> {
    let mut bytes = [0; HELLO_BYTES];
    reader
        .read_exact(&mut bytes)
        .map_err(|error| MigrateError::Transport(TransportError::from_io(error, peer)))?;
    let hello = Hello::parse(&bytes).map_err(|error| MigrateError::Protocol {
        channel: "greeting".into(),
        offset: 0,
        reason: error.to_string(),
    })?;
    if hello.version_min > PROTOCOL_VERSION_MAX || hello.version_max < PROTOCOL_VERSION_MIN {
        let _ = answer(writer, HelloStatus::Version, 0);
        let reason = format!(
            "the source speaks protocol versions {} to {}, this side {PROTOCOL_VERSION_MIN} to \
             {PROTOCOL_VERSION_MAX}",
            hello.version_min, hello.version_max
        );
        return Err(MigrateError::Refused {
            peer: "destination",
            reason: Reason::new(ReasonCode::Incompatible, &reason),
        });
    }
    Ok(hello)
}

/// Answers a greeting. `placed`: of a data channel's lane, see [`HelloReply`].
///
/// # Errors
/// The channel's.
pub fn answer(writer: &mut impl Write, status: HelloStatus, placed: u64) -> io::Result<()> {
    let reply = HelloReply {
        status,
        version_min: PROTOCOL_VERSION_MIN,
        version_max: PROTOCOL_VERSION_MAX,
        version: PROTOCOL_VERSION_MAX,
        placed,
    };
    writer.write_all(&reply.encode())?;
    writer.flush()
}

fn channel_name(role: Role, lane: u8) -> String {
    match role {
        Role::Control => "control".into(),
        Role::Data => format!("lane {lane}"),
        Role::Query => "query".into(),
        Role::Resume => "resumed control".into(),
        Role::Other(role) => format!("role {role}"),
    }
}
