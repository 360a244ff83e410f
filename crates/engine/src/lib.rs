//! The live-migration engine.
//!
//! A VMM that implements [`SourceVm`] passes its guest to [`source::migrate`]. A VMM that
//! implements [`DestinationVm`] receives it from [`destination::receive`]. In between are pre-copy
//! rounds over the lanes of a session, a downtime prediction after each round, and a handover
//! ([`vmferry_handover`]) that never lets two hosts run the guest.
//!
//! ```text
//!  source::migrate                                               destination::receive
//!    driver -- machine::source      <-- control channel -->      machine::destination -- session
//!      |                                                                                    |
//!    workers: plan, re-arm, read, encode                            workers: decode, check, place
//!      -> lane: send  =========== one data channel for each lane ===========>  lane: receive
//! ```
//!
//! The machines use no threads and no sockets: events go in, actions come out, and time is passed
//! in. Each side writes a promise to its [journal](vmferry_handover::journal) before it acts on it.

#![forbid(unsafe_code)]

pub mod config;
pub mod probe;
pub mod stats;
pub mod vmm;
pub mod witness;

// Public only for the simulator, the fuzz targets and the benchmarks of this workspace.
#[doc(hidden)]
pub mod data;
#[doc(hidden)]
pub mod link;
#[doc(hidden)]
pub mod machine;
#[doc(hidden)]
pub mod rounds;

mod causes;
mod cpu;
mod driver;
mod error;

/// The host that the guest leaves.
pub mod source {
    pub use crate::driver::source::conductor::{SourceOutcome, migrate, migrate_streamed};
    pub use crate::driver::source::orders::{Orders, Progress};
    pub use crate::driver::source::recovery::{Recovered, recover};
    pub use crate::machine::source::change::Change;
    pub use crate::machine::source::io::Report;
}

/// The host that the guest goes to.
pub mod destination {
    pub use crate::data::destination::fetch::handle::{FetchHandle, FetchProgress};
    pub use crate::driver::destination::absent::answer_without_receiver;
    pub use crate::driver::destination::left::{fetch_for_left, record_crashed, record_fetched};
    pub use crate::driver::destination::notice::Notice;
    pub use crate::driver::destination::receive::{Owned, Received, Responder, Stop, receive};
    pub use crate::machine::destination::io::Report;
}

/// What a migration will cost, computed before it starts.
pub mod estimate {
    pub use crate::rounds::estimate::*;
}

pub use causes::chain;
pub use config::{DestinationConfig, SourceConfig, Timeouts};
pub use error::{Compared, ErrorClass, MigrateError};
pub use vmferry_handover::{Resume, VmError};
pub use vmm::{
    DestinationVm, GuestDescription, HarvestGuard, Landing, PostCopyFailed, PoweredOff,
    PrepareError, SourceVm, StateEstimate,
};
