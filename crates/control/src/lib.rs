//! The control API of a guest's VMM: HTTP/1.1 and JSON on a Unix socket of mode 0600, described by [`OPENAPI`].
//!
//! A VMM that embeds vmferry serves it with [`Server`] and a [`Handler`]; the command is a client like any other, by
//! [`call`], and so is `curl --unix-socket`. Each connection carries one request. A migration is answered with lines of
//! JSON, any number of `{"event": …}` and then `{"ok": …}` or `{"error": …}`, and its connection is its lease: when
//! the client goes away before COMMIT, the migration is cancelled and the guest runs on. Any other request is answered
//! with the value itself, or with `{"error": …}` and a status that says so.

#![forbid(unsafe_code)]

mod client;
mod descriptors;
mod directory;
mod error;
pub mod http;
mod migrate;
mod request;
mod server;
mod started;

pub use client::{ClientError, call};
pub use directory::{Directories, DirectoryError};
pub use error::{ControlError, ErrorCode};
pub use migrate::{ChangeRequest, EstimateRequest, MigrateRequest, RecordRequest, TlsFiles};
pub use request::Request;
pub use server::{Answer, Handler, Replies, Server, ServerError, is_live};
pub use started::Started;

/// The OpenAPI 3.1 document of the API.
pub const OPENAPI: &str = include_str!("../openapi.json");
