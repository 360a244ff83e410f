//! Sending: each lane's plan of pages, the frames made from them, and the streams of carried
//! guests.

pub mod chooser;
pub mod encode;
pub(crate) mod lane;
pub(crate) mod outgoing;
pub mod plan;
pub(crate) mod pool;
pub(crate) mod signal;
pub(crate) mod streams;
pub(crate) mod window;
