//! Guests that can't be attached: QEMU's own migration, carried.
//!
//! QEMU runs its pre-copy migration into sockets of this host, and the engine reads the other ends.
//! The bytes go over the engine's lanes and, unchanged, into the sockets of a QEMU that waits at
//! the destination. QEMU sees nothing of the network, and vmferry sees nothing of QEMU but QMP and
//! these sockets. Memory, devices and permissions do not matter: it only matters whether QEMU
//! itself can migrate.
//!
//! * Without `multifd` there is one stream. QEMU gets one end of a socket pair, so no path that
//!   both sides see is needed.
//! * With `multifd` QEMU itself connects the further channels to a socket. The socket is in a
//!   directory that only QEMU's user can reach, and is removed once all channels are connected.
//!
//! Source: QEMU `docs/devel/migration`, `qapi/migration.json`, `migration/socket.c`,
//! `migration/multifd.c`; and the observed behavior of QEMU 7.2 and 10.0.

mod arrival;
mod channels;
mod description;
mod estimate;
mod late;
mod monitor;
mod place;
mod protocol;
mod reconnect;
mod resend;
mod retake;
mod sleep;
mod source;
mod watch;

pub use arrival::{Arrival, Offer};
#[cfg(test)]
pub use description::StreamedBlock;
pub use description::{Description, POST_COPY};
pub use late::FurtherChannel;
pub use place::Place;
pub use reconnect::{
    at_destination as connect_destination, at_source as connect_source, end_all, ends_of,
};
pub use retake::complete as complete_paused;
pub use source::CarriedSource;

/// The name of this VMM kind, which must be equal at source and destination.
pub const VMM: &str = "qemu-stream";
