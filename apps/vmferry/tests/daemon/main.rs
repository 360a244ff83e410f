//! `vmferry daemon` between hosts with real libvirt daemons: an unmodified `virsh migrate` goes
//! through it.

mod cut;
mod moved;
mod refused;
mod support;
