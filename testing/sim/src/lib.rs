//! The engine under simulated time, network and disk.
//!
//! The engine's two sans-IO machines, its lanes, its wire format, its journal records and its
//! guest-holding types run the production code. One thread simulates time, channels, disks and two
//! small VMMs, so a schedule is reproduced by its number. In a schedule messages are lost, late,
//! repeated, damaged or reordered, channels are cut at any boundary and within a message, VMMs and
//! journals are slow, journal writes fail in every way, processes die and restart, users cancel,
//! and peers violate the protocol. After each schedule these promises are checked: at every instant
//! at most one host ran the guest; no host ran an outdated copy of it; its memory is what it wrote;
//! everything was decided in bounded time; and exactly one host has the guest. With post-copy also:
//! the source kept its memory until the guest had all pages, and the guest never used a page before
//! it had arrived. No schedule restarts a process while its guest lacks pages.

mod absence;
mod destination_host;
mod dial;
mod disk;
mod guest;
mod host;
mod hostile;
mod network;
mod plan;
mod soak;
mod source_host;
mod witness;
mod world;

pub use guest::Fetched;
pub use host::Host;
pub use hostile::forgeries;
pub use plan::{
    Fault, MESSAGES, POST_COPY_MESSAGES, Plan, Sabotage, Seed, Step, VmCall, Ways, Where,
    WriteFault,
};
pub use soak::{Failure, Summary, run_all};
pub use source_host::SourceEnd;
pub use world::{Outcome, run};
