//! Faults in every phase of a migration of vmferry's own VMM: which host has the guest afterward,
//! and that nothing is left over.

mod clock;
mod disk;
mod fetching;
mod link;
mod memory;
mod processes;
mod reconnect;
mod resolve;
#[path = "../support/mod.rs"]
mod support;
