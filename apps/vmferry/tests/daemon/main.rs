//! `vmferry daemon` between hosts with real libvirt daemons: an unmodified `virsh migrate` goes
//! through it.

mod absent;
mod cut;
mod doubt;
mod killed;
mod moved;
mod phases;
mod raw_link;
mod refused;
mod sessions;
mod shelter;
mod support;
mod versions;
