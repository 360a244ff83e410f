//! The host that the guest goes to.
//!
//! [`receive`] listens (`reception`, `arrivals`), takes one session at a time (`session`) whose protocol is
//! a sans-IO machine ([`machine`]), places what the lanes bring (`lanes`) or writes it into a VMM that takes its
//! streams itself (`streams`), and leaves a
//! [`Witness`] behind that gives this host's word while the guest runs.

pub mod io;
pub mod machine;
pub mod place;

mod arrivals;
mod lanes;
mod receive;
mod reception;
mod session;
mod streams;
mod target;

pub use io::Report;
pub use receive::{Notice, Owned, Received, Stop, Witness, receive};
