//! What the benchmark's processes tell each other: a JSON object on each line.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// How memory is moved, and where the destination is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// By the engine: its address, as `vmferry receive --listen` takes it.
    Engine(String),
    /// A copy over TCP.
    RawSocket(SocketAddr),
    /// A copy over rustls.
    RawRustls(SocketAddr),
}

/// What a process is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Make memory of so many pages: at the source filled, at the destination populated with zeros.
    Prepare {
        /// Pages.
        pages: u64,
    },
    /// Destination: receive a guest.
    Receive {
        /// With port 0.
        transport: Transport,
        /// Data channels.
        channels: u8,
        /// The network namespace to be in, or the one that the process began in.
        namespace: Option<PathBuf>,
    },
    /// Source: send it.
    Send {
        /// As the destination has said.
        transport: Transport,
        /// Data channels.
        channels: u8,
        /// Of the engine, in bytes per second.
        cap: Option<u64>,
        /// As in [`Order::Receive`].
        namespace: Option<PathBuf>,
    },
    /// Destination: tell what is in memory, and then write zeros over it.
    Inspect,
    /// Attacker: begin.
    Attack {
        /// Of the destination, in use.
        address: String,
        /// Connections that never say anything.
        idle_connections: usize,
        /// As in [`Order::Receive`].
        namespace: Option<PathBuf>,
    },
    /// Attacker: end.
    Cease,
}

/// What a process has done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// Memory is there, with this content.
    Prepared(Content),
    /// The destination waits here.
    Listening(Transport),
    /// The first page is about to be sent; [`Reply::Sent`] follows.
    UnderWay,
    /// The guest has left.
    Sent(Sent),
    /// The guest is here.
    Received(Received),
    /// What was there, and is not any more.
    Inspected(Content),
    /// The attack has begun.
    Attacking,
    /// The attack is over.
    Ceased(Attack),
    /// The order could not be carried out.
    Failed(String),
}

/// A whole memory, hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// The hash.
    pub hash: u64,
    /// Pages that are not all zero.
    pub pages: u64,
}

/// What one run took at the source.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sent {
    /// From the start of the dirty log until the guest runs at the destination, in seconds.
    pub total_s: f64,
    /// The same with connecting, handshakes and taking leave.
    pub whole_s: f64,
    /// CPU time of this process in `whole_s`, in seconds.
    pub cpu_s: f64,
}

/// What one run took at the destination.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Received {
    /// CPU time of this process from the first connection on, in seconds.
    pub cpu_s: f64,
    /// Connections that it has said to have turned away.
    pub turned_away: u64,
}

/// What an attacker has done.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Attack {
    /// Connections made that never said anything.
    pub idle_connections: u64,
    /// Handshakes begun that the destination has refused.
    pub failed_handshakes: u64,
    /// CPU time that the attacker itself has taken from this machine, in seconds.
    pub cpu_s: f64,
}
