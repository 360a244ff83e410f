//! The machine's virtio device: a balloon on virtio-mmio.
//!
//! [`vmferry_balloon`] is the device; here are its transport (`mmio`: registers, as VIRTIO 1.2, section 4.2 has
//! them), what becomes of what it says (`host`: discarding memory, counting hints, telling a
//! [`BalloonListener`]), and a thread that serves its queues (`balloon`). Kicks come by ioeventfds and
//! cost no exit to user space; interrupts go by an ioctl.
//!
//! One lock, that of the transport, is held by whoever uses the device: the thread for one bounded
//! piece of work, a vCPU for one access to a register, the control socket for one order.

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
/// Their length.
const BALLOON_BYTES: u64 = 4096;
/// The interrupt: the first pin of the IOAPIC that no device of a PC has.
const BALLOON_GSI: u32 = 16;

#[cfg(test)]
mod tests;
