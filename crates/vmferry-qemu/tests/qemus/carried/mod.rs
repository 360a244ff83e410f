//! What tests with carried guests share.

pub mod guests;
pub mod relay;
