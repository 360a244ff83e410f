//! The kinds of queues, and an active queue.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{DescriptorChain, Error, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory};

use crate::Features;

/// Maximum number of queues of a balloon.
pub const MAX_QUEUES: usize = 5;

/// The purpose of a queue, in the order of the numbers in section 5.5.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "lowercase", suffix = " queue")]
pub enum QueueKind {
    /// Pages that the driver gives to the balloon.
    Inflate,
    /// Pages that the driver takes back.
    Deflate,
    /// The guest's statistics.
    Statistics,
    /// Hints of free pages.
    #[strum(to_string = "free page")]
    FreePage,
    /// Reports of free pages.
    Reporting,
}

impl QueueKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; MAX_QUEUES] =
        [Self::Inflate, Self::Deflate, Self::Statistics, Self::FreePage, Self::Reporting];

    /// The queue's number in the specification.
    #[must_use]
    pub const fn number(self) -> u16 {
        self as u16
    }

    /// Whether the queue exists with these features.
    #[must_use]
    pub const fn exists(self, features: Features) -> bool {
        features.contains(match self {
            Self::Inflate | Self::Deflate => Features(0),
            Self::Statistics => Features::STATS_VQ,
            Self::FreePage => Features::FREE_PAGE_HINT,
            Self::Reporting => Features::PAGE_REPORTING,
        })
    }
}

/// Whether the driver may use this number for a queue in one of the two numberings (see the crate's
/// documentation), if these features are offered.
pub(crate) fn may_have_number(offered: Features, index: u16) -> bool {
    let exists = |kind: &&QueueKind| kind.exists(offered);
    let queues = QueueKind::ALL.iter().filter(exists).count();
    usize::from(index) < queues
        || QueueKind::ALL.iter().any(|kind| kind.number() == index && kind.exists(offered))
}

/// The kind of each of a driver's queues, given the numbers of those that are ready. See the
/// crate's documentation for the two numberings.
pub(crate) fn kinds(negotiated: Features, ready: &[u16]) -> Vec<(u16, QueueKind)> {
    let existing = || QueueKind::ALL.into_iter().filter(move |kind| kind.exists(negotiated));
    let without_gaps: Vec<u16> = (0..).zip(existing()).map(|(number, _)| number).collect();
    let mut sorted = ready.to_vec();
    sorted.sort_unstable();
    if sorted == without_gaps {
        return (0..).zip(existing()).collect();
    }
    let by_number = existing().map(|kind| (kind.number(), kind));
    by_number.filter(|(number, _)| ready.contains(number)).collect()
}

/// Why a queue is broken.
pub(crate) type Broken = &'static str;

pub(crate) const OUTSIDE_MEMORY: Broken = "its rings are not in guest memory";

/// A queue that the driver has set up.
pub(crate) struct ActiveQueue {
    /// The driver's number for it.
    pub(crate) index: u16,
    pub(crate) broken: bool,
    pub(crate) queue: Queue,
}

impl ActiveQueue {
    pub(crate) fn is_in<M: GuestMemory>(&self, memory: &M) -> bool {
        self.queue.is_valid(memory)
    }

    /// The next buffer that the driver has made available.
    pub(crate) fn next<'m, M: GuestMemory>(
        &mut self,
        memory: &'m M,
    ) -> Result<Option<DescriptorChain<&'m M>>, Broken> {
        let chain = self.queue.iter(memory).map_err(reason)?.next();
        match chain {
            Some(chain) if chain.head_index() >= self.queue.size() => {
                Err("a buffer begins outside the descriptor table")
            }
            chain => Ok(chain),
        }
    }

    /// Whether the driver has made more buffers available than were taken.
    pub(crate) fn has_more<M: GuestMemory>(&self, memory: &M) -> Result<bool, Broken> {
        let available = self.queue.avail_idx(memory, Ordering::Acquire).map_err(reason)?;
        Ok(available.0 != self.queue.next_avail())
    }

    /// Requests a kick for the next buffer, after some were taken. Returns whether there already is
    /// one. Without EVENT_IDX drivers always kick: asking them not to, and later to kick again, is
    /// not worth two writes to guest memory.
    pub(crate) fn enable_kicks<M: GuestMemory>(&mut self, memory: &M) -> Result<bool, Broken> {
        Ok(self.queue.event_idx_enabled()
            && self.queue.enable_notification(memory).map_err(reason)?)
    }

    /// Returns a buffer to the driver. The device never writes into buffers, so the used length is
    /// 0.
    pub(crate) fn give_back<M: GuestMemory>(
        &mut self,
        memory: &M,
        head: u16,
    ) -> Result<(), Broken> {
        self.queue.add_used(memory, head, 0).map_err(reason)
    }

    /// Whether the driver wants an interrupt for used buffers. At least one buffer must have been
    /// used.
    pub(crate) fn wants_interrupt<M: GuestMemory>(&mut self, memory: &M) -> Result<bool, Broken> {
        if self.queue.event_idx_enabled() {
            return self.queue.needs_notification(memory).map_err(reason);
        }
        // virtio-queue leaves the flag to its user. The driver may set it at any time, so an
        // unneeded interrupt is permitted, but the used index must be visible before the flag is
        // read.
        std::sync::atomic::fence(Ordering::SeqCst);
        let flags = memory
            .load::<u16>(GuestAddress(self.queue.avail_ring()), Ordering::Relaxed)
            .map_err(|_| OUTSIDE_MEMORY)?;
        Ok(u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT == 0)
    }
}

fn reason(error: Error) -> Broken {
    match error {
        Error::InvalidAvailRingIndex => "its available index is ahead by more than its size",
        Error::InvalidDescriptorIndex => "a buffer begins outside the descriptor table",
        Error::QueueNotReady => "its available ring is at address 0",
        _ => OUTSIDE_MEMORY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use QueueKind::{Deflate, FreePage, Inflate, Reporting, Statistics};

    #[test]
    fn queue_numbers_with_and_without_gaps_are_accepted() {
        let all = Features::ALL;
        let no_statistics = all.without(Features::STATS_VQ);
        let only_reports = no_statistics.without(Features::FREE_PAGE_HINT);
        for (features, ready, expected) in [
            (
                all,
                &[0, 1, 2, 3, 4][..],
                &[(0, Inflate), (1, Deflate), (2, Statistics), (3, FreePage), (4, Reporting)][..],
            ),
            (
                no_statistics,
                &[0, 1, 3, 4],
                &[(0, Inflate), (1, Deflate), (3, FreePage), (4, Reporting)],
            ),
            (
                no_statistics,
                &[3, 2, 1, 0],
                &[(0, Inflate), (1, Deflate), (2, FreePage), (3, Reporting)],
            ),
            (only_reports, &[0, 1, 4], &[(0, Inflate), (1, Deflate), (4, Reporting)]),
            (only_reports, &[0, 1, 2], &[(0, Inflate), (1, Deflate), (2, Reporting)]),
            // Neither numbering: some queues are missing, or there are too many.
            (only_reports, &[0, 1], &[(0, Inflate), (1, Deflate)]),
            (only_reports, &[0, 1, 2, 3], &[(0, Inflate), (1, Deflate)]),
            (all, &[4], &[(4, Reporting)]),
            (all, &[], &[]),
        ] {
            assert_eq!(kinds(features, ready), expected, "{features} {ready:?}");
        }
    }

    #[test]
    fn queue_number_beyond_the_offered_features_is_refused() {
        let offered = Features::PAGE_REPORTING;
        let there = |index| may_have_number(offered, index);
        assert_eq!([0, 1, 2, 3, 4, 5].map(there), [true, true, true, false, true, false]);
    }
}
