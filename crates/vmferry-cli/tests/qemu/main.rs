//! `send --qemu` and `receive --qemu` with real QEMUs: attached, carried, restricted, and with everything that goes wrong.

mod asleep;
mod attached;
mod carried;
mod cases;
mod demo;
mod estimate;
mod network;
mod sandbox;
#[path = "../support/mod.rs"]
mod support;
