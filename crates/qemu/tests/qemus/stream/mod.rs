//! What the recognizers find in the streams of QEMU's migration.

mod by_hand;
mod capture;
mod fixtures;
mod live;
pub mod samples;
