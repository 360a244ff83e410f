//! The device.

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

/// What a balloon is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalloonConfig {
    /// The features to offer; those that the device can't have are left out, and VERSION_1 is always in.
    pub features: Features,
    /// Most entries of a queue, a power of two up to 32768. Linux needs 32 for reporting.
    pub queue_size: u16,
}

impl Default for BalloonConfig {
    /// All features, and 128 entries, as QEMU has.
    fn default() -> Self {
        Self { features: Features::ALL, queue_size: 128 }
    }
}

impl BalloonConfig {
    fn offered(&self) -> Features {
        Features(self.features.0 & Features::ALL.0).with(Features::VERSION_1)
    }
}

/// Whether a queue has been worked off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Progress {
    /// The driver will kick when there is more.
    Done,
    /// There is more, and no kick will come for it: call again, after having looked after other things.
    More,
}

/// A virtio-balloon device. See the [crate](crate)'s documentation.
///
/// `M` is guest memory, such as `Arc<GuestMemoryMmap<B>>`; what the device writes there (rings) goes through its
/// dirty bitmap.
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
    /// By [`QueueKind`]; empty unless active.
    queues: [Option<ActiveQueue>; MAX_QUEUES],
    /// The buffer that is held until statistics are wanted.
    statistics_head: Option<u16>,
    statistics: Option<Statistics>,
    /// Kinds of warnings that were told.
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
    /// A device that was just reset, with a balloon that shall be empty.
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

    /// The features to offer to the driver.
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

    /// Whether DEVICE_NEEDS_RESET is to be set in the device's status.
    #[must_use]
    pub fn needs_reset(&self) -> bool {
        self.needs_reset
    }

    /// The embedder's side.
    pub fn host(&self) -> &H {
        &self.host
    }

    /// The embedder's side, to be changed.
    pub fn host_mut(&mut self) -> &mut H {
        &mut self.host
    }

    /// The way to the driver.
    pub fn interrupt_mut(&mut self) -> &mut I {
        &mut self.interrupt
    }

    /// Most entries of the queue that the driver calls `index`; 0 if there is no such queue.
    #[must_use]
    pub fn max_queue_size(&self, index: u16) -> u16 {
        if may_have_number(self.offered(), index) { self.config.queue_size } else { 0 }
    }

    /// The driver sets FEATURES_OK.
    ///
    /// # Errors
    /// [`BalloonError::Features`] if it must not: FEATURES_OK is to stay clear.
    pub fn negotiate(&mut self, features: Features) -> Result<(), BalloonError> {
        let offered = self.offered();
        if !offered.contains(features) || !features.contains(Features::VERSION_1) {
            return Err(BalloonError::Features { asked: features, offered });
        }
        self.negotiated = Some(features);
        Ok(())
    }

    /// The driver sets DRIVER_OK; `queues` are those that it has made ready, by its numbers. Each of them is to
    /// be [processed](Self::process) now: a driver may have kicked it before.
    ///
    /// # Errors
    /// [`BalloonError::NotNegotiated`]. A queue that can't be is no error, but broken.
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

    /// The driver takes a queue away. Nothing of it is looked at or written any more.
    pub fn disable_queue(&mut self, index: u16) {
        let Some(kind) = self.kind(index) else { return };
        self.queues[usize::from(kind.number())] = None;
        if kind == QueueKind::Statistics {
            self.statistics_head = None;
        }
    }

    /// The driver resets the device. The target stays, since it is the host's.
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

    /// How many pages of 4096 bytes the balloon shall have.
    pub fn set_target(&mut self, pages: u32) {
        if self.target_pages != pages {
            self.target_pages = pages;
            self.config_changed();
        }
    }

    /// How many pages the balloon shall have.
    #[must_use]
    pub fn target_pages(&self) -> u32 {
        self.target_pages
    }

    /// How many pages the balloon has, as the driver says.
    #[must_use]
    pub fn actual_pages(&self) -> u32 {
        self.actual_pages
    }

    /// The last statistics that the driver sent.
    #[must_use]
    pub fn statistics(&self) -> Option<&Statistics> {
        self.statistics.as_ref()
    }

    /// Asks the driver for new statistics, which come by [`BalloonHost::statistics`]. False if it can't be
    /// asked: it does not know statistics, or has not answered the request before.
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

    /// Begins a round of hints and returns its ID; one that is under way ends. `None` if the driver does not
    /// know hints or is not there.
    pub fn start_hints(&mut self) -> Option<CommandId> {
        let knows = self.active && self.negotiated().contains(Features::FREE_PAGE_HINT);
        if !knows || self.needs_reset {
            return None;
        }
        let id = self.hints.start();
        self.config_changed();
        Some(id)
    }

    /// Ends the round of hints, if there is one, without touching guest memory: from now on none is reported.
    /// For a guest that is paused; [`stop_hints`](Self::stop_hints) else.
    pub fn withdraw_hints(&mut self) {
        self.hints.stop();
        self.config_changed();
    }

    /// Ends the round of hints, if there is one, and gives all buffers back that are in the queue: from now on
    /// none is reported, and on return nothing is under way. The driver keeps the pages that it has hinted.
    pub fn stop_hints(&mut self) {
        self.withdraw_hints();
        self.drop_hints();
    }

    /// Says that hints are not needed any more: the driver may use the pages that it has hinted. To be called
    /// when a migration is over, whichever way.
    pub fn finish_hints(&mut self) {
        self.hints.finish();
        self.config_changed();
    }

    /// Says that hints are not needed any more, if that was not said yet. For a device that was
    /// [restored](Self::restore) with what a migration has brought, when it begins to run: the migration is over.
    pub fn restored_after_migration(&mut self) {
        if self.hints.owes_done() {
            self.finish_hints();
        }
    }

    /// The round whose hints may still come: it has begun, and neither has the driver said that it has no more
    /// nor was it stopped.
    #[must_use]
    pub fn awaited_hints(&self) -> Option<CommandId> {
        self.hints.awaited()
    }

    fn config_changed(&mut self) {
        // Before DRIVER_OK no driver listens; it reads the configuration when it begins.
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

    /// Ends the use of a queue whose rings can't be followed.
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
