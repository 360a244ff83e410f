//! Carries out the orders of [`HostAccess`] in the calling process.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use parking_lot::Mutex;
use vmferry_transport::Address;

use crate::access::{Entrance, Exit, HostAccess, SocketDone, SocketFile, SocketOrder};
use crate::config::{Owner, ProxyConfig, is_plain_name};
use crate::directory::{self, Access};
use crate::error::ProxyError;
use crate::outgoing::LIBVIRT_SOCKET;

/// How long a local program may take to accept a connection. One that is stopped has a full queue.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// What a configuration says about sockets of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// The directory of all directories.
    pub directory: PathBuf,
    /// libvirt's socket.
    pub libvirt: PathBuf,
    /// The user and the group that QEMU runs as.
    pub qemu: Owner,
    /// The names of the peers.
    pub peers: Vec<String>,
    /// The sockets that rules listen on, by the name of the rule.
    pub entrances: HashMap<String, PathBuf>,
    /// The sockets that rules connect to.
    pub exits: HashMap<String, PathBuf>,
}

impl Places {
    /// Those of a proxy's configuration.
    #[must_use]
    pub fn of(config: &ProxyConfig) -> Self {
        let rules = || config.forwards.iter();
        let entrance = |rule: &crate::Forward| Some((rule.name.clone(), rule.listen.clone()?.0));
        let exit = |rule: &crate::Forward| Some((rule.name.clone(), rule.connect.clone()?.path));
        Self {
            directory: config.directory.clone(),
            libvirt: config.libvirt.clone(),
            qemu: config.qemu,
            peers: config.peers.iter().map(|peer| peer.name.clone()).collect(),
            entrances: rules().filter_map(entrance).collect(),
            exits: rules().filter_map(exit).collect(),
        }
    }
}

/// Sockets of this host, made and reached by this process.
///
/// An order succeeds only for what the configuration names: the one in use, and another one while
/// it is tried.
#[derive(Debug, Default)]
pub struct HostSockets(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    in_use: Places,
    tried: Option<Places>,
    /// Files of listening sockets.
    made: HashMap<SocketFile, PathBuf>,
}

impl HostSockets {
    /// Sockets of this configuration.
    #[must_use]
    pub fn new(places: Places) -> Self {
        Self(Mutex::new(State { in_use: places, ..State::default() }))
    }

    /// Another configuration is tried: its orders succeed too.
    pub fn attempt(&self, places: Places) {
        self.0.lock().tried = Some(places);
    }

    /// The configuration that was tried is in use.
    pub fn adopt(&self) {
        let mut state = self.0.lock();
        if let Some(tried) = state.tried.take() {
            state.in_use = tried;
        }
    }

    /// The configuration that was tried is not used.
    pub fn abandon(&self) {
        self.0.lock().tried = None;
    }

    /// The first value that a configuration gives, the tried one before the one in use.
    fn find<T>(
        &self,
        what: impl FnOnce() -> String,
        find: impl Fn(&Places) -> Option<T>,
    ) -> Result<T, ProxyError> {
        let state = self.0.lock();
        let found = state.tried.iter().chain([&state.in_use]).find_map(find);
        found.ok_or_else(|| ProxyError::NotNamed { what: what() })
    }

    /// The configuration that names a peer.
    fn of_peer(&self, peer: &str) -> Result<Places, ProxyError> {
        let named = |places: &Places| {
            places.peers.iter().any(|known| known == peer).then(|| places.clone())
        };
        self.find(|| format!("peer {peer}"), named)
    }

    /// The configuration for a directory of guests that arrive, which must not be a peer's.
    fn of_arrivals(&self, name: &str) -> Result<Places, ProxyError> {
        let state = self.0.lock();
        let mut all = state.tried.iter().chain([&state.in_use]);
        if !is_plain_name(name) || all.any(|places| places.peers.iter().any(|peer| peer == name)) {
            return Err(ProxyError::Name { name: name.to_owned() });
        }
        Ok(state.tried.as_ref().unwrap_or(&state.in_use).clone())
    }

    fn listen(&self, entrance: &Entrance) -> Result<SocketDone, ProxyError> {
        let (path, access) = match entrance {
            Entrance::Libvirt { peer } => {
                let places = self.of_peer(peer)?;
                (places.directory.join(peer).join(LIBVIRT_SOCKET), Access::Root)
            }
            Entrance::Migration { peer, file } => {
                let places = self.of_peer(peer)?;
                if !is_plain_name(file) || file == LIBVIRT_SOCKET {
                    return Err(ProxyError::Name { name: file.clone() });
                }
                (places.directory.join(peer).join(file), Access::Qemu(places.qemu))
            }
            Entrance::Rule { name } => {
                let named =
                    |places: &Places| Some((places.entrances.get(name)?.clone(), places.qemu));
                let (path, qemu) = self.find(|| format!("rule {name}"), named)?;
                // A daemon that was killed leaves its socket.
                directory::must_be_free(&path, CONNECT_TIMEOUT)?;
                (path, Access::Qemu(qemu))
            }
        };
        let (socket, file) = directory::bind(&path, access)?;
        self.0.lock().made.insert(file, path);
        Ok(SocketDone { descriptor: Some(socket.into()), file: Some(file) })
    }

    fn connect(&self, exit: &Exit) -> Result<OwnedFd, ProxyError> {
        let (path, socket) = match exit {
            Exit::Libvirt => {
                let path = self.find(String::new, |places| Some(places.libvirt.clone()))?;
                let socket = vmferry_transport::connect_unix(&path, CONNECT_TIMEOUT);
                (path, socket)
            }
            Exit::Qemu { directory, file } => {
                let places = self.of_arrivals(directory)?;
                if !is_plain_name(file) {
                    return Err(ProxyError::Name { name: file.clone() });
                }
                let path = places.directory.join(directory).join(file);
                let socket = directory::connect_to_qemu(&path, places.qemu, CONNECT_TIMEOUT);
                (path, socket)
            }
            Exit::Rule { name } => {
                let named = |places: &Places| places.exits.get(name).cloned();
                let path = self.find(|| format!("rule {name}"), named)?;
                let socket = vmferry_transport::connect_unix(&path, CONNECT_TIMEOUT);
                (path, socket)
            }
        };
        socket.map(OwnedFd::from).map_err(|source| ProxyError::Unreachable { path, source })
    }
}

impl HostAccess for HostSockets {
    fn sockets(&self, order: &SocketOrder) -> Result<SocketDone, ProxyError> {
        match order {
            SocketOrder::MakeOutgoing { peer } => {
                directory::make_outgoing(&self.of_peer(peer)?.directory, peer)?;
            }
            SocketOrder::MakeIncoming { name } => {
                let places = self.of_arrivals(name)?;
                directory::make_incoming(&places.directory, name, places.qemu)?;
            }
            SocketOrder::RemoveIncoming { name } => {
                let places = self.of_arrivals(name)?;
                directory::remove_incoming(&places.directory, name, places.qemu)?;
            }
            SocketOrder::CheckFree { directory, file } => {
                let places = self.of_arrivals(directory)?;
                if !is_plain_name(file) {
                    return Err(ProxyError::Name { name: file.clone() });
                }
                let path = places.directory.join(directory).join(file);
                directory::must_be_free(&path, CONNECT_TIMEOUT)?;
            }
            SocketOrder::Remove(file) => {
                let made = self.0.lock().made.remove(file);
                if let Some(path) = made {
                    directory::remove(&path, *file);
                }
            }
            SocketOrder::Listen(entrance) => return self.listen(entrance),
            SocketOrder::Connect(exit) => {
                let descriptor = Some(self.connect(exit)?);
                return Ok(SocketDone { descriptor, file: None });
            }
        }
        Ok(SocketDone::default())
    }

    fn addresses(&self, address: &Address) -> Result<Vec<IpAddr>, ProxyError> {
        Ok(address.look_up()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner() -> Owner {
        Owner { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
    }

    fn sockets(directory: &std::path::Path) -> HostSockets {
        let exits = HashMap::from([("rule".to_owned(), directory.join("exit"))]);
        let entrances = HashMap::from([("rule".to_owned(), directory.join("entrance"))]);
        let (libvirt, qemu, peers) = (directory.join("libvirt"), owner(), vec!["b".to_owned()]);
        let directory = directory.to_owned();
        HostSockets::new(Places { directory, libvirt, qemu, peers, entrances, exits })
    }

    /// A process that can only give orders reaches nothing that the configuration does not name.
    #[test]
    fn orders_outside_the_configuration_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let sockets = sockets(directory.path());
        sockets.sockets(&SocketOrder::MakeOutgoing { peer: "b".into() }).unwrap();
        let (b, c) = (|| "b".to_owned(), || "c".to_owned());
        let up = || "../../etc".to_owned();
        for order in [
            SocketOrder::MakeOutgoing { peer: c() },
            SocketOrder::MakeIncoming { name: b() },
            SocketOrder::MakeIncoming { name: up() },
            SocketOrder::RemoveIncoming { name: b() },
            SocketOrder::RemoveIncoming { name: up() },
            SocketOrder::Listen(Entrance::Libvirt { peer: c() }),
            SocketOrder::Listen(Entrance::Migration { peer: c(), file: "web".into() }),
            SocketOrder::Listen(Entrance::Migration { peer: b(), file: up() }),
            SocketOrder::Listen(Entrance::Migration { peer: b(), file: "libvirt".into() }),
            SocketOrder::Listen(Entrance::Rule { name: c() }),
            SocketOrder::CheckFree { directory: b(), file: "web".into() },
            SocketOrder::CheckFree { directory: "a".into(), file: up() },
            SocketOrder::Connect(Exit::Qemu { directory: b(), file: "libvirt".into() }),
            SocketOrder::Connect(Exit::Qemu { directory: "a".into(), file: up() }),
            SocketOrder::Connect(Exit::Rule { name: c() }),
        ] {
            let refused = sockets.sockets(&order);
            let is_so =
                matches!(refused, Err(ProxyError::NotNamed { .. } | ProxyError::Name { .. }));
            assert!(is_so, "{order:?}: {refused:?}");
        }
        // Only what it has made is removed.
        let file = directory.path().join("file");
        let kept = std::os::unix::net::UnixListener::bind(&file).unwrap();
        let identity = directory::identity(&file).unwrap();
        sockets.sockets(&SocketOrder::Remove(identity)).unwrap();
        assert!(file.exists());
        drop(kept);
    }

    #[test]
    fn tried_configuration_is_used_until_it_is_abandoned() {
        let directory = tempfile::tempdir().unwrap();
        let sockets = sockets(directory.path());
        let order = SocketOrder::MakeOutgoing { peer: "c".into() };
        let in_use = sockets.0.lock().in_use.clone();
        sockets.attempt(Places { peers: vec!["c".into()], ..in_use });
        sockets.sockets(&order).unwrap();
        sockets.sockets(&SocketOrder::MakeOutgoing { peer: "b".into() }).unwrap();
        sockets.abandon();
        assert!(sockets.sockets(&order).is_err());
    }

    #[test]
    fn program_that_accepts_nothing_does_not_hold_a_stream_up() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("exit");
        // Its queue is full after one connection, and nobody accepts.
        let listener = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            None,
        )
        .unwrap();
        rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let sockets = sockets(directory.path());
        let order = SocketOrder::Connect(Exit::Rule { name: "rule".into() });
        let first = sockets.sockets(&order).unwrap();
        let refused = sockets.sockets(&order);
        let Err(ProxyError::Unreachable { source, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(source.kind(), std::io::ErrorKind::TimedOut);
        drop(first);
    }
}
