//! The sockets that local programs connect to, for peers and rules.

use std::collections::HashMap;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use vmferry_handover::SessionId;

use crate::access::{Entrance, LocalListener, SocketOrder};
use crate::config::ProxyConfig;
use crate::error::ProxyError;
use crate::event::ProxyEvent;
use crate::libvirt;
use crate::opened::OpenedStreams;
use crate::outgoing::open;
use crate::proxy::{Ends, Entry, Shared};
use crate::records::Target;
use crate::stream::Waker;

/// All sockets of a configuration.
#[derive(Default)]
pub(crate) struct Entrances {
    peers: HashMap<String, LocalSocket>,
    rules: HashMap<PathBuf, RuleSocket>,
}

/// The sockets that a configuration needs and that there are not yet. They accept nothing before
/// they are [adopted](Entrances::adopt).
pub(crate) struct NewEntrances {
    peers: HashMap<String, LocalSocket>,
    rules: HashMap<PathBuf, RuleSocket>,
}

/// A socket of this host with the thread that accepts its connections. Both end when it is dropped.
pub(crate) struct LocalSocket {
    waker: Arc<Waker>,
    /// Dropped before the thread begins, it ends the thread.
    begin: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The socket of a rule, and where its connections go: a peer, and a rule there.
struct RuleSocket {
    socket: LocalSocket,
    leads_to: Arc<Mutex<(String, String)>>,
}

impl Entrances {
    /// Makes the sockets that a configuration needs and that there are not yet.
    ///
    /// # Errors
    /// One can't be made. Then nothing has changed.
    pub fn prepare(
        &self,
        shared: &Arc<Shared>,
        config: &ProxyConfig,
    ) -> Result<NewEntrances, ProxyError> {
        let mut new = NewEntrances { peers: HashMap::new(), rules: HashMap::new() };
        for (index, peer) in config.peers.iter().enumerate() {
            if config.peers[..index].iter().any(|other| other.name == peer.name) {
                return Err(ProxyError::Twice { name: peer.name.clone() });
            }
            // A peer whose address changes keeps its socket.
            if !self.peers.contains_key(&peer.name) {
                let peer = peer.name.clone();
                shared.access.sockets(&SocketOrder::MakeOutgoing { peer: peer.clone() })?;
                new.peers.insert(peer.clone(), listen_for_libvirt(shared, peer)?);
            }
        }
        let mut seen = Vec::new();
        for rule in &config.forwards {
            let Some((path, peer)) = &rule.listen else { continue };
            if seen.contains(&path) {
                return Err(ProxyError::PathTwice { path: path.clone() });
            }
            seen.push(path);
            // A path that stays keeps its socket.
            if !self.rules.contains_key(path) {
                let leads_to = Arc::new(Mutex::new((peer.clone(), rule.name.clone())));
                let socket = listen_for_rule(shared, &rule.name, Arc::clone(&leads_to))?;
                new.rules.insert(path.clone(), RuleSocket { socket, leads_to });
            }
        }
        Ok(new)
    }

    /// Closes the sockets that the configuration, which is in use by now, does not name, and lets
    /// the new ones accept connections.
    pub fn adopt(&mut self, config: &ProxyConfig, new: NewEntrances) {
        self.peers.retain(|name, _| config.peers.iter().any(|peer| peer.name == *name));
        self.rules.retain(|path, socket| {
            let of_path = |rule: &&crate::Forward| {
                rule.listen.as_ref().is_some_and(|(listens, _)| listens == path)
            };
            let Some(rule) = config.forwards.iter().find(of_path) else { return false };
            if let Some((_, peer)) = &rule.listen {
                *socket.leads_to.lock() = (peer.clone(), rule.name.clone());
            }
            true
        });
        let NewEntrances { peers, rules } = new;
        let sockets = peers.values().chain(rules.values().map(|rule| &rule.socket));
        sockets.for_each(LocalSocket::begin);
        self.peers.extend(peers);
        self.rules.extend(rules);
    }
}

fn listen_for_libvirt(shared: &Arc<Shared>, peer: String) -> Result<LocalSocket, ProxyError> {
    let listener = LocalListener::new(&shared.access, Entrance::Libvirt { peer: peer.clone() })?;
    let shared = Arc::downgrade(shared);
    LocalSocket::start(Arc::new(listener), move |listener| {
        let socket = connection(listener)?;
        let Some(shared) = shared.upgrade() else { return Ok(()) };
        let mut session = SessionId([0; 16]);
        let random = getrandom::fill(&mut session.0).map_err(|error| error.to_string());
        let target = Target::Libvirt { directory: peer.clone(), session };
        let ends = random.and_then(|()| {
            libvirt::depart(&shared, &peer, session, socket).map_err(|error| error.to_string())
        });
        match ends {
            Ok(ends) => drop(open(&shared, &peer, target, ends, None)),
            Err(reason) => refuse(&shared, &target, reason),
        }
        Ok(())
    })
}

fn listen_for_rule(
    shared: &Arc<Shared>,
    rule: &str,
    leads_to: Arc<Mutex<(String, String)>>,
) -> Result<LocalSocket, ProxyError> {
    let listener = LocalListener::new(&shared.access, Entrance::Rule { name: rule.to_owned() })?;
    let (shared, mut last) = (Arc::downgrade(shared), Weak::new());
    LocalSocket::start(Arc::new(listener), move |listener| {
        let socket = connection(listener)?;
        let Some(shared) = shared.upgrade() else { return Ok(()) };
        let (peer, name) = leads_to.lock().clone();
        last = open_plain(&shared, &peer, Target::Forward { name }, socket, last.upgrade())
            .map_or_else(Weak::new, |entry| Arc::downgrade(&entry));
        Ok(())
    })
}

/// Opens a stream to a peer's socket for each connection to a socket of a migration.
///
/// # Errors
/// The socket or its thread can't be made.
pub(crate) fn listen_for_migration(
    shared: &Arc<Shared>,
    peer: &str,
    file: String,
    opened: Arc<OpenedStreams>,
) -> Result<LocalSocket, ProxyError> {
    let entrance = Entrance::Migration { peer: peer.to_owned(), file: file.clone() };
    let listener = Arc::new(LocalListener::new(&shared.access, entrance)?);
    opened.listen(&listener);
    let (shared, peer) = (Arc::downgrade(shared), peer.to_owned());
    let target = Target::Socket { directory: peer.clone(), file };
    let socket = LocalSocket::start(listener, move |listener| {
        opened.accept(listener, |socket, last| {
            let shared = shared.upgrade()?;
            open_plain(&shared, &peer, target.clone(), socket, last)
        })
    })?;
    socket.begin();
    Ok(socket)
}

fn open_plain(
    shared: &Arc<Shared>,
    peer: &str,
    target: Target,
    socket: UnixStream,
    after: Option<Arc<Entry>>,
) -> Option<Arc<Entry>> {
    match Ends::plain(socket) {
        Ok(ends) => open(shared, peer, target, ends, after),
        Err(error) => {
            refuse(shared, &target, error.to_string());
            None
        }
    }
}

/// Says that a connection of a local program was closed.
pub(crate) fn refuse(shared: &Shared, target: &Target, reason: String) {
    let wanted = format!("open {target}");
    shared.tell(ProxyEvent::Refused { peer: "a local program".into(), wanted, reason });
}

/// Accepts a connection that waits.
pub(crate) fn connection(listener: &UnixListener) -> io::Result<UnixStream> {
    let (socket, _) = listener.accept()?;
    socket.set_nonblocking(false)?;
    Ok(socket)
}

impl LocalSocket {
    /// `accept` accepts one connection.
    fn start(
        listener: Arc<LocalListener>,
        mut accept: impl FnMut(&UnixListener) -> io::Result<()> + Send + 'static,
    ) -> Result<Self, ProxyError> {
        let failed = |action| move |source| ProxyError::System { action, source };
        listener.socket.set_nonblocking(true).map_err(failed("listen"))?;
        let waker = Arc::new(Waker::new().map_err(failed("create an event"))?);
        let (of_thread, (begin, begun)) = (Arc::clone(&waker), channel::<()>());
        let thread = std::thread::Builder::new().name("local-accept".into());
        let thread = thread.spawn(move || {
            if begun.recv().is_err() {
                return;
            }
            // False after a wake-up, which is the end.
            while of_thread.wait(&listener.socket).unwrap_or(false) {
                match accept(&listener.socket) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // Such as: no descriptor is free. It may be better soon.
                    Err(_) => std::thread::sleep(Duration::from_millis(100)),
                }
            }
        });
        let thread = thread.map_err(failed("create a thread"))?;
        Ok(Self { waker, begin: Some(begin), thread: Some(thread) })
    }

    /// Accepts connections from now on.
    fn begin(&self) {
        if let Some(begin) = &self.begin {
            // The thread waits for it, or has it already.
            let _ = begin.send(());
        }
    }
}

impl Drop for LocalSocket {
    fn drop(&mut self) {
        self.waker.wake();
        drop(self.begin.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
