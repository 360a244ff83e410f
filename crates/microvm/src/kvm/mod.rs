//! A KVM virtual machine: memory slots, in-kernel interrupt controllers and timer, vCPU threads, a
//! serial port and pvpanic, and the state of all of them.
//!
//! The order of things: [`KvmBackend::new`] makes a machine whose vCPUs are parked. Then either
//! [`KvmBackend::start`] boots the embedded guest, or [`KvmBackend::load`] puts in the state of
//! another machine (whose memory the caller has copied) and [`KvmBackend::resume`] continues it.
//! [`KvmBackend::pause`] and [`KvmBackend::resume`] may alternate for ever; [`KvmBackend::save`]
//! needs a paused machine. Between the machine and its vCPUs stands `throttle`, which lets all of them run
//! and holds them, and takes a part of their time if that is wanted.

mod boot;
mod devices;
mod error;
mod ioctl;
mod mmio;
mod setup;
mod stop;
mod throttle;
mod vcpu;
mod vcpu_state;
mod vm;
mod vm_state;

pub use boot::{DISPLAY, DISPLAY_BYTES, GUEST_ELF, HIGH_RAM, LOW_RAM_END, STILL};
pub use error::KvmError;
pub use mmio::{InterruptPin, MmioDevice, MmioWiring};
pub use stop::{GuestStop, StopCause};
pub use vm::{DirtyRing, KvmBackend, KvmConfig, check_sections};

/// One memory slot: where the guest and where this process see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySlot {
    /// KVM's number.
    pub slot: u32,
    /// First guest-physical address.
    pub gpa: u64,
    /// Size.
    pub bytes: u64,
    /// First address in this process.
    pub host_address: u64,
}

#[cfg(test)]
mod tests;
