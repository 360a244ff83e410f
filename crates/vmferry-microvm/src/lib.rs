//! A small KVM virtual machine monitor on rust-vmm crates, and the worked example of embedding vmferry.

pub mod kvm;
pub mod state;
