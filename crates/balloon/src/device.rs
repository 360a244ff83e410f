//! The virtio-balloon device.

mod config;
mod drain;
mod restore;

use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryBackend};

pub use self::config::CONFIG_BYTES;
use crate::buffers::Buffer;
use crate::hints::Hints;
use crate::queues::{self, ActiveQueue, Broken, MAX_QUEUES, OUTSIDE_MEMORY, may_have_number};
use crate::{
    BalloonError, BalloonHost, CommandId, Features, Interrupt, QueueKind, Statistics, Warning,
};

/// Configuration of a balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalloonConfig {
    /// The features to offer. Features that the device does not support are removed, and VERSION_1
    /// is always added.
    pub features: Features,
    /// Maximum number of entries of a queue, a power of two up to 32768. Linux needs 32 for
    /// reporting.
    pub queue_size: u16,
}

impl Default for BalloonConfig {
    /// All features, and 128 entries, as in QEMU.
    fn default() -> Self {
        Self { features: Features::ALL, queue_size: 128 }
    }
}

impl BalloonConfig {
    fn offered(&self) -> Features {
        Features(self.features.0 & Features::ALL.0).with(Features::VERSION_1)
    }
}

/// Whether all buffers of a queue have been processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Progress {
    /// All buffers are processed. The driver will kick when it adds more.
    Done,
    /// There are more buffers, and the driver will not kick for them. Do other pending work, then
    /// call again.
    More,
}

/// A virtio-balloon device. See the [crate](crate)'s documentation.
///
/// `M` is guest memory, such as `Arc<GuestMemoryMmap<B>>`. The device's writes to it (rings) are
/// recorded in its dirty bitmap.
pub struct Balloon<M, H, I> {
    memory: M,
    host: H,
    interrupt: I,
    config: BalloonConfig,
    negotiated: Option<Features>,
    active: bool,
    needs_reset: bool,
    target_pages: u32,
    actual_pages: u32,
    poison: u32,
    hints: Hints,
    /// Indexed by [`QueueKind`]; empty unless active.
    queues: [Option<ActiveQueue>; MAX_QUEUES],
    /// The buffer that the device keeps until it requests statistics.
    statistics_head: Option<u16>,
    statistics: Option<Statistics>,
    /// Kinds of warnings that were already reported.
    warned: u32,
    buffer: Buffer,
    numbers: Vec<u32>,
}

impl<M, H, I> Balloon<M, H, I>
where
    M: GuestAddressSpace,
    M::M: GuestMemoryBackend + Sized,
    H: BalloonHost,
    I: Interrupt,
{
    /// A device in the state after a reset, with target 0.
    ///
    /// # Errors
    /// [`BalloonError::QueueSize`].
    pub fn new(
        config: BalloonConfig,
        memory: M,
        host: H,
        interrupt: I,
    ) -> Result<Self, BalloonError> {
        let size = config.queue_size;
        Queue::new(size).map_err(|_| BalloonError::QueueSize(size))?;
        Ok(Self {
            memory,
            host,
            interrupt,
            config,
            negotiated: None,
            active: false,
            needs_reset: false,
            target_pages: 0,
            actual_pages: 0,
            poison: 0,
            hints: Hints::new(),
            queues: Default::default(),
            statistics_head: None,
            statistics: None,
            warned: 0,
            buffer: Buffer::default(),
            numbers: Vec::new(),
        })
    }

    /// The features that the device offers to the driver.
    #[must_use]
    pub fn offered(&self) -> Features {
        self.config.offered()
    }

    /// The features that the driver has accepted; none before [`negotiate`](Self::negotiate).
    #[must_use]
    pub fn negotiated(&self) -> Features {
        self.negotiated.unwrap_or(Features(0))
    }

    /// Whether the driver has set DRIVER_OK.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// Whether DEVICE_NEEDS_RESET must be set in the device status.
    #[must_use]
    pub fn needs_reset(&self) -> bool {
        self.needs_reset
    }

    /// The embedder's `BalloonHost`.
    pub fn host(&self) -> &H {
        &self.host
    }

    /// The embedder's `BalloonHost`, mutable.
    pub fn host_mut(&mut self) -> &mut H {
        &mut self.host
    }

    /// Maximum number of entries of the driver's queue `index`; 0 if there is no such queue.
    #[must_use]
    pub fn max_queue_size(&self, index: u16) -> u16 {
        if may_have_number(self.offered(), index) { self.config.queue_size } else { 0 }
    }

    /// Handles that the driver sets FEATURES_OK.
    ///
    /// # Errors
    /// [`BalloonError::Features`] if the features are not acceptable: FEATURES_OK must stay clear.
    pub fn negotiate(&mut self, features: Features) -> Result<(), BalloonError> {
        let offered = self.offered();
        if !offered.contains(features) || !features.contains(Features::VERSION_1) {
            return Err(BalloonError::Features { asked: features, offered });
        }
        self.negotiated = Some(features);
        Ok(())
    }

    /// Handles that the driver sets DRIVER_OK. `queues` are the queues that the driver has made
    /// ready, by its numbers. Each of them must be [processed](Self::process) now, because the
    /// driver may already have kicked it.
    ///
    /// # Errors
    /// [`BalloonError::NotNegotiated`]. An invalid queue is not an error; it is marked broken.
    pub fn activate(&mut self, queues: Vec<(u16, Queue)>) -> Result<(), BalloonError> {
        let features = self.negotiated.ok_or(BalloonError::NotNegotiated)?;
        let ready: Vec<u16> =
            queues.iter().filter(|(_, queue)| queue.ready()).map(|(index, _)| *index).collect();
        let kinds = queues::kinds(features, &ready);
        self.active = true;
        self.statistics_head = None;
        self.queues = Default::default();
        for (index, mut queue) in queues {
            let kind = kinds.iter().find(|(known, _)| *known == index).map(|(_, kind)| *kind);
            let Some(kind) = kind.filter(|_| queue.ready()) else { continue };
            queue.set_event_idx(features.contains(Features::EVENT_IDX));
            let active = ActiveQueue { index, broken: false, queue };
            let usable = active.is_in(&*self.memory.memory());
            self.queues[usize::from(kind.number())] = Some(active);
            if !usable {
                self.break_queue(kind, OUTSIDE_MEMORY);
            }
        }
        Ok(())
    }

    /// Disables a queue. The device no longer reads or writes any of it.
    pub fn disable_queue(&mut self, index: u16) {
        let Some(kind) = self.kind(index) else { return };
        self.queues[usize::from(kind.number())] = None;
        if kind == QueueKind::Statistics {
            self.statistics_head = None;
        }
    }

    /// Handles a reset by the driver. The target is kept, because it belongs to the host.
    pub fn reset(&mut self) {
        if let Some(id) = self.hints.awaited() {
            self.hints.stop();
            self.host.hints_complete(id);
        }
        self.hints.stop();
        self.negotiated = None;
        self.active = false;
        self.needs_reset = false;
        (self.actual_pages, self.poison) = (0, 0);
        self.queues = Default::default();
        (self.statistics_head, self.statistics) = (None, None);
    }

    /// Sets the target size of the balloon, in pages of 4096 bytes.
    pub fn set_target(&mut self, pages: u32) {
        if self.target_pages != pages {
            self.target_pages = pages;
            self.config_changed();
        }
    }

    /// Target size of the balloon in pages.
    #[must_use]
    pub fn target_pages(&self) -> u32 {
        self.target_pages
    }

    /// Actual size of the balloon in pages, as reported by the driver.
    #[must_use]
    pub fn actual_pages(&self) -> u32 {
        self.actual_pages
    }

    /// The last statistics from the driver.
    #[must_use]
    pub fn statistics(&self) -> Option<&Statistics> {
        self.statistics.as_ref()
    }

    /// Requests new statistics from the driver, which are passed to [`BalloonHost::statistics`].
    /// Returns `false` if that is not possible: the driver does not support statistics, or has not
    /// answered the previous request.
    pub fn request_statistics(&mut self) -> bool {
        let kind = QueueKind::Statistics;
        let usable = self.queue(kind).is_some_and(|active| !active.broken);
        match self.statistics_head.take_if(|_| usable) {
            Some(head) => {
                self.give_back(kind, head);
                true
            }
            None => false,
        }
    }

    /// Starts a round of hints and returns its ID; a round in progress ends. `None` if the driver
    /// does not support hints or is not active.
    pub fn start_hints(&mut self) -> Option<CommandId> {
        let knows = self.active && self.negotiated().contains(Features::FREE_PAGE_HINT);
        if !knows || self.needs_reset {
            return None;
        }
        let id = self.hints.start();
        self.config_changed();
        Some(id)
    }

    /// Ends the round of hints, if there is one, without access to guest memory: from now on no
    /// hint is reported. This is for a paused guest; otherwise use
    /// [`stop_hints`](Self::stop_hints).
    pub fn withdraw_hints(&mut self) {
        self.hints.stop();
        self.config_changed();
    }

    /// Ends the round of hints, if there is one, and returns all buffers in the queue to the
    /// driver: from now on no hint is reported, and after the call none is in progress. The driver
    /// keeps the pages that it has hinted.
    pub fn stop_hints(&mut self) {
        self.withdraw_hints();
        self.drop_hints();
    }

    /// Tells the driver that the hints are no longer needed and that it may use the hinted pages.
    /// Call it when a migration is over, whether it succeeded or not.
    pub fn finish_hints(&mut self) {
        self.hints.finish();
        self.config_changed();
    }

    /// Tells the driver that the hints are no longer needed, unless that was already done. Call it
    /// for a device that was [restored](Self::restore) from a migration, when the guest starts to
    /// run: the migration is over.
    pub fn restored_after_migration(&mut self) {
        if self.hints.owes_done() {
            self.finish_hints();
        }
    }

    /// The round that may still report hints: it has started, it was not stopped, and the driver
    /// has not ended it.
    #[must_use]
    pub fn awaited_hints(&self) -> Option<CommandId> {
        self.hints.awaited()
    }

    fn config_changed(&mut self) {
        // Before DRIVER_OK the driver does not listen; it reads the configuration when it starts.
        if self.active {
            self.interrupt.config_changed();
        }
    }

    fn kind(&self, index: u16) -> Option<QueueKind> {
        let is_it =
            |kind: &QueueKind| self.queue(*kind).is_some_and(|active| active.index == index);
        QueueKind::ALL.into_iter().find(is_it)
    }

    fn queue(&self, kind: QueueKind) -> Option<&ActiveQueue> {
        self.queues[usize::from(kind.number())].as_ref()
    }

    /// Stops using a queue whose rings are invalid.
    fn break_queue(&mut self, kind: QueueKind, reason: Broken) {
        if let Some(active) = &mut self.queues[usize::from(kind.number())] {
            active.broken = true;
        }
        self.warn(Warning::QueueBroken { queue: kind, reason });
        if !self.needs_reset {
            self.needs_reset = true;
            self.config_changed();
        }
    }

    fn warn(&mut self, warning: Warning) {
        let bit = warning.bit();
        if self.warned & bit == 0 {
            self.warned |= bit;
            self.host.warning(warning);
        }
    }
}
