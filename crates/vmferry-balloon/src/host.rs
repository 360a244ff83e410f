//! What an embedder has to do with a balloon.

use std::io;

use vm_memory::GuestAddress;

use crate::{CommandId, Statistics, Warning};

/// A range of guest memory: whole pages of 4096 bytes, at least one, all within one region of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestRange {
    /// The first byte, at a page.
    pub start: GuestAddress,
    /// Length in bytes, a multiple of 4096.
    pub bytes: u64,
}

/// What becomes of what the driver says. All calls are made from within calls of the
/// [`Balloon`](crate::Balloon), by the thread that makes those.
pub trait BalloonHost {
    /// The content of a range is of no use: its memory may be given back to the system, or left as it is. The
    /// driver has inflated the balloon by it, or reports it as free. It may be called again for the same range.
    ///
    /// If the driver poisons free pages with something other than zeros it is not called for reports: a
    /// reported page must then keep its content (section 5.5.6.6), and one that is discarded reads as zeros.
    ///
    /// # Errors
    /// What the system says. The device warns once and goes on; nothing is lost by a range that stays.
    fn discard(&mut self, range: GuestRange) -> io::Result<()>;

    /// A range was free at some time since command `id` was given out. The guest may have written
    /// to it since, which then counts. `poison` is what the driver says free pages are filled with,
    /// repeated. The guest relies on that content, zeros included (Linux with `init_on_free=1`).
    /// `None` if the driver does not say: then the guest relies on nothing.
    fn hint(&mut self, range: GuestRange, id: CommandId, poison: Option<u32>) {
        let _ = (range, id, poison);
    }

    /// There will be no more hints under `id`: the driver has said that it has no more, or was reset.
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

    /// The driver, or [`discard`](Self::discard), did something wrong. Called once for each kind of warning.
    fn warning(&mut self, warning: Warning) {
        let _ = warning;
    }
}

/// Does nothing.
impl BalloonHost for () {
    fn discard(&mut self, _: GuestRange) -> io::Result<()> {
        Ok(())
    }
}

/// The way to the driver: how a transport interrupts it.
pub trait Interrupt {
    /// The device has used buffers of this queue, by the driver's number, and the driver wants to know.
    fn used_buffers(&mut self, queue: u16);

    /// The configuration space has changed, or [`Balloon::needs_reset`](crate::Balloon::needs_reset) has.
    fn config_changed(&mut self);
}

/// Tells nobody.
impl Interrupt for () {
    fn used_buffers(&mut self, _: u16) {}

    fn config_changed(&mut self) {}
}
