//! Reads the RPC connection of a libvirt migration, sans-IO: bytes go in, decisions come out.
//!
//! In a peer-to-peer migration (`virsh migrate --p2p`), the source's libvirt connects to the
//! destination's libvirt and calls it. Access to that socket is root on the host. [`CallGate`]
//! reads the calls on both hosts: the procedures that a migration needs may pass
//! ([`ALLOWED_PROCEDURES`]), a Prepare only with its caller's consent, a Finish only for a guest
//! whose Prepare has passed. It answers all other calls with libvirt's own error reply
//! ([`refusal`]). [`ReplyWatch`] reads the replies, and [`finish_reply`] replaces a lost one.
//!
//! Both readers answer keep-alive messages and pass none on. So the link between the hosts may be
//! down for longer than libvirt's keep-alive limit, about 30 s, and no libvirt closes its
//! connection.
//!
//! What passes is what was read: a call whose meaning could differ between this crate and libvirt
//! (a name given twice, a NUL in a string, an XML declaration) is refused.
//!
//! The gate decides which procedures a peer may call, for which guests, with which sockets. It does
//! not judge a guest's definition: the XML of an admitted guest names disks, an emulator and other
//! things of the destination's host. Its caller does ([`Asking`]), with [`PrepareCall::xml`], with
//! the cookies, which may contain another definition, and with [`parse`].
//!
//! Input is not trusted. Memory grows with the bytes that have arrived, never with an announced
//! length, and no packet is buffered beyond [`MAX_BUFFERED_BYTES`].
//!
//! Facts are from libvirt's public sources, which each item names. All integers are XDR (RFC 4506):
//! big-endian, in units of four bytes.

#![forbid(unsafe_code)]

mod calls;
mod cookie;
mod error;
mod finish_reply;
mod flags;
mod gate;
mod guest;
mod header;
mod keepalive;
mod open;
#[cfg(test)]
mod packets;
mod params;
mod procedures;
mod refusal;
mod replies;
mod socket_uri;
mod splitter;
mod xdr;
mod xml;

pub use calls::{Call, FinishCall, PrepareCall};
pub use error::RpcError;
pub use finish_reply::finish_reply;
pub use flags::MigrateFlags;
pub use gate::{Admit, Asking, CallGate, MAX_PREPARED_GUESTS, Passed, Refused};
pub use guest::{Guest, MAX_NAME_BYTES};
pub use header::{
    HEADER_BYTES, LENGTH_BYTES, MAX_MESSAGE_BYTES, MAX_PACKET_BYTES, PacketHeader, PacketKind,
    PacketStatus,
};
pub use open::OPEN_URI;
pub use params::{MAX_PARAMS, MAX_STRING_BYTES};
pub use procedures::{
    ALLOWED_PROCEDURES, AllowedProcedure, KEEPALIVE_PROGRAM, KEEPALIVE_VERSION, MAX_BUFFERED_BYTES,
    REMOTE_PROGRAM, REMOTE_VERSION, Reading, procedure,
};
pub use refusal::{MAX_MESSAGE_TEXT_BYTES, REFUSED, RemoteError, refusal};
pub use replies::{FinishReply, Heard, MAX_REPLY_BYTES, PrepareReply, Reply, ReplyWatch};
pub use socket_uri::{MAX_SOCKET_PATH_BYTES, SocketUri};
pub use xml::parse;
