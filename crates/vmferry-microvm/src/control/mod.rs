//! The control socket of a running guest.
//!
//! A Unix socket of mode 0600. A client sends one request as a line of JSON; the answer is any
//! number of lines `{"event": …}` and then one line `{"ok": …}` or `{"error": …}`. The connection
//! of a migration is its lease: when the client goes away before COMMIT, the migration is
//! cancelled and the guest runs on.

mod client;
mod descriptors;
mod directory;
mod request;
mod server;

pub use client::{ClientError, call};
pub use directory::{RuntimeDirectory, runtime_directory};
pub use request::{ControlError, ErrorCode, MigrateRequest, RecordRequest, Request, TlsFiles};
pub use server::{Answer, Handler, Replies, Server, ServerError, is_live};

/// Longest line in either direction, in bytes: a status with 8 vCPUs takes 4 KiB.
const MAX_LINE_BYTES: usize = 64 << 10;
