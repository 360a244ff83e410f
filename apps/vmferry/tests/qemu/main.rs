//! `send --qemu` and `receive --qemu` with real QEMUs: attached, carried, restricted, and with everything that goes wrong.

mod announce;
mod asleep;
mod attached;
mod carried;
mod cases;
mod demo;
mod doctor;
mod estimate;
mod found;
mod hooks;
mod kvm;
mod memory_files;
mod network;
mod outlives;
mod pauses;
mod sandbox;
#[path = "../support/mod.rs"]
mod support;
mod words;
