//! Guests that can't be attached: QEMU's own migration, carried.
//!
//! QEMU runs its pre-copy migration into sockets of this host, whose other ends the engine reads; what comes out
//! of them goes over the engine's lanes and, byte by byte the same, into the sockets of a QEMU that waits at the
//! destination. QEMU sees nothing of the network, and vmferry nothing of QEMU but QMP and these sockets: whatever
//! memory, devices and permissions there are, all that counts is whether QEMU itself can migrate.
//!
//! * Without `multifd` there is one stream. QEMU gets one end of a socket pair, so it needs no path that both see.
//! * With it QEMU connects the further channels by itself, to a socket in a directory that only its
//!   user may reach and that is gone when they have come.
//!
//! Source: QEMU `docs/devel/migration`, `qapi/migration.json`, `migration/socket.c`, `migration/multifd.c`; and
//! what QEMU 7.2 and 10.0 were seen to do.

mod arrival;
mod channels;
mod description;
mod estimate;
mod monitor;
mod place;
mod sleep;
mod source;
mod watch;

pub use arrival::Arrival;
pub use description::Description;
#[cfg(test)]
pub use description::StreamedBlock;
pub use place::Place;
pub use source::CarriedSource;

/// The name of this kind of machine, which source and destination must agree on.
pub const VMM: &str = "qemu-stream";
