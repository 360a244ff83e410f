//! Saving and restoring.

use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryBackend};

use super::{Balloon, BalloonConfig};
use crate::features::Features;
use crate::hints::Hints;
use crate::queues::ActiveQueue;
use crate::{BalloonError, BalloonHost, BalloonState, Interrupt, QueueKind, SavedQueue};

impl<M, H, I> Balloon<M, H, I>
where
    M: GuestAddressSpace,
    M::M: GuestMemoryBackend + Sized,
    H: BalloonHost,
    I: Interrupt,
{
    /// The device's state. With the guest memory of this moment, it restores the same device. Kicks
    /// since the last [`process`](Self::process) are not included: process every queue after
    /// restoring.
    #[must_use]
    pub fn save(&self) -> BalloonState {
        let queue = |kind: QueueKind| {
            let active = self.queue(kind)?;
            Some(SavedQueue::new(kind, active.index, active.broken, &active.queue.state()))
        };
        BalloonState {
            offered: self.offered(),
            negotiated: self.negotiated,
            active: self.active,
            needs_reset: self.needs_reset,
            target_pages: self.target_pages,
            actual_pages: self.actual_pages,
            poison: self.poison,
            hints: self.hints.save(),
            queues: QueueKind::ALL.into_iter().filter_map(queue).collect(),
            statistics_head: self.statistics_head,
            statistics: self.statistics,
            warned: self.warned,
        }
    }

    /// Restores a device from a saved state, possibly on another host. Guest memory must already be
    /// restored. This does not interrupt the driver.
    ///
    /// # Errors
    /// [`BalloonError::State`] for a state that no such device can have, and as [`new`](Self::new).
    pub fn restore(
        config: BalloonConfig,
        memory: M,
        host: H,
        interrupt: I,
        state: &BalloonState,
    ) -> Result<Self, BalloonError> {
        let mut device = Self::new(config, memory, host, interrupt)?;
        let bad = |text: String| Err(BalloonError::State(text));
        let offered = device.offered();
        if state.offered != offered {
            return bad(format!("it offered {}, and this device {offered}", state.offered));
        }
        if let Some(features) = state.negotiated {
            device.negotiate(features)?;
        } else if state.active {
            return bad("it is active without features".into());
        }
        device.hints = Hints::restore(&state.hints)?;
        let knows_hints = device.negotiated().contains(Features::FREE_PAGE_HINT);
        if device.hints.awaited().is_some() && !(state.active && knows_hints) {
            return bad("it awaits hints from a driver that knows none".into());
        }
        if !state.active && !state.queues.is_empty() {
            return bad("it has queues and is not active".into());
        }
        for saved in &state.queues {
            device.restore_queue(saved)?;
        }
        if let Some(head) = state.statistics_head {
            let queue = device.queue(QueueKind::Statistics);
            if queue.is_none_or(|active| head >= active.queue.size()) {
                return bad(format!("it holds buffer {head} of a statistics queue without that"));
            }
        }
        device.active = state.active;
        device.needs_reset = state.needs_reset;
        device.target_pages = state.target_pages;
        device.actual_pages = state.actual_pages;
        device.poison = state.poison;
        device.statistics_head = state.statistics_head;
        device.statistics = state.statistics;
        device.warned = state.warned;
        Ok(device)
    }

    fn restore_queue(&mut self, saved: &SavedQueue) -> Result<(), BalloonError> {
        let SavedQueue { kind, index, broken, .. } = *saved;
        let bad = |reason: String| Err(BalloonError::State(format!("the {kind}: {reason}")));
        let features = self.negotiated();
        if !kind.exists(features) {
            return bad("its feature was not negotiated".into());
        }
        if self.queue(kind).is_some() || self.kind(index).is_some() {
            return bad(format!("it is listed twice, or two have number {index}"));
        }
        if self.max_queue_size(index) == 0 || saved.max_size != self.max_queue_size(index) {
            return bad(format!("number {index} can't have {} entries", saved.max_size));
        }
        let queue = match Queue::try_from(saved.state(features.contains(Features::EVENT_IDX))) {
            Ok(queue) if queue.size() <= queue.max_size() => queue,
            Ok(queue) => return bad(format!("it has {} entries", queue.size())),
            Err(error) => return bad(error.to_string()),
        };
        let active = ActiveQueue { index, broken, queue };
        if !broken && !active.is_in(&*self.memory.memory()) {
            return bad("its rings are not in guest memory".into());
        }
        self.queues[usize::from(kind.number())] = Some(active);
        Ok(())
    }
}
