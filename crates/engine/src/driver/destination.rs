//! The destination's driver: listening (`reception`, `arrivals`), and consecutive sessions, each of
//! which carries out its machine's actions.

pub(crate) mod absent;
mod arrivals;
pub mod left;
pub(crate) mod notice;
pub(crate) mod receive;
mod reception;
mod session;
