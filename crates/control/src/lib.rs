//! The control API of a guest's VMM: HTTP/1.1 and JSON on a Unix socket with mode 0600, described
//! by [`OPENAPI`].
//!
//! A VMM that embeds vmferry serves it with [`Server`] and a [`Handler`]. The command is an
//! ordinary client that uses [`call`]; `curl --unix-socket` works too. Each connection carries one
//! request. A migration is answered with lines of JSON: any number of `{"event": …}`, and then
//! `{"ok": …}` or `{"error": …}`. The connection of a migration is its lease: if the client closes
//! it before COMMIT, the migration is canceled and the guest continues. Every other request is
//! answered with the value itself, or with `{"error": …}` and a matching status.

#![forbid(unsafe_code)]

mod client;
pub mod descriptors;
mod directory;
mod error;
mod http;
mod migrate;
mod request;
mod server;
mod started;
mod witness;

pub use client::{ClientError, call};
pub use directory::{Directories, DirectoryError};
pub use error::{ControlError, ErrorCode};
pub use migrate::{ChangeRequest, EstimateRequest, MigrateRequest, RecordRequest, TlsFiles};
pub use request::Request;
pub use server::{Answer, BoundServer, Handler, Replies, Server, ServerError, is_live};
pub use started::Started;
pub use witness::{SocketWitness, WitnessServer, WitnessSocketError};

/// The OpenAPI 3.1 document of the API.
pub const OPENAPI: &str = include_str!("../openapi.json");
