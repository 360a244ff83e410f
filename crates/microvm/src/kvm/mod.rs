//! A KVM virtual machine: memory slots, in-kernel interrupt controllers and timer, vCPU threads, a
//! serial port and pvpanic, and the state of all of them.
//!
//! The life of a machine: [`KvmBackend::new`] creates it with all vCPUs parked. Then either
//! [`KvmBackend::start`] boots the embedded guest, or [`KvmBackend::load`] loads the state of
//! another machine, whose memory the caller has copied, and [`KvmBackend::resume`] continues it.
//! [`KvmBackend::pause`] and [`KvmBackend::resume`] may alternate without limit.
//! [`KvmBackend::save`] needs a paused machine. The `throttle` module runs, stops and throttles all
//! vCPUs of a machine together.

mod boot;
mod config;
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
pub use config::{DirtyRing, KvmConfig};
pub use error::KvmError;
pub use mmio::{InterruptPin, MmioDevice, MmioWiring};
pub use stop::{GuestStop, StopCause};
pub use vm::{KvmBackend, check_sections};

/// One memory slot, and its mapping in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySlot {
    /// KVM's number of the slot.
    pub slot: u32,
    /// First guest-physical address.
    pub gpa: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// First virtual address in this process.
    pub host_address: u64,
}

#[cfg(test)]
mod tests;
