//! The saved state of a balloon.

use serde::{Deserialize, Serialize};
use virtio_queue::QueueState;

use crate::{Features, QueueKind, Statistics};

/// The complete state of a balloon, except guest memory. It may come from an untrusted place and is
/// checked when it is restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonState {
    /// The features that were offered.
    pub offered: Features,
    /// The features that the driver has accepted, if it has.
    pub negotiated: Option<Features>,
    /// Whether the driver has set DRIVER_OK.
    pub active: bool,
    /// Whether a queue is broken and the driver must reset the device.
    pub needs_reset: bool,
    /// `num_pages` of the configuration space.
    pub target_pages: u32,
    /// `actual` of the configuration space.
    pub actual_pages: u32,
    /// `poison_val` of the configuration space.
    pub poison: u32,
    /// Free page hinting.
    pub hints: SavedHints,
    /// The queues that the driver has set up.
    pub queues: Vec<SavedQueue>,
    /// The statistics buffer that the device keeps, given by the index of its first descriptor.
    pub statistics_head: Option<u16>,
    /// The last statistics from the driver.
    pub statistics: Option<Statistics>,
    /// The kinds of warnings that were already reported.
    pub warned: u32,
}

/// The state of free page hinting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedHints {
    /// `free_page_hint_cmd_id` of the configuration space.
    pub shown: u32,
    /// The last ID that was used; 0 before the first.
    pub last: u32,
    /// The phase of the round.
    pub phase: SavedPhase,
}

/// The phase of a round of hints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SavedPhase {
    /// No round.
    Idle,
    /// The driver has not started the round yet.
    Requested,
    /// The driver sends hints.
    Started,
    /// The driver has ended the round.
    Ended,
}

/// The state of a queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedQueue {
    /// The purpose of the queue.
    pub kind: QueueKind,
    /// The driver's number for it.
    pub index: u16,
    /// Whether the device has stopped using it.
    pub broken: bool,
    /// Maximum number of entries.
    pub max_size: u16,
    /// Number of entries.
    pub size: u16,
    /// Next index of the available ring.
    pub next_avail: u16,
    /// Next index of the used ring.
    pub next_used: u16,
    /// Guest-physical address of the descriptors.
    pub descriptors: u64,
    /// Guest-physical address of the available ring.
    pub available: u64,
    /// Guest-physical address of the used ring.
    pub used: u64,
}

impl SavedQueue {
    pub(crate) fn new(kind: QueueKind, index: u16, broken: bool, state: &QueueState) -> Self {
        Self {
            kind,
            index,
            broken,
            max_size: state.max_size,
            size: state.size,
            next_avail: state.next_avail,
            next_used: state.next_used,
            descriptors: state.desc_table,
            available: state.avail_ring,
            used: state.used_ring,
        }
    }

    pub(crate) fn state(&self, event_idx: bool) -> QueueState {
        QueueState {
            max_size: self.max_size,
            next_avail: self.next_avail,
            next_used: self.next_used,
            event_idx_enabled: event_idx,
            size: self.size,
            ready: true,
            desc_table: self.descriptors,
            avail_ring: self.available,
            used_ring: self.used,
        }
    }
}
