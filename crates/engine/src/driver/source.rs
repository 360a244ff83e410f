//! The source's driver: the conductor carries out its machine's actions.

pub(crate) mod conductor;
pub(crate) mod connect;
mod control;
mod fetch;
mod left_pages;
pub(crate) mod orders;
pub(crate) mod recovery;
mod redial;
