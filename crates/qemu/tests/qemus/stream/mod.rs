//! The pages that the recognizers find in QEMU's migration streams.

mod any_bytes;
mod by_hand;
mod capture;
mod fixtures;
mod live;
pub mod samples;
