//! The engine under simulated time, network and disk.
//!
//! Both sans-IO machines of the engine, its lanes, its wire format, its journal's records and its
//! guest-holding types run as they run in production; time, channels, disks and two small VMMs are
//! simulated by one thread, so that a schedule is a number and the same number is the same
//! schedule. In a schedule messages are lost, late, repeated, damaged or overtaken, channels are
//! cut at any boundary and within a message, VMMs and journals take their time, journal writes fail
//! in every way, processes die and come back, users cancel, and peers say what they may not say.
//! After each: at every instant at most one host ran the guest, no host ran a past of it, its
//! memory is what it wrote, everything was decided in bounded time, and exactly one host has the
//! guest.

mod absence;
mod destination_host;
mod dial;
mod disk;
mod guest;
mod hostile;
mod network;
mod plan;
mod soak;
mod source_host;
mod world;

pub use hostile::forgeries;
pub use plan::{
    Fault, Host, MESSAGES, Plan, Sabotage, Seed, Step, VmCall, Ways, Where, WriteFault,
};
pub use soak::{Failure, Summary, run_all};
pub use source_host::SourceEnd;
pub use world::{Outcome, run};
