//! Inspection of recorded sessions.

mod golden;
mod recordings;
mod streams;
mod support;
