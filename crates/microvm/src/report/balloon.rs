//! The report of the guest's balloon driver.

use serde::{Deserialize, Serialize};
use vmferry_memory::{GuestMemory, MemoryError};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const BALLOON_ADDRESS: u64 = 0x1_1000;
/// The end of the driver's report.
pub(super) const END: u64 = BALLOON_ADDRESS + size_of::<RawBalloon>() as u64;
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

/// The state of the guest's balloon driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverState {
    /// The driver cannot drive this device.
    Failed,
    /// The driver waits for the device.
    Idle,
    /// The driver is hinting free blocks.
    Hinting,
    /// The driver has hinted its free blocks, and keeps them until the host sends DONE.
    Holding,
}

/// The report of the guest's balloon driver. A block is 4 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonReport {
    /// The driver's state.
    pub state: DriverState,
    /// The negotiated features, as bits.
    pub features: u64,
    /// Interrupts of the device that the driver has handled.
    pub interrupts: u64,
    /// Times that polling found work of the device before its interrupt arrived.
    pub unheard: u64,
    /// Notifications sent to the device.
    pub notifications: u64,
    /// The last hint command that the driver has read: 0 is STOP, 1 is DONE, all others are IDs.
    pub command: u32,
    /// Rounds of hints begun.
    pub rounds: u32,
    /// Rounds in which all free blocks were hinted.
    pub rounds_ended: u64,
    /// Blocks hinted, in all rounds.
    pub hinted_blocks: u64,
    /// Blocks reported as free.
    pub reported_blocks: u64,
    /// Blocks hinted and not yet returned to the guest's allocator.
    pub held_blocks: u32,
    /// Blocks in the balloon.
    pub inflated_blocks: u32,
    /// The balloon size in blocks that the host asks for.
    pub target_blocks: u32,
    /// Times that the guest deflated the balloon because it had no other free blocks.
    pub deflated_on_demand: u32,
    /// Times that the driver sent statistics.
    pub statistics: u64,
    /// Blocks that the driver wrote at some stage of the protocol (the word `rewrite`).
    pub rewrites: u64,
    /// Complete checks of the rewritten blocks that the driver keeps.
    pub rewrite_rounds: u64,
    /// Protocol violations that the device has processed (the word `lie`).
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
        let is_valid = raw.magic == BALLOON_MAGIC && raw.version == BALLOON_VERSION;
        Ok(is_valid.then_some(Self {
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
