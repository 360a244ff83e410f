//! What tests with carried guests share.

#![allow(dead_code, reason = "each test uses a part of it")]

pub mod guests;
pub mod relay;
