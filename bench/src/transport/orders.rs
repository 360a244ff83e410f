//! Messages between the benchmark's processes: one JSON object per line.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The transport and the destination's address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// The engine, with an address as `vmferry receive --listen` takes it.
    Engine(String),
    /// A plain copy over TCP.
    RawSocket(SocketAddr),
    /// A plain copy over rustls.
    RawRustls(SocketAddr),
}

/// An order to a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Allocate memory: filled at the source, populated with zeros at the destination.
    Prepare {
        /// The number of pages.
        pages: u64,
    },
    /// Destination: receive a guest.
    Receive {
        /// The transport to listen on, with port 0.
        transport: Transport,
        /// The number of data channels.
        channels: u8,
        /// The network namespace to use. `None` is the one in which the process started.
        namespace: Option<PathBuf>,
    },
    /// Source: send the guest.
    Send {
        /// The transport from [`Reply::Listening`].
        transport: Transport,
        /// The number of data channels.
        channels: u8,
        /// The engine's bandwidth cap in bytes per second.
        cap: Option<u64>,
        /// As in [`Order::Receive`].
        namespace: Option<PathBuf>,
    },
    /// Destination: report the content of the memory, and zero it.
    Inspect,
    /// Attacker: start.
    Attack {
        /// The address on which the destination is receiving.
        address: String,
        /// Number of connections that send nothing.
        idle_connections: usize,
        /// As in [`Order::Receive`].
        namespace: Option<PathBuf>,
    },
    /// Attacker: stop.
    Cease,
}

/// A reply from a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The memory is ready and has this content.
    Prepared(Content),
    /// The destination listens on this transport.
    Listening(Transport),
    /// The first page is about to be sent. [`Reply::Sent`] follows.
    UnderWay,
    /// The source has sent the guest.
    Sent(Sent),
    /// The destination has received the guest.
    Received(Received),
    /// The content before the memory was zeroed.
    Inspected(Content),
    /// The attack has started.
    Attacking,
    /// The attack has stopped.
    Ceased(Attack),
    /// The order failed.
    Failed(String),
}

/// A summary of a memory's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// The hash.
    pub hash: u64,
    /// Pages that are not all zero.
    pub pages: u64,
}

/// The cost of a run at the source.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sent {
    /// From the start of the dirty log until the guest runs at the destination, in seconds.
    pub total_s: f64,
    /// The same including connecting, handshakes and closing.
    pub whole_s: f64,
    /// CPU time of this process during `whole_s`, in seconds.
    pub cpu_s: f64,
}

/// The cost of a run at the destination.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Received {
    /// CPU time of this process since the first connection, in seconds.
    pub cpu_s: f64,
    /// Rejected connections that the destination reported.
    pub turned_away: u64,
}

/// The activity of the attacker.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Attack {
    /// Connections that sent nothing.
    pub idle_connections: u64,
    /// Handshakes that the destination rejected.
    pub failed_handshakes: u64,
    /// CPU time of the attacker on this machine, in seconds.
    pub cpu_s: f64,
}
