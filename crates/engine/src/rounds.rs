//! The rounds of pre-copy: pages to send, pages that the guest has freed, and when to hand over.

pub mod convergence;
pub mod estimate;
pub mod freed;
pub mod harvester;
pub mod hinted;
pub mod lacking;
pub mod throttle;
mod throughput;
pub mod tracker;
