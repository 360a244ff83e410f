//! Processing the buffers in the queues.

use virtio_queue::QueueT;
use vm_memory::{GuestAddress, GuestAddressSpace, GuestMemoryBackend};

use super::{Balloon, Progress};
use crate::buffers::Buffer;
use crate::hints::Reaction;
use crate::queues::{ActiveQueue, Broken, OUTSIDE_MEMORY};
use crate::ranges::{Cut, pages_within, runs};
use crate::{BalloonHost, Features, GuestRange, Interrupt, QueueKind, Statistics, Warning};

/// Maximum number of page numbers used from one buffer. Linux sends 256 at once, and other drivers
/// some thousands; a buffer of 4 GiB would occupy the thread for minutes.
const MAX_NUMBERS: usize = 16384;
/// Maximum number of bytes of statistics used: a hundred times what Linux sends.
const MAX_STATISTICS_BYTES: usize = 16384;
/// Length of a command in bytes.
const COMMAND_BYTES: usize = 4;
/// Work done by one call, in page numbers and descriptors, up to the end of the buffer that exceeds
/// it. It takes some tens of milliseconds if each needs its own system call.
const WORK_PER_CALL: usize = MAX_NUMBERS;

impl<M, H, I> Balloon<M, H, I>
where
    M: GuestAddressSpace,
    M::M: GuestMemoryBackend + Sized,
    H: BalloonHost,
    I: Interrupt,
{
    /// Processes buffers of the driver's queue `index`: at most as many as it has entries, and
    /// about 16384 page numbers or descriptors. Queues that are not ready are ignored.
    pub fn process(&mut self, index: u16) -> Progress {
        match self.kind(index) {
            Some(kind) => self.work(kind, WORK_PER_CALL),
            None => Progress::Done,
        }
    }

    /// Returns all hints that are in the queue now to the driver.
    pub(super) fn drop_hints(&mut self) {
        // One call processes as many buffers as the queue can hold.
        let _ = self.work(QueueKind::FreePage, usize::MAX);
    }

    pub(super) fn give_back(&mut self, kind: QueueKind, head: u16) {
        let memory = self.memory.memory();
        let place = usize::from(kind.number());
        let Some(active) = self.queues[place].as_mut().filter(|active| !active.broken) else {
            return;
        };
        let given =
            active.give_back(&*memory, head).and_then(|()| active.wants_interrupt(&*memory));
        let index = active.index;
        match given {
            Ok(true) => self.interrupt.used_buffers(index),
            Ok(false) => {}
            Err(reason) => self.break_queue(kind, reason),
        }
    }

    fn work(&mut self, kind: QueueKind, budget: usize) -> Progress {
        let place = usize::from(kind.number());
        // Taken out of the array, so that the rest of the device can be used at the same time.
        let Some(mut active) = self.queues[place].take() else { return Progress::Done };
        let mut result = Ok(Progress::Done);
        if !active.broken {
            let memory = self.memory.memory();
            let mut used = false;
            result = self.take_buffers(&*memory, kind, &mut active, budget, &mut used);
            // This includes buffers that were used before the queue was found to be broken.
            if used && active.wants_interrupt(&*memory) == Ok(true) {
                self.interrupt.used_buffers(active.index);
            }
        }
        self.queues[place] = Some(active);
        result.unwrap_or_else(|reason| {
            self.break_queue(kind, reason);
            Progress::Done
        })
    }

    fn take_buffers(
        &mut self,
        memory: &M::M,
        kind: QueueKind,
        active: &mut ActiveQueue,
        mut budget: usize,
        used: &mut bool,
    ) -> Result<Progress, Broken> {
        if !active.is_in(memory) {
            return Err(OUTSIDE_MEMORY);
        }
        let size = active.queue.size();
        let mut taken_any = false;
        for _ in 0..size {
            let Some(chain) = active.next(memory)? else { break };
            taken_any = true;
            let head = chain.head_index();
            let mut buffer = std::mem::take(&mut self.buffer);
            let taken = buffer.take(chain, size);
            let held = match taken {
                Ok(()) => {
                    budget = budget.saturating_sub(1 + buffer.descriptors());
                    self.handle(memory, kind, &mut buffer, &mut budget)
                }
                Err(reason) => {
                    budget = budget.saturating_sub(usize::from(size));
                    self.warn(Warning::BadChain { queue: kind, reason });
                    false
                }
            };
            self.buffer = buffer;
            let given_back = if held { self.statistics_head.replace(head) } else { Some(head) };
            if let Some(head) = given_back {
                active.give_back(memory, head)?;
                *used = true;
                if held {
                    self.warn(Warning::SecondStatistics);
                }
            }
            if budget == 0 {
                break;
            }
        }
        let more = active.has_more(memory)? || (taken_any && active.enable_kicks(memory)?);
        Ok(if more { Progress::More } else { Progress::Done })
    }

    /// Processes a buffer by the kind of its queue. Returns `true` if the device keeps it.
    fn handle(
        &mut self,
        memory: &M::M,
        kind: QueueKind,
        buffer: &mut Buffer,
        budget: &mut usize,
    ) -> bool {
        match kind {
            QueueKind::Inflate | QueueKind::Deflate => {
                self.take_numbers(memory, kind, buffer, budget);
            }
            QueueKind::Statistics => self.take_statistics(memory, buffer),
            QueueKind::FreePage => self.take_hints(memory, buffer),
            QueueKind::Reporting => self.take_reports(memory, buffer),
        }
        kind == QueueKind::Statistics
    }

    fn take_numbers(
        &mut self,
        memory: &M::M,
        kind: QueueKind,
        buffer: &mut Buffer,
        budget: &mut usize,
    ) {
        self.expect(kind, buffer.writable.is_empty());
        let bytes = buffer.readable_bytes();
        if !bytes.is_multiple_of(4) || bytes > MAX_NUMBERS as u64 * 4 {
            self.warn(Warning::BadLength { queue: kind, bytes });
        }
        let Some(content) = self.content(memory, kind, buffer, MAX_NUMBERS * 4) else { return };
        let mut numbers = std::mem::take(&mut self.numbers);
        numbers.clear();
        let number = |entry: &[u8]| entry.try_into().map_or(0, u32::from_le_bytes);
        numbers.extend(content.chunks_exact(4).map(number));
        *budget = budget.saturating_sub(numbers.len());
        runs(&mut numbers, |start, bytes| {
            self.take_range(memory, kind, start, bytes, |this, range| match kind {
                QueueKind::Deflate => this.host.deflated(range),
                _ => this.discard(range),
            });
        });
        self.numbers = numbers;
    }

    fn take_statistics(&mut self, memory: &M::M, buffer: &mut Buffer) {
        let kind = QueueKind::Statistics;
        self.expect(kind, buffer.writable.is_empty());
        let bytes = buffer.readable_bytes();
        let Some(content) = self.content(memory, kind, buffer, MAX_STATISTICS_BYTES) else {
            return;
        };
        let statistics = Statistics::parse(content);
        if bytes > MAX_STATISTICS_BYTES as u64 || !Statistics::fits(content.len()) {
            self.warn(Warning::BadLength { queue: kind, bytes });
        }
        self.statistics = Some(statistics);
        self.host.statistics(&statistics);
    }

    /// Processes a command in the device-readable part, hinted ranges in the device-writable part,
    /// or the command and then the ranges.
    fn take_hints(&mut self, memory: &M::M, buffer: &mut Buffer) {
        let kind = QueueKind::FreePage;
        if !buffer.readable.is_empty() {
            let bytes = buffer.readable_bytes();
            if bytes != COMMAND_BYTES as u64 {
                self.warn(Warning::BadLength { queue: kind, bytes });
            } else if let Some(content) = self.content(memory, kind, buffer, COMMAND_BYTES)
                && let Ok(command) = content.try_into()
            {
                self.take_command(u32::from_le_bytes(command));
            }
        }
        let Some(id) = self.hints.current() else { return };
        for segment in &buffer.writable {
            self.take_range(memory, kind, segment.start, segment.bytes.into(), |this, range| {
                let poison = this.poison();
                this.host.hint(range, id, poison);
            });
        }
    }

    fn take_command(&mut self, command: u32) {
        match self.hints.command(command) {
            Reaction::Nothing => {}
            Reaction::Complete(id) => self.host.hints_complete(id),
            Reaction::Unexpected(id) => {
                self.warn(Warning::UnexpectedCommand { command, current: id.number() });
                self.host.hints_complete(id);
            }
        }
    }

    fn take_reports(&mut self, memory: &M::M, buffer: &mut Buffer) {
        let kind = QueueKind::Reporting;
        self.expect(kind, buffer.readable.is_empty());
        // A discarded page reads as zeros, but these pages must keep their poison.
        let keeps_content = self.poison().is_some_and(|poison| poison != 0);
        for segment in &buffer.writable {
            self.take_range(memory, kind, segment.start, segment.bytes.into(), |this, range| {
                if !keeps_content {
                    this.discard(range);
                }
            });
        }
    }

    /// The bytes of the device-readable part.
    fn content<'b>(
        &mut self,
        memory: &M::M,
        kind: QueueKind,
        buffer: &'b mut Buffer,
        limit: usize,
    ) -> Option<&'b [u8]> {
        match buffer.content(memory, limit) {
            Ok(content) => Some(content),
            Err(segment) => {
                let (start, bytes) = (GuestAddress(segment.start), segment.bytes.into());
                self.warn(Warning::OutsideMemory { queue: kind, start, bytes });
                None
            }
        }
    }

    fn take_range(
        &mut self,
        memory: &M::M,
        kind: QueueKind,
        start: u64,
        bytes: u64,
        mut take: impl FnMut(&mut Self, GuestRange),
    ) {
        let Cut { outside, partial } =
            pages_within(memory, start, bytes, |range| take(self, range));
        let start = GuestAddress(start);
        if outside {
            self.warn(Warning::OutsideMemory { queue: kind, start, bytes });
        }
        if partial {
            self.warn(Warning::PartialPage { queue: kind, start, bytes });
        }
    }

    fn discard(&mut self, range: GuestRange) {
        if let Err(error) = self.host.discard(range) {
            let GuestRange { start, bytes } = range;
            self.warn(Warning::DiscardFailed { start, bytes, kind: error.kind() });
        }
    }

    fn expect(&mut self, kind: QueueKind, right: bool) {
        if !right {
            self.warn(Warning::WrongDirection { queue: kind });
        }
    }

    fn poison(&self) -> Option<u32> {
        self.negotiated().contains(Features::PAGE_POISON).then_some(self.poison)
    }
}
