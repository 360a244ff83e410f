//! The live-migration engine.
//!
//! A VMM that implements [`SourceVm`] hands its guest to [`source::migrate`]; a VMM that
//! implements [`DestinationVm`] gets it from [`destination::receive`]. In between: pre-copy rounds
//! over the lanes of a session, a prediction of the downtime after each, and a handover
//! ([`handover`]) that never lets two hosts run the guest.
//!
//! ```text
//!  source::migrate                                            destination::receive
//!    driver -- source::machine (sans-IO)      control       destination::machine (sans-IO) -- session
//!      |            <------------------------------------------------>                          |
//!    workers: plan, re-arm, read, encode                                         workers: decode, check, place
//!      -> lane: send  ================== data channel per lane ==================>  lane: receive
//! ```
//!
//! The machines know neither threads nor sockets: what happened goes in, what to do comes out, and
//! time is passed in. What each side promises is in its [`journal`] before it acts.

#![forbid(unsafe_code)]

pub mod compression;
pub mod config;
pub mod convergence;
pub mod destination;
pub mod error;
pub mod estimate;
pub mod forecast;
pub mod free_pages;
pub mod handover;
pub mod held;
pub mod journal;
pub mod link;
pub mod newer;
pub mod peer;
pub mod policy;
pub mod probe;
pub mod source;
pub mod stats;
pub mod streamed;
pub mod told;

mod cpu;
mod greeting;
mod life;
mod vm;

pub use config::{DestinationConfig, SourceConfig, Timeouts};
pub use error::{ErrorClass, MigrateError, chain};
pub use vm::{
    DestinationVm, GuestDescription, Landing, PoweredOff, PrepareError, Resume, SourceVm,
    StateEstimate, VmError,
};
