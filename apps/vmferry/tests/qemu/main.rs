//! `send --qemu` and `receive --qemu` with real QEMUs: attached, carried, sandboxed, and with
//! faults.

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
mod output;
mod pauses;
mod post_copy;
mod sandbox;
mod storage;
#[path = "../support/mod.rs"]
mod support;
mod unequal;
