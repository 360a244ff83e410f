//! `vmferry send --libvirt` and `vmferry doctor --libvirt` between hosts with real libvirt daemons.

mod doctor;
#[allow(dead_code, reason = "the daemon's tests use the rest")]
#[path = "../daemon/support.rs"]
mod hosts;
mod moved;
#[path = "../support/mod.rs"]
mod processes;
mod refused;
mod running;
mod sending;
