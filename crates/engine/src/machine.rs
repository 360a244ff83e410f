//! The protocol without threads or sockets: events go in together with the time, and actions come
//! out.

pub mod destination;
pub mod peer;
pub mod source;
