//! Receiving frames. Their pages are placed in memory, or for carried guests written into a VMM.

pub mod fetch;
pub(crate) mod lane_channel;
pub(crate) mod late_lanes;
pub(crate) mod memory_lanes;
pub mod missing;
pub mod place;
pub(crate) mod stream_lanes;
pub(crate) mod target;
pub(crate) mod tunnel_lanes;
