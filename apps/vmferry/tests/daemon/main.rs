//! `vmferry daemon` between hosts with real libvirt daemons: an unmodified `virsh migrate` goes
//! through it.

mod cut;
mod doubt;
mod moved;
mod raw_link;
mod refused;
mod sessions;
mod shelter;
mod support;
