//! A balloon's state, as it is saved and travels.

use serde::{Deserialize, Serialize};
use virtio_queue::QueueState;

use crate::{Features, QueueKind, Statistics};

/// Everything of a balloon but guest memory. All of it may come from somewhere else, and is checked when it is
/// restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonState {
    /// The features that were offered.
    pub offered: Features,
    /// The features that the driver has accepted, once it has.
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
    /// The buffer for statistics that the device holds, by the number of its first descriptor.
    pub statistics_head: Option<u16>,
    /// The last statistics.
    pub statistics: Option<Statistics>,
    /// The kinds of warnings that were told.
    pub warned: u32,
}

/// The state of free page hinting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedHints {
    /// `free_page_hint_cmd_id` of the configuration space.
    pub shown: u32,
    /// The last ID given out; 0 before the first.
    pub last: u32,
    /// How far the round is.
    pub phase: SavedPhase,
}

/// How far a round of hints is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SavedPhase {
    /// No round.
    Idle,
    /// The driver has not begun.
    Requested,
    /// Hints come.
    Started,
    /// The driver has no more.
    Ended,
}

/// A queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedQueue {
    /// What it is for.
    pub kind: QueueKind,
    /// The number that the driver knows it by.
    pub index: u16,
    /// Whether it is not looked at any more.
    pub broken: bool,
    /// Most entries that it may have.
    pub max_size: u16,
    /// Entries that it has.
    pub size: u16,
    /// Next place of the available ring.
    pub next_avail: u16,
    /// Next place of the used ring.
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
