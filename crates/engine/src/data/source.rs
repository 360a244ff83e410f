//! Sending: each lane's plan of pages, the frames made from them, and the streams of carried
//! guests. A page's way is in `lane`: plan, encode, queue, send, acknowledge.

pub mod chooser;
pub(crate) mod lane;
pub mod page_encoder;
pub mod page_server;
pub(crate) mod sent;
pub(crate) mod streams;
pub(crate) mod workers;

pub use lane::plan;
