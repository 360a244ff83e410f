//! Errors of starting a proxy and of its sockets.

use std::io;
use std::path::PathBuf;

use vmferry_transport::TransportError;

/// Why a proxy, or a part of it, can't start.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The listening address can't be used.
    #[error("other daemons can't connect here")]
    Listen(#[source] TransportError),
    /// A directory can't be made, or is not safe to use.
    #[error("the directory {path} can't be used: {problem}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A socket can't be made.
    #[error("no socket can be made at {path}")]
    Socket {
        /// Its path.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// There is a file at a socket's path already.
    #[error("there is already a file at {path}, which this daemon has not made")]
    Squatted {
        /// The path.
        path: PathBuf,
    },
    /// A socket of a local program can't be connected to.
    #[error("{path} can't be reached")]
    Unreachable {
        /// Its path.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The configuration has no peer or rule of this name.
    #[error("the configuration names no {what}")]
    NotNamed {
        /// The peer or the rule.
        what: String,
    },
    /// The process that has access to this host's files has failed, or has refused.
    #[error("{problem}")]
    Helper {
        /// What it says.
        problem: String,
    },
    /// The process that has access to this host's files has answered without a socket.
    #[error("the answer has no socket")]
    NoDescriptor,
    /// A peer's address is not known.
    #[error(transparent)]
    Address(#[from] TransportError),
    /// A name that can't be a directory's or a socket's.
    #[error(
        "{name:?} can't be the name of a peer or a socket: names have up to 64 letters, digits, \
         `-`, `_` and `.`, and begin with no dot"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// Two peers have the same name.
    #[error("two peers have the name {name}")]
    Twice {
        /// The name.
        name: String,
    },
    /// Two rules listen on the same socket.
    #[error("two rules listen on {path}")]
    PathTwice {
        /// The path.
        path: PathBuf,
    },
    /// The system can't create a thread or a descriptor.
    #[error("the system can't {action}")]
    System {
        /// What was attempted.
        action: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}
