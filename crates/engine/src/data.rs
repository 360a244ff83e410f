//! The data path: what the source's lanes send, and what the destination's lanes place.

pub mod destination;
pub mod source;
pub(crate) mod tunnel;

pub use crate::cpu::CpuMeter;
