//! Whatever fails, at every moment of a migration of vmferry's own VMM: who has the guest then, and that nothing is left.

mod clock;
mod disk;
mod link;
mod memory;
mod processes;
mod reconnect;
mod resolve;
#[path = "../support/mod.rs"]
mod support;
