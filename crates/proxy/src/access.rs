//! What a daemon does with files and names of this host. A restricted daemon leaves it to another
//! process: the orders name peers, rules and sockets of the configuration, and never paths.

use std::fmt::Debug;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vmferry_transport::Address;

use crate::error::ProxyError;

/// Access to this host's files and names.
pub trait HostAccess: Debug + Send + Sync {
    /// Carries out an order.
    ///
    /// # Errors
    /// Why it can't.
    fn sockets(&self, order: &SocketOrder) -> Result<SocketDone, ProxyError>;

    /// The IP addresses of a peer's host.
    ///
    /// # Errors
    /// The name is not known.
    fn addresses(&self, address: &Address) -> Result<Vec<IpAddr>, ProxyError>;
}

/// An order about sockets of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum SocketOrder {
    /// Make the directory of a peer, and remove the sockets that an earlier daemon has left there.
    MakeOutgoing {
        /// The peer.
        peer: String,
    },
    /// Make the directory of guests that arrive.
    MakeIncoming {
        /// Its name: the peers' name for this host.
        name: String,
    },
    /// Remove a directory of guests that arrive if it is empty. No connection uses it any more.
    RemoveIncoming {
        /// Its name.
        name: String,
    },
    /// Make a socket, and listen. The answer has its descriptor and its file.
    Listen(Entrance),
    /// Remove the file of a socket that was made by `Listen`.
    Remove(SocketFile),
    /// Check that no file is where QEMU will make a socket.
    CheckFree {
        /// The directory of guests that arrive.
        directory: String,
        /// The socket's name.
        file: String,
    },
    /// Connect. The answer has the descriptor.
    Connect(Exit),
}

/// A socket that local programs connect to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Entrance {
    /// libvirt's in a peer's directory.
    Libvirt {
        /// The peer.
        peer: String,
    },
    /// One of a migration to a peer.
    Migration {
        /// The peer.
        peer: String,
        /// The socket's name.
        file: String,
    },
    /// The one of a rule.
    Rule {
        /// The rule.
        name: String,
    },
}

/// A socket of a local program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Exit {
    /// libvirt's.
    Libvirt,
    /// One of the QEMU of a guest that arrives.
    Qemu {
        /// The directory of guests that arrive.
        directory: String,
        /// The socket's name.
        file: String,
    },
    /// The one of a rule.
    Rule {
        /// The rule.
        name: String,
    },
}

/// The file of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SocketFile {
    /// Its device.
    pub device: u64,
    /// Its inode.
    pub inode: u64,
}

/// An order that was carried out.
#[derive(Debug, Default)]
pub struct SocketDone {
    /// The socket, for `Listen` and `Connect`.
    pub descriptor: Option<OwnedFd>,
    /// Its file, for `Listen`.
    pub file: Option<SocketFile>,
}

/// A listening socket. Its file is removed when it is dropped.
#[derive(Debug)]
pub(crate) struct LocalListener {
    pub socket: UnixListener,
    file: SocketFile,
    access: Arc<dyn HostAccess>,
}

impl LocalListener {
    pub fn new(access: &Arc<dyn HostAccess>, entrance: Entrance) -> Result<Self, ProxyError> {
        match access.sockets(&SocketOrder::Listen(entrance))? {
            SocketDone { descriptor: Some(descriptor), file: Some(file) } => {
                Ok(Self { socket: descriptor.into(), file, access: Arc::clone(access) })
            }
            _ => Err(ProxyError::NoDescriptor),
        }
    }
}

impl Drop for LocalListener {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.access.sockets(&SocketOrder::Remove(self.file));
    }
}

/// Connects to a socket of a local program.
pub(crate) fn connect(access: &dyn HostAccess, exit: Exit) -> Result<UnixStream, ProxyError> {
    let done = access.sockets(&SocketOrder::Connect(exit))?;
    done.descriptor.map(UnixStream::from).ok_or(ProxyError::NoDescriptor)
}
