//! What an operator configures.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vmferry::config::compression::CompressionConfig;
use vmferry::config::policy::Admission;
use vmferry_transport::{Address, PeerIdentity, TlsIdentity};

use crate::access::HostAccess;
use crate::definition::DefinitionFacts;
use crate::keeper::KeeperProgram;
use crate::libvirt::Domains;
use crate::receive::Receivers;
use crate::stream::Timings;

/// The configuration of a proxy.
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    /// Where other daemons connect to.
    pub listen: Address,
    /// This host's identity, for `tls:` addresses.
    pub tls: Option<Arc<TlsIdentity>>,
    /// Which hosts may send which guests here. Without it, any authenticated host may send any.
    pub policy: Option<Arc<dyn Admission>>,
    /// The other hosts.
    pub peers: Vec<Peer>,
    /// Connections that are forwarded as they are.
    pub forwards: Vec<Forward>,
    /// Each peer has a directory in this one, which QEMU's user must be able to enter. The default
    /// of the command is `/run/vmferry-peers`, because `/run/vmferry` is closed to other users.
    pub directory: PathBuf,
    /// libvirt's socket on this host. Default `/run/libvirt/libvirt-sock`.
    pub libvirt: PathBuf,
    /// The user and the group that QEMU runs as.
    pub qemu: Owner,
    /// The directory of the journals, which must survive a reboot.
    pub journals: PathBuf,
    /// Asks this host's libvirt about its domains.
    pub domains: Option<Arc<dyn Domains>>,
    /// What the definitions of guests that arrive can name on this host. Without it no guest of
    /// libvirt is received.
    pub definition_facts: Option<Arc<dyn DefinitionFacts>>,
    /// The keeper, which holds connections if this daemon dies. Without one, a guest may run on two
    /// hosts if the daemon dies while libvirt finishes its migration.
    pub keeper: Option<Arc<dyn KeeperProgram>>,
    /// Does with files and names of this host what this process can't do itself, because it is
    /// restricted. Without it this process does it.
    pub access: Option<Arc<dyn HostAccess>>,
    /// Starts receivers for guests of QEMU. Without it none are received.
    pub receivers: Option<Arc<dyn Receivers>>,
    /// Time limits.
    pub timings: Timings,
    /// How memory and disks are compressed.
    pub compression: CompressionConfig,
    /// Upper limit for what is sent to each peer, in bytes per second.
    pub bandwidth: Option<u64>,
}

/// The user and the group of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The user's ID.
    pub uid: u32,
    /// The group's ID.
    pub gid: u32,
}

/// Another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name, which is the name of its directory.
    pub name: String,
    /// Where its daemon listens.
    pub address: Address,
    /// The URI that its certificate must have, such as `spiffe://vmferry/host/b`.
    pub id: Option<String>,
}

/// A rule for connections of other programs. What connects to `listen` on one host comes out at
/// `connect` on the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    /// The name of the rule, which is the same on both hosts.
    pub name: String,
    /// The path of the socket to listen on, and the peer that its connections go to.
    pub listen: Option<(PathBuf, String)>,
    /// Where connections from peers go.
    pub connect: Option<ForwardExit>,
}

/// Where the connections of a rule come out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardExit {
    /// The path of the socket.
    pub path: PathBuf,
    /// The hosts that may use it.
    pub from: Vec<ForwardSource>,
}

/// A host that may use a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForwardSource {
    /// The one whose certificate has this name: a URI, a DNS name or an IP address.
    Named(String),
    /// Every host that the policy names.
    Any,
}

impl ForwardExit {
    /// Whether a host may use it.
    #[must_use]
    pub fn admits(&self, peer: &PeerIdentity) -> bool {
        self.from.iter().any(|source| match source {
            ForwardSource::Named(name) => peer.names.contains(name),
            ForwardSource::Any => true,
        })
    }
}

/// The longest name of a peer or a directory.
const MAX_NAME: usize = 64;

/// Whether this can be the name of a peer's directory or of a socket in it.
#[must_use]
pub fn is_plain_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_NAME).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_their_directory() {
        for name in ["host-b", "web.mig", "a", "10.0.0.1"] {
            assert!(is_plain_name(name), "{name}");
        }
        let long = "x".repeat(MAX_NAME + 1);
        for name in ["", ".", "..", ".hidden", "a/b", "/a", "a\0", "ä", "a b", &long] {
            assert!(!is_plain_name(name), "{name:?}");
        }
    }
}
