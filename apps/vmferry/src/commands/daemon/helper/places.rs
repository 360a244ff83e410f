//! How many requests are served at a time. Each has a thread, and `virsh` may take 40 s.
//!
//! Peers cause many requests: a definition that a peer asks about names hundreds of paths. So each
//! kind has places of its own, and the requests of one kind never keep those of another from being
//! served.

use std::sync::Arc;

use parking_lot::Mutex;
use strum::{EnumCount, VariantArray};
use vmferry_proxy::SocketOrder;

use super::messages::Ask;

/// What a request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumCount, VariantArray)]
pub enum Kind {
    /// It has not been read yet.
    Unread,
    /// The daemon's configuration and its keeper, or an operator's order. No peer causes these.
    Own,
    /// Sockets that local programs connect to.
    Entrances,
    /// Sockets that streams of peers come out at.
    Exits,
    /// Addresses of peers.
    Addresses,
    /// Which host has a guest.
    Domains,
    /// This host and its libvirt.
    Reports,
    /// Paths of definitions.
    Definitions,
}

impl Kind {
    /// The kind of a request.
    pub fn of(ask: &Ask) -> Self {
        match ask {
            Ask::Attempt | Ask::Adopt | Ask::Abandon | Ask::Keeper | Ask::AbortJob(_) => Self::Own,
            Ask::Sockets(
                SocketOrder::MakeOutgoing { .. } | SocketOrder::Listen(_) | SocketOrder::Remove(_),
            ) => Self::Entrances,
            Ask::Sockets(
                SocketOrder::MakeIncoming { .. }
                | SocketOrder::RemoveIncoming { .. }
                | SocketOrder::CheckFree { .. }
                | SocketOrder::Connect(_),
            ) => Self::Exits,
            Ask::Addresses(_) => Self::Addresses,
            Ask::Look(_) => Self::Domains,
            Ask::Facts | Ask::Resources => Self::Reports,
            Ask::Resolve(_) | Ask::ImageNames(_) => Self::Definitions,
        }
    }

    /// The most requests at a time. Every stream may look for its peer at once, and open a socket.
    pub fn most(self) -> usize {
        match self {
            Self::Unread | Self::Entrances | Self::Exits | Self::Addresses => 256,
            Self::Domains | Self::Definitions => 128,
            Self::Own | Self::Reports => 32,
        }
    }

    /// The kind for people.
    fn words(self) -> &'static str {
        match self {
            Self::Unread => "that were not read yet",
            Self::Own => "of the daemon itself",
            Self::Entrances => "for sockets that local programs connect to",
            Self::Exits => "for sockets that peers' streams come out at",
            Self::Addresses => "for addresses of peers",
            Self::Domains => "about domains",
            Self::Reports => "about this host",
            Self::Definitions => "about definitions",
        }
    }
}

/// The requests that are served now.
#[derive(Debug, Default)]
pub struct Places(Mutex<[usize; Kind::COUNT]>);

/// The place of a request, which is free again when it is dropped.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    kind: Kind,
}

impl Places {
    /// Takes a place.
    ///
    /// # Errors
    /// All places of this kind are taken.
    pub fn enter(self: &Arc<Self>, kind: Kind) -> Result<Place, String> {
        let taken = &mut self.0.lock()[kind as usize];
        let most = kind.most();
        if *taken >= most {
            let kind = kind.words();
            return Err(format!(
                "the daemon's helper is busy: {most} requests {kind} are being served. Try again \
                 later"
            ));
        }
        *taken += 1;
        Ok(Place { places: Arc::clone(self), kind })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.0.lock()[self.kind as usize] -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_leave_each_other_their_places() {
        let places = Arc::new(Places::default());
        let mut taken = Vec::new();
        for &kind in Kind::VARIANTS {
            taken.extend((0..kind.most()).map(|_| places.enter(kind).unwrap()));
            let full = places.enter(kind).unwrap_err();
            assert!(full.contains(&kind.most().to_string()) && full.contains(kind.words()));
        }
        taken.clear();
        assert_eq!(*places.0.lock(), [0; Kind::COUNT]);
    }
}
