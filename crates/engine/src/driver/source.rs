//! The source's driver: the conductor carries out its machine's actions.

pub(crate) mod conductor;
pub(crate) mod connect;
mod control;
pub(crate) mod orders;
pub(crate) mod recovery;
mod redial;
