//! Test doubles of the traits that a VMM implements. Each delegates to a real implementation, and
//! replaces only what the test names.
//!
//! They are no part of `vmferry-kit`, because the tests of crates below the engine use that one.

#![forbid(unsafe_code)]

mod destination;
mod log;
mod source;

pub use destination::DestinationDouble;
pub use log::FilteredLog;
pub use source::SourceDouble;
