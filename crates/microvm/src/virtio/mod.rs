//! The machine's virtio device: a balloon on virtio-mmio.
//!
//! [`vmferry_balloon`] is the device. This module adds its transport (`mmio`, the registers of
//! VIRTIO 1.2, section 4.2), its effects on the host (`host`: it discards memory, counts hints and
//! calls a [`BalloonListener`]), and a thread that serves its queues (`balloon`). Kicks arrive by
//! ioeventfds, without an exit to user space. Interrupts are raised by an ioctl.
//!
//! All users of the device take one lock: the thread for one bounded piece of work, a vCPU for one
//! register access, the control socket for one request.

mod balloon;
mod free_pages;
mod host;
mod mmio;

pub use balloon::{Balloon, BalloonStatus};
pub(crate) use balloon::{BalloonDevice, SECTIONS};
pub(crate) use free_pages::BalloonPages;
pub use host::{BalloonListener, HintRound};

/// Guest-physical address of the registers: in the hole, above the display and below the IOAPIC.
pub const BALLOON_ADDRESS: u64 = 0xfe00_0000;
/// Length of the registers.
const BALLOON_BYTES: u64 = 4096;
/// The interrupt: the first pin of the IOAPIC that is not used by a legacy device of a PC.
const BALLOON_GSI: u32 = 16;

#[cfg(test)]
mod tests;
