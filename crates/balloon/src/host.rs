//! The embedder's side of a balloon.

use std::io;

use vm_memory::GuestAddress;

use crate::{CommandId, Statistics, Warning};

/// A range of guest memory: at least one whole page of 4096 bytes, all within one memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestRange {
    /// The first byte, at a page boundary.
    pub start: GuestAddress,
    /// Length in bytes, a multiple of 4096.
    pub bytes: u64,
}

/// Receives the driver's requests. All calls are made within calls of the
/// [`Balloon`](crate::Balloon), on the same thread.
pub trait BalloonHost {
    /// The content of a range is no longer needed: its memory may be returned to the system, or
    /// left as it is. The driver has inflated the balloon by the range, or reports it as free. This
    /// may be called again for the same range.
    ///
    /// If the driver poisons free pages with a value other than zero, this is not called for
    /// reports: a reported page must then keep its content (section 5.5.6.6), and a discarded page
    /// reads as zeros.
    ///
    /// # Errors
    /// The system's error. The device warns once and continues; a range that stays populated does
    /// no harm.
    fn discard(&mut self, range: GuestRange) -> io::Result<()>;

    /// A range was free at some time since the round `id` started. The guest may have written to it
    /// since, and such writes must be kept. `poison` is the value that the driver fills free pages
    /// with, repeated. The guest relies on that content, zeros included (Linux with
    /// `init_on_free=1`). It is `None` if the driver does not report one: then the guest relies on
    /// nothing.
    fn hint(&mut self, range: GuestRange, id: CommandId, poison: Option<u32>) {
        let _ = (range, id, poison);
    }

    /// There will be no more hints for `id`: the driver has ended the round, or was reset.
    fn hints_complete(&mut self, id: CommandId) {
        let _ = id;
    }

    /// The driver takes a range back from the balloon.
    fn deflated(&mut self, range: GuestRange) {
        let _ = range;
    }

    /// The driver has sent statistics.
    fn statistics(&mut self, statistics: &Statistics) {
        let _ = statistics;
    }

    /// The driver made a mistake, or [`discard`](Self::discard) failed. Called once for each kind
    /// of warning.
    fn warning(&mut self, warning: Warning) {
        let _ = warning;
    }
}

/// Ignores all requests.
impl BalloonHost for () {
    fn discard(&mut self, _: GuestRange) -> io::Result<()> {
        Ok(())
    }
}

/// How a transport interrupts the driver.
pub trait Interrupt {
    /// The device has used buffers of this queue, given by the driver's number, and the driver
    /// wants an interrupt.
    fn used_buffers(&mut self, queue: u16);

    /// The configuration space or [`Balloon::needs_reset`](crate::Balloon::needs_reset) has
    /// changed.
    fn config_changed(&mut self);
}

/// Sends no interrupts.
impl Interrupt for () {
    fn used_buffers(&mut self, _: u16) {}

    fn config_changed(&mut self) {}
}
