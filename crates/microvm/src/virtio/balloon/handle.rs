//! A handle of a balloon, for the users outside the machine.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::Serialize;
use vmferry_balloon::{Features, PAGE_BYTES, Statistics};

use super::{Shared, State};
use crate::error::MachineError;
use crate::virtio::host::{BalloonListener, HintRound, by_name};

/// A handle of a balloon, for the control socket and the migration.
#[derive(Clone)]
pub struct Balloon(pub(super) Arc<Shared>);

/// The status of a balloon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BalloonStatus {
    /// Whether the guest has a running driver for the balloon.
    pub driver: bool,
    /// Whether the device waits for a reset by the driver, after a fatal protocol violation.
    pub needs_reset: bool,
    /// The negotiated features.
    pub features: Vec<&'static str>,
    /// The requested size.
    pub target_bytes: u64,
    /// The size that the driver reports.
    pub actual_bytes: u64,
    /// Memory returned to this host since the machine was created, by inflation and by reports.
    pub discarded_bytes: u64,
    /// Memory that the guest has taken back since then, by deflation.
    pub deflated_bytes: u64,
    /// The last round of hints on this host.
    pub hints: Option<HintRound>,
    /// The guest's last statistics.
    pub statistics: Option<BTreeMap<&'static str, u64>>,
    /// The driver's protocol violations.
    pub warnings: Vec<String>,
}

impl Balloon {
    /// Sets the requested size of the balloon, which is rounded down to pages of 4,096 bytes.
    ///
    /// # Errors
    /// [`MachineError::Config`] if the size is more than the guest's memory.
    pub fn set_target(&self, bytes: u64) -> Result<(), MachineError> {
        let memory_bytes = self.0.guest.total_pages() * PAGE_BYTES;
        let pages = u32::try_from(bytes / PAGE_BYTES).ok().filter(|_| bytes <= memory_bytes);
        let Some(pages) = pages else {
            let reason = format!("{bytes} bytes, but the guest has only {memory_bytes}");
            return Err(MachineError::Config { setting: "balloon", reason });
        };
        self.0.lock().transport.device.set_target(pages);
        Ok(())
    }

    /// From now on the guest's balloon and its reports of free pages return no page to the system,
    /// or do so again. What they would have returned meanwhile stays.
    pub fn keep_pages(&self, keep: bool) {
        self.0.keeps_pages.store(keep, Ordering::Release);
    }

    /// The balloon's status.
    #[must_use]
    pub fn status(&self) -> BalloonStatus {
        Self::status_of(&self.0.lock())
    }

    /// The same, if the device answers in this time: it may be waiting for a page of the guest that
    /// is missing.
    #[must_use]
    pub fn status_within(&self, patience: Duration) -> Option<BalloonStatus> {
        Some(Self::status_of(&*self.0.lock_within(patience)?))
    }

    fn status_of(state: &State) -> BalloonStatus {
        let device = &state.transport.device;
        let host = device.host();
        BalloonStatus {
            driver: device.is_active(),
            needs_reset: device.needs_reset(),
            features: device.negotiated().names().collect(),
            target_bytes: u64::from(device.target_pages()) * PAGE_BYTES,
            actual_bytes: u64::from(device.actual_pages()) * PAGE_BYTES,
            discarded_bytes: host.discarded_bytes,
            deflated_bytes: host.deflated_bytes,
            hints: host.hints,
            statistics: device.statistics().map(by_name),
            warnings: host.warnings.clone(),
        }
    }

    /// The guest's last statistics.
    #[must_use]
    pub fn statistics(&self) -> Option<Statistics> {
        self.0.lock().transport.device.statistics().copied()
    }

    /// Requests statistics from the guest, and waits for at most `timeout`. Returns false if none
    /// arrived: the guest is paused, has no support for statistics, or does not answer.
    #[must_use]
    pub fn refresh_statistics(&self, timeout: Duration) -> bool {
        let mut state = self.0.lock();
        let device = &mut state.transport.device;
        let before = device.host().answers;
        let supported = device.is_active() && device.negotiated().contains(Features::STATS_VQ);
        if !supported || device.needs_reset() || !state.running {
            return false;
        }
        // If an earlier request is still unanswered, its answer is used.
        state.transport.device.request_statistics();
        let unanswered = |state: &mut State| {
            state.transport.device.host().answers == before && state.running && !state.ended
        };
        self.0.changed.wait_while_for(&mut state, unanswered, timeout);
        state.transport.device.host().answers != before
    }

    /// Whether the guest has a driver that hints its free pages on request.
    #[must_use]
    pub fn can_hint(&self) -> bool {
        let state = self.0.lock();
        let device = &state.transport.device;
        device.is_active() && device.negotiated().contains(Features::FREE_PAGE_HINT)
    }

    /// Requests hints of free pages from the guest, and returns the command ID. `None` if the guest
    /// has no driver, or one without hints. This ends an earlier round.
    pub fn start_hints(&self) -> Option<u32> {
        let mut state = self.0.lock();
        let id = state.transport.device.start_hints()?.number();
        state.transport.device.host_mut().hints = Some(HintRound { id, ..HintRound::default() });
        Some(id)
    }

    /// Ends the round of hints. The listener gets no more hints of it after this returns. The
    /// driver keeps the hinted pages until the migration ends. If the machine is paused, guest
    /// memory is not accessed.
    pub fn stop_hints(&self) {
        let mut state = self.0.lock();
        if state.running {
            state.transport.device.stop_hints();
        } else {
            state.transport.device.withdraw_hints();
        }
    }

    /// Lets the guest use the hinted pages again, because the migration has ended.
    pub fn finish_hints(&self) {
        self.0.lock().transport.device.finish_hints();
    }

    /// Sets the listener for hints and discards. There is at most one.
    pub fn set_listener(&self, listener: Option<Arc<dyn BalloonListener>>) {
        self.0.lock().transport.device.host_mut().listener = listener;
    }
}
