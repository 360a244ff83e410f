//! Receiving frames. Their pages are placed in memory, or for carried guests written into a VMM.

pub(crate) mod lanes;
pub mod place;
pub(crate) mod streams;
pub(crate) mod target;
