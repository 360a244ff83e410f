//! Threads and sockets: carries out the actions of the [machines](crate::machine).

pub(crate) mod destination;
pub(crate) mod greeting;
pub(crate) mod life;
pub(crate) mod source;
