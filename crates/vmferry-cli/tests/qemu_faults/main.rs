//! Everything that goes wrong with migrations of real QEMUs' guests and mostly waits, in one program, so that it waits side by
//! side: processes that are stopped, networks that lose everything, and the cases of QEMU's own migration tests.

mod cases;
mod network;
mod stops;
#[path = "../support/mod.rs"]
mod support;
