//! Support for tests with carried guests.

pub mod guests;
pub mod relay;
