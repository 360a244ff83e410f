//! The bodies of the fuzz targets, which the tests of `vmferry-codec` run on the seeds as well: each takes
//! any bytes, and panics if the code under test does what it must not.

#![allow(dead_code, reason = "each target uses a part of it")]

pub mod delta;
pub mod frame;
pub mod frame_sealed;
pub mod input;
pub mod piece;
pub mod round_trip;
pub mod world;

/// A target's body.
pub type Target = fn(&[u8]);

/// All of them, by the names of their corpora.
pub const TARGETS: [(&str, Target); 5] = [
    ("delta", delta::run),
    ("frame", frame::run),
    ("frame_sealed", frame_sealed::run),
    ("piece", piece::run),
    ("round_trip", round_trip::run),
];
