//! Fleets: hosts with a `vmferry daemon` each, which share a real etcd.

mod commands;
mod demo;
mod faults;
mod loss;
mod members;
mod moves;
mod place;
mod qemu;
#[allow(dead_code, reason = "this program uses a part of it")]
#[path = "../receivers/place.rs"]
mod receivers;
mod refused;
mod roles;
mod running;
#[path = "../support/mod.rs"]
mod support;
mod systemd;
mod watch;
mod witness;
