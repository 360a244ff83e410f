//! What a daemon asks its helper, and the answers.
//!
//! Each request has a connection of its own, whose other end the daemon passes to the helper, so no
//! request waits for another one. The descriptor of an answer accompanies its first byte.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vmferry::probe::HostFacts;
use vmferry_handover::GuestIdentity;
use vmferry_proxy::definition::{ImageNames, LibvirtResources, Resolved};
use vmferry_proxy::{DomainState, Owner, SocketFile, SocketOrder};

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Ask {
    /// Read the configuration file, and carry out orders for what it names too.
    Attempt,
    /// The configuration that was tried is in use, and no other one.
    Adopt,
    /// The configuration that was tried is not used.
    Abandon,
    /// An order about sockets.
    Sockets(SocketOrder),
    /// The IP addresses of a peer's address.
    Addresses(String),
    /// What libvirt says about a domain.
    Look(GuestIdentity),
    /// Abort the job of a domain.
    AbortJob(Uuid),
    /// The facts about this host and its libvirt.
    Facts,
    /// What libvirt offers to guests.
    Resources,
    /// Where a path of a definition leads.
    Resolve(PathBuf),
    /// The files that an image names.
    ImageNames(PathBuf),
    /// A connection to the keeper, which is started if there is none.
    Keeper,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Said {
    /// It is done. Orders and the keeper may have a descriptor.
    Done {
        /// The file of a socket that was made.
        file: Option<SocketFile>,
    },
    /// The configuration is tried. QEMU runs as this user.
    Configured {
        /// The user and the group.
        qemu: Owner,
    },
    /// The addresses.
    Addresses(Vec<IpAddr>),
    /// The domain's state.
    Domain(DomainState),
    /// The facts.
    Facts(Box<HostFacts>),
    /// What libvirt offers.
    Resources(LibvirtResources),
    /// Where the path leads.
    Resolved(Resolved),
    /// The names in the image.
    ImageNames(ImageNames),
    /// It can't be done, with the reason.
    Failed(String),
}
