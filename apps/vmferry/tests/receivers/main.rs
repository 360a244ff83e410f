//! Guests of QEMU that arrive through `vmferry daemon`: by templates, with daemons and receivers
//! that are killed, and refused; and forwarded for another program.

mod forwarded;
mod moved;
mod place;
mod recovered;
mod refused;
#[path = "../support/mod.rs"]
mod support;
