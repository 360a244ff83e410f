//! Carries byte streams of local sockets to another host: those of a libvirt migration, and any
//! others that a rule names.
//!
//! ```text
//!  libvirt, QEMU -> socket -> Proxy == a link for each stream ==> Proxy -> socket -> libvirt, QEMU
//! ```
//! * A stream outlives its links. When one breaks, another is dialed and the bytes that had not
//!   arrived are sent again; the programs at both ends see a pause. See [`stream`].
//! * Pages of guest memory are recognized in QEMU's streams and encoded as those of any guest;
//!   other bytes are compressed when that pays. See `packing`.
//! * A peer reaches only what the configuration names, and of libvirt only what a migration needs,
//!   with definitions that the policy permits. See `libvirt` and [`definition`].

#![forbid(unsafe_code)]

mod access;
mod arrival_directories;
mod config;
pub mod definition;
mod directory;
mod entrances;
mod error;
mod event;
mod greeting;
mod host_sockets;
mod incoming;
mod judging;
mod keeper;
mod libvirt;
mod opened;
mod outgoing;
mod packers;
mod packing;
mod probes;
mod proxy;
mod receive;
mod records;
mod refusals;
pub mod stream;
mod time_limit;

pub use access::{Entrance, Exit, HostAccess, SocketDone, SocketFile, SocketOrder};
pub use config::{Forward, ForwardExit, ForwardSource, Owner, Peer, ProxyConfig, is_plain_name};
pub use error::ProxyError;
pub use event::{Observer, ProxyEvent, Side, StreamName};
pub use host_sockets::{HostSockets, Places};
pub use judging::ask_to_judge;
pub use keeper::{KeeperProgram, connect as connect_to_keeper, serve as serve_keeper};
pub use libvirt::{DomainState, Domains, DoubtStatus, MigrationStatus, Phase, answer_held};
pub use outgoing::LIBVIRT_SOCKET;
pub use probes::HostReport;
pub use proxy::{BoundProxy, Proxy, StreamStatus};
pub use receive::{ReceiveRequest, Receivers, ask_to_receive};
pub use stream::Timings;
