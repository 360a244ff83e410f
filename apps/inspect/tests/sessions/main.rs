//! Inspection of recorded sessions.

mod fetching;
mod golden;
mod recordings;
mod streams;
mod support;
