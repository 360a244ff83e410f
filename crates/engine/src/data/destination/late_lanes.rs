//! The fetch lanes of a session at the destination, of either kind.

use std::io;

use super::fetch::lanes::FetchLanes;
use super::tunnel_lanes::TunnelLanes;
use crate::link::DataChannel;

/// The lanes on which pages arrive while the guest runs.
pub enum LateLanes {
    /// The engine fetches the pages.
    Pages(FetchLanes),
    /// The VMM of a carried guest fetches them through its own streams.
    Tunnels(TunnelLanes),
}

impl LateLanes {
    /// The lanes that the engine fetches pages on.
    #[must_use]
    pub fn pages(&self) -> Option<&FetchLanes> {
        match self {
            Self::Pages(lanes) => Some(lanes),
            Self::Tunnels(_) => None,
        }
    }

    /// Whether this is the number of a fetch lane.
    #[must_use]
    pub fn has(&self, lane: u8) -> bool {
        match self {
            Self::Pages(lanes) => lanes.has(lane),
            Self::Tunnels(lanes) => lanes.has(lane),
        }
    }

    /// Prepares a lane for a channel that was dialed `attempt` times before. False if this attempt
    /// is not newer than the present channel's; it may be a replay.
    #[must_use]
    pub fn expect(&self, lane: u8, attempt: u64) -> bool {
        match self {
            Self::Pages(lanes) => lanes.expect(lane, attempt),
            Self::Tunnels(lanes) => lanes.expect(lane, attempt),
        }
    }

    /// Uses a greeted channel for a lane that [expects](Self::expect) it.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn join(&self, lane: u8, channel: DataChannel) -> io::Result<()> {
        match self {
            Self::Pages(lanes) => lanes.join(lane, channel),
            Self::Tunnels(lanes) => lanes.join(lane, channel),
        }
    }

    /// Whether a lane's present channel is the one that was dialed this number of times before.
    #[must_use]
    pub fn is_at(&self, lane: u8, attempt: u64) -> bool {
        match self {
            Self::Pages(lanes) => lanes.is_at(lane, attempt),
            Self::Tunnels(lanes) => lanes.is_at(lane, attempt),
        }
    }

    /// A lane has lost its channel. A tunnel waits for its next one.
    pub fn lost(&self) {
        if let Self::Pages(lanes) = self {
            lanes.lost();
        }
    }
}
