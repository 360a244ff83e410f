//! A small KVM virtual machine monitor on rust-vmm crates, and the worked example of embedding
//! vmferry.
//!
//! [`Machine`] is a guest: memory, a back end that runs its vCPUs ([`kvm`], or threads of this
//! process where there is no KVM), and a heartbeat device that writes guest memory. [`embed`]
//! makes the machine migratable. [`service`] answers on the guest's control socket
//! ([`vmferry_control`]), by which the `vmferry` command finds, inspects and migrates the guest.
//!
//! `unsafe` is confined to `kvm` (ioctls and memory slots) and `process` (the guest's C code).

pub mod account;
mod backend;
pub mod config;
pub mod embed;
mod error;
mod heartbeat;
pub mod kvm;
mod machine;
mod pace;
mod process;
pub mod report;
pub mod service;
pub mod state;
pub mod virtio;

pub use config::{GuestKind, MachineConfig};
pub use error::MachineError;
pub use machine::{Machine, SharedMachine};
