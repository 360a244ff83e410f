//! The directories of guests that arrive. Each peer chooses their names, so they are limited, and
//! one that no connection uses any more is removed.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use vmferry_transport::PeerIdentity;

use crate::access::{HostAccess, SocketOrder};
use crate::error::ProxyError;

/// The most directories that one peer uses at once. A host has one name for another one, and a new
/// one for a moment if it is renamed.
const MAX_OF_ONE: usize = 8;

/// Why a peer can't use a directory.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// It uses too many.
    #[error(
        "the host uses {MAX_OF_ONE} directories here already, and {name:?} would be one more: use \
         one name for this host in all `[[peer]]` of its daemon"
    )]
    TooMany {
        /// The directory.
        name: String,
    },
    /// The system's error.
    #[error(transparent)]
    Failed(#[from] ProxyError),
}

/// The directories that are used.
#[derive(Debug, Default)]
pub(crate) struct ArrivalDirectories(Mutex<HashMap<String, Uses>>);

/// Who uses a directory.
#[derive(Debug, Default)]
struct Uses {
    /// The peer of each connection.
    peers: Vec<PeerIdentity>,
    /// Locked while the directory is made or removed.
    changing: Arc<Mutex<()>>,
}

/// A directory that a connection uses. The last of them to be dropped removes it.
#[derive(Debug)]
pub(crate) struct UsedDirectory {
    all: Arc<ArrivalDirectories>,
    access: Arc<dyn HostAccess>,
    name: String,
    peer: PeerIdentity,
}

impl ArrivalDirectories {
    /// Makes a directory unless it is there, for a connection of a peer.
    ///
    /// # Errors
    /// The peer uses too many, or it can't be made.
    pub fn enter(
        self: &Arc<Self>,
        access: &Arc<dyn HostAccess>,
        name: &str,
        peer: &PeerIdentity,
    ) -> Result<UsedDirectory, DirectoryError> {
        let changing = {
            let mut all = self.0.lock();
            let uses = |uses: &Uses| uses.peers.iter().any(|one| one.is_same_as(peer));
            let is_new = !all.get(name).is_some_and(uses);
            if is_new && all.values().filter(|one| uses(one)).count() >= MAX_OF_ONE {
                return Err(DirectoryError::TooMany { name: name.to_owned() });
            }
            let its = all.entry(name.to_owned()).or_default();
            its.peers.push(peer.clone());
            Arc::clone(&its.changing)
        };
        let (all, access, name) = (Arc::clone(self), Arc::clone(access), name.to_owned());
        let used = UsedDirectory { all, access, name, peer: peer.clone() };
        let changed = changing.lock();
        used.access.sockets(&SocketOrder::MakeIncoming { name: used.name.clone() })?;
        drop(changed);
        Ok(used)
    }
}

impl Drop for UsedDirectory {
    fn drop(&mut self) {
        let changing = {
            let mut all = self.all.0.lock();
            let Some(its) = all.get_mut(&self.name) else { return };
            if let Some(index) = its.peers.iter().position(|one| one.is_same_as(&self.peer)) {
                its.peers.swap_remove(index);
            }
            Arc::clone(&its.changing)
        };
        let _changed = changing.lock();
        let is_used = || self.all.0.lock().get(&self.name).is_some_and(|its| !its.peers.is_empty());
        if is_used() {
            return;
        }
        // One that can't be removed is used again, or found full.
        let _ = self.access.sockets(&SocketOrder::RemoveIncoming { name: self.name.clone() });
        let mut all = self.all.0.lock();
        if all.get(&self.name).is_some_and(|its| its.peers.is_empty()) {
            all.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::net::IpAddr;
    use std::path::Path;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use vmferry_transport::Address;

    use super::*;
    use crate::{HostSockets, Owner, Places, SocketDone};

    fn access(base: &Path) -> Arc<dyn HostAccess> {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Arc::new(HostSockets::new(Places {
            directory: base.to_owned(),
            libvirt: "/nowhere".into(),
            qemu: Owner { uid, gid },
            peers: Vec::new(),
            entrances: HashMap::new(),
            exits: HashMap::new(),
        }))
    }

    fn peer(name: &str) -> PeerIdentity {
        PeerIdentity { names: vec![name.into()], ..PeerIdentity::anonymous("192.0.2.1:1".into()) }
    }

    #[test]
    fn directory_is_removed_with_its_last_connection() {
        let base = tempfile::tempdir().unwrap();
        let (access, all) = (access(base.path()), Arc::new(ArrivalDirectories::default()));
        let path = base.path().join("b");
        let first = all.enter(&access, "b", &peer("host-a")).unwrap();
        let second = all.enter(&access, "b", &peer("host-c")).unwrap();
        drop(first);
        assert!(path.exists(), "the other connection uses it");
        drop(second);
        assert!(!path.exists());
        assert!(all.0.lock().is_empty());
        // A QEMU listens there, and the daemon does not wait for its end.
        let used = all.enter(&access, "b", &peer("host-a")).unwrap();
        let _qemu = std::os::unix::net::UnixListener::bind(path.join("web.mig")).unwrap();
        drop(used);
        assert!(path.join("web.mig").exists());
    }

    #[test]
    fn peer_uses_a_few_directories_at_a_time_and_leaves_the_others_alone() {
        let base = tempfile::tempdir().unwrap();
        let (access, all) = (access(base.path()), Arc::new(ArrivalDirectories::default()));
        let enter = |name: &str, of| all.enter(&access, name, &peer(of));
        let mut used: Vec<_> =
            (0..MAX_OF_ONE).map(|number| enter(&number.to_string(), "host-a").unwrap()).collect();
        let refused = enter("more", "host-a").unwrap_err();
        assert!(refused.to_string().contains("\"more\""), "{refused}");
        assert!(!base.path().join("more").exists());
        enter("0", "host-a").unwrap();
        enter("more", "host-c").unwrap();
        used.pop();
        enter("more", "host-a").unwrap();
    }

    /// Carries out orders for real, and holds up a removal until the test lets it go on.
    #[derive(Debug)]
    struct Held {
        access: Arc<dyn HostAccess>,
        ordered: Mutex<Sender<SocketOrder>>,
        may_remove: Mutex<Receiver<()>>,
    }

    impl HostAccess for Held {
        fn sockets(&self, order: &SocketOrder) -> Result<SocketDone, ProxyError> {
            let removes = matches!(order, SocketOrder::RemoveIncoming { .. });
            let done = if removes { None } else { Some(self.access.sockets(order)) };
            self.ordered.lock().send(order.clone()).unwrap();
            done.unwrap_or_else(|| {
                self.may_remove.lock().recv().unwrap();
                self.access.sockets(order)
            })
        }

        fn addresses(&self, address: &Address) -> Result<Vec<IpAddr>, ProxyError> {
            self.access.addresses(address)
        }
    }

    #[test]
    fn directory_that_is_being_removed_is_made_again_for_the_next() {
        let base = tempfile::tempdir().unwrap();
        let ((ordered, orders), (remove, may_remove)) = (channel(), channel());
        let (ordered, may_remove) = (Mutex::new(ordered), Mutex::new(may_remove));
        let held = Held { access: access(base.path()), ordered, may_remove };
        let (held, all): (Arc<dyn HostAccess>, _) = (Arc::new(held), Arc::default());
        let all: Arc<ArrivalDirectories> = all;
        let first = all.enter(&held, "b", &peer("host-a")).unwrap();
        orders.recv().unwrap();
        std::thread::scope(|scope| {
            let left = scope.spawn(move || drop(first));
            let removing = orders.recv().unwrap();
            assert!(matches!(removing, SocketOrder::RemoveIncoming { .. }), "{removing:?}");
            let next = scope.spawn(|| all.enter(&held, "b", &peer("host-c")).unwrap());
            // It must not be made before it is removed. If it were, this is enough time for it.
            let _ = orders.recv_timeout(Duration::from_millis(200));
            remove.send(()).unwrap();
            left.join().unwrap();
            let used = next.join().unwrap();
            let is_there = base.path().join("b").exists();
            remove.send(()).unwrap();
            drop(used);
            assert!(is_there);
        });
        assert!(!base.path().join("b").exists());
    }
}
