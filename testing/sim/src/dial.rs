//! Attempts to connect.

use vmferry::MigrateError;
use vmferry::machine::source::io::Input;
use vmferry_wire::{Hello, PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN, Role, Token};

/// An attempt to open a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dial {
    /// The purpose of the channel.
    pub role: Role,
    /// The lane of a data channel.
    pub lane: u8,
    /// The session's token, except on a query channel.
    pub token: Token,
    /// How often it was dialed before.
    pub attempt: u64,
    /// The number of this attempt, over all attempts of a process.
    pub number: u64,
}

impl Dial {
    /// Whether both attempts are for the same channel of the session.
    pub fn replaces(&self, other: &Self) -> bool {
        match (self.role, other.role) {
            (Role::Data, Role::Data) => self.lane == other.lane,
            (Role::Data, _) | (_, Role::Data) => false,
            _ => true,
        }
    }

    pub fn failed(&self, error: MigrateError) -> Input {
        match self.role {
            Role::Data => Input::LaneNotRejoined { lane: self.lane, error },
            Role::Resume => Input::NotResumed(error),
            _ => Input::LinkLost(error),
        }
    }

    pub fn hello(&self) -> Vec<u8> {
        let (version_min, version_max) = (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX);
        let Self { role, lane, token, attempt, .. } = *self;
        Hello { version_min, version_max, role, lane, token, attempt }.encode().to_vec()
    }
}
