//! Guests of QEMU that `vmferry daemon` receives by templates: moved, with daemons and receivers
//! that are killed, and refused.

mod moved;
mod place;
mod recovered;
mod refused;
#[path = "../support/mod.rs"]
mod support;
