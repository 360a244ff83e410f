//! What the driver of the guest's balloon reports of itself.

use serde::{Deserialize, Serialize};
use vmferry_memory::{GuestMemory, MemoryError};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const BALLOON_ADDRESS: u64 = 0x1_1000;
const BALLOON_MAGIC: u64 = u64::from_le_bytes(*b"VMFERRYL");
const BALLOON_VERSION: u32 = 2;

/// `struct balloon_report`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct RawBalloon {
    magic: u64,
    version: u32,
    state: u32,
    features: u64,
    interrupts: u64,
    unheard: u64,
    notifications: u64,
    command: u32,
    rounds: u32,
    rounds_ended: u64,
    hinted_blocks: u64,
    reported_blocks: u64,
    held_blocks: u32,
    inflated_blocks: u32,
    target_blocks: u32,
    deflated_on_demand: u32,
    statistics: u64,
    rewrites: u64,
    rewrite_rounds: u64,
    lies: u64,
}
const _: () = assert!(size_of::<RawBalloon>() == 128);

/// What the driver of the guest's balloon is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverState {
    /// There is a device that it can't drive.
    Failed,
    /// It waits for the device.
    Idle,
    /// It hints free blocks.
    Hinting,
    /// It has hinted them, and holds them until the host is done.
    Holding,
}

/// What the driver of the guest's balloon says of itself. Blocks are of 4 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonReport {
    /// What it is at.
    pub state: DriverState,
    /// The features that it has negotiated, by their bits.
    pub features: u64,
    /// Interrupts of the device that it has seen.
    pub interrupts: u64,
    /// Times that it found news of the device before an interrupt came: it looks by itself now and then.
    pub unheard: u64,
    /// Notifications that it has sent.
    pub notifications: u64,
    /// The hint command that it has read last: 0 is STOP, 1 is DONE, all others are IDs.
    pub command: u32,
    /// Rounds of hints begun.
    pub rounds: u32,
    /// Rounds in which all free blocks were hinted.
    pub rounds_ended: u64,
    /// Blocks hinted, in all rounds.
    pub hinted_blocks: u64,
    /// Blocks reported as free.
    pub reported_blocks: u64,
    /// Blocks hinted and not yet given back.
    pub held_blocks: u32,
    /// Blocks in the balloon.
    pub inflated_blocks: u32,
    /// Blocks that the host wants there.
    pub target_blocks: u32,
    /// Times that the guest took blocks back because it had no others.
    pub deflated_on_demand: u32,
    /// Times that it gave statistics.
    pub statistics: u64,
    /// Blocks that it wrote at some stage of the protocol (the word `rewrite`).
    pub rewrites: u64,
    /// Times that it has checked all those that it keeps.
    pub rewrite_rounds: u64,
    /// Lies that it has told and the device has heard (the word `lie`).
    pub lies: u64,
}

impl BalloonReport {
    pub(super) fn read(memory: &GuestMemory) -> Result<Option<Self>, MemoryError> {
        let mut bytes = [0; size_of::<RawBalloon>()];
        memory.read_at(BALLOON_ADDRESS, &mut bytes)?;
        let raw: RawBalloon = zerocopy::transmute!(bytes);
        let state = match raw.state {
            1 => DriverState::Failed,
            2 => DriverState::Idle,
            3 => DriverState::Hinting,
            4 => DriverState::Holding,
            _ => return Ok(None),
        };
        let is_one = raw.magic == BALLOON_MAGIC && raw.version == BALLOON_VERSION;
        Ok(is_one.then_some(Self {
            state,
            features: raw.features,
            interrupts: raw.interrupts,
            unheard: raw.unheard,
            notifications: raw.notifications,
            command: raw.command,
            rounds: raw.rounds,
            rounds_ended: raw.rounds_ended,
            hinted_blocks: raw.hinted_blocks,
            reported_blocks: raw.reported_blocks,
            held_blocks: raw.held_blocks,
            inflated_blocks: raw.inflated_blocks,
            target_blocks: raw.target_blocks,
            deflated_on_demand: raw.deflated_on_demand,
            statistics: raw.statistics,
            rewrites: raw.rewrites,
            rewrite_rounds: raw.rewrite_rounds,
            lies: raw.lies,
        }))
    }
}
