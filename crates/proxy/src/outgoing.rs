//! Local programs that connect, and the links that are dialed for their streams.

use std::collections::HashMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vmferry_handover::SessionId;
use vmferry_transport::Dialer;
use vmferry_wire::{Hello, Role, Token};

use crate::config::{Forward, Peer, ProxyConfig};
use crate::directory::{self, Access, LocalListener};
use crate::error::ProxyError;
use crate::event::{ProxyEvent, Side};
use crate::libvirt;
use crate::proxy::{Ends, Entry, Shared};
use crate::records::{Answer, Opening, PROXY_VERSION, Target};
use crate::stream::{Link, LinkEnd, StreamFailure, Waker, run_link};

/// The name of libvirt's socket in a peer's directory.
pub const LIBVIRT_SOCKET: &str = "libvirt";

/// The first wait after a failed attempt to connect, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The sockets that local programs connect to, for peers and rules.
#[derive(Default)]
pub(crate) struct Outgoing {
    peers: HashMap<String, LocalSocket>,
    forwards: HashMap<String, (Forward, LocalSocket)>,
}

/// A socket of this host with the thread that accepts its connections. Both end when it is dropped.
pub(crate) struct LocalSocket {
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl Outgoing {
    /// Makes the sockets that the configuration names, and closes the others.
    ///
    /// # Errors
    /// The first one that can't be made. The others are made.
    pub fn follow(&mut self, shared: &Arc<Shared>) -> Result<(), ProxyError> {
        let config = shared.config();
        let mut first = Ok(());
        let twice = |index: usize| {
            let name = &config.peers[index].name;
            config.peers[..index].iter().any(|peer| peer.name == *name)
        };
        if let Some(index) = (0..config.peers.len()).find(|&index| twice(index)) {
            first = Err(ProxyError::Twice { name: config.peers[index].name.clone() });
        }
        // A peer whose address changes keeps its sockets, which migrations may be using.
        self.peers.retain(|name, _| config.peers.iter().any(|peer| peer.name == *name));
        for peer in &config.peers {
            if self.peers.contains_key(&peer.name) {
                continue;
            }
            let made = directory::make_outgoing(&config.directory, &peer.name)
                .and_then(|path| listen_for_libvirt(shared, peer, path.join(LIBVIRT_SOCKET)));
            match made {
                Ok(socket) => drop(self.peers.insert(peer.name.clone(), socket)),
                Err(error) => first = first.and(Err(error)),
            }
        }
        self.forwards.retain(|_, (rule, _)| config.forwards.contains(rule));
        for rule in &config.forwards {
            let Some((path, peer)) = &rule.listen else { continue };
            if self.forwards.contains_key(&rule.name) {
                continue;
            }
            match listen_for_rule(shared, rule, path, peer) {
                Ok(socket) => drop(self.forwards.insert(rule.name.clone(), (rule.clone(), socket))),
                Err(error) => first = first.and(Err(error)),
            }
        }
        first
    }
}

fn listen_for_libvirt(
    shared: &Arc<Shared>,
    peer: &Peer,
    path: PathBuf,
) -> Result<LocalSocket, ProxyError> {
    let listener = LocalListener::bind(&path, Access::Root)?;
    let (shared, peer) = (Arc::clone(shared), peer.name.clone());
    LocalSocket::start(listener, move |socket| {
        let mut session = SessionId([0; 16]);
        let random = getrandom::fill(&mut session.0).map_err(|error| error.to_string());
        let target = Target::Libvirt { directory: peer.clone(), session };
        let ends = random.and_then(|()| {
            libvirt::depart(&shared, &peer, session, socket).map_err(|error| error.to_string())
        });
        match ends {
            Ok(ends) => open(&shared, &peer, target, ends),
            Err(reason) => refuse(&shared, &target, reason),
        }
    })
}

fn listen_for_rule(
    shared: &Arc<Shared>,
    rule: &Forward,
    path: &std::path::Path,
    peer: &str,
) -> Result<LocalSocket, ProxyError> {
    // A daemon that was killed leaves its socket.
    directory::must_be_free(path)?;
    let listener = LocalListener::bind(path, Access::Qemu(shared.config().qemu))?;
    let target = Target::Forward { name: rule.name.clone() };
    listen(shared, listener, peer.to_owned(), target)
}

/// Opens a stream to `target` at the peer for each connection to the listener.
///
/// # Errors
/// [`ProxyError::System`].
pub(crate) fn listen(
    shared: &Arc<Shared>,
    listener: LocalListener,
    peer: String,
    target: Target,
) -> Result<LocalSocket, ProxyError> {
    let shared = Arc::downgrade(shared);
    LocalSocket::start(listener, move |socket| {
        let Some(shared) = shared.upgrade() else { return };
        match Ends::plain(socket) {
            Ok(ends) => open(&shared, &peer, target.clone(), ends),
            Err(error) => refuse(&shared, &target, error.to_string()),
        }
    })
}

fn refuse(shared: &Shared, target: &Target, reason: String) {
    let wanted = format!("open {target}");
    shared.tell(ProxyEvent::Refused { peer: "a local program".into(), wanted, reason });
}

impl LocalSocket {
    fn start(
        listener: LocalListener,
        mut accept: impl FnMut(UnixStream) + Send + 'static,
    ) -> Result<Self, ProxyError> {
        let failed = |action| move |source| ProxyError::System { action, source };
        listener.socket.set_nonblocking(true).map_err(failed("listen"))?;
        let waker = Arc::new(Waker::new().map_err(failed("create an event"))?);
        let of_thread = Arc::clone(&waker);
        let thread = std::thread::Builder::new().name("local-accept".into());
        let thread = thread.spawn(move || {
            // False after a wake-up, which is the end.
            while of_thread.wait(&listener.socket).unwrap_or(false) {
                match listener.socket.accept() {
                    Ok((socket, _)) => {
                        if socket.set_nonblocking(false).is_ok() {
                            accept(socket);
                        }
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // Such as: no descriptor is free. It may be better soon.
                    Err(_) => std::thread::sleep(Duration::from_millis(100)),
                }
            }
        });
        let thread = thread.map_err(failed("create a thread"))?;
        Ok(Self { waker, thread: Some(thread) })
    }
}

impl Drop for LocalSocket {
    fn drop(&mut self) {
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Begins a stream for a local connection, with a thread that keeps it linked.
fn open(shared: &Arc<Shared>, peer: &str, target: Target, ends: Ends) {
    let mut token = [0; 16];
    if let Err(error) = getrandom::fill(&mut token) {
        return refuse(shared, &target, format!("no random number: {error}"));
    }
    let name = (peer.to_owned(), target.to_string(), Side::Opener);
    let entry = match shared.begin(token, name, None, ends) {
        Ok(entry) => entry,
        Err(reason) => return refuse(shared, &target, reason),
    };
    let (of_thread, of_entry) = (Arc::clone(shared), Arc::clone(&entry));
    let spawned = std::thread::Builder::new().name("link".into()).spawn(move || {
        keep_linked(&of_thread, &of_entry, &target);
        of_thread.end(&of_entry);
    });
    if let Err(error) = spawned {
        entry.stream.fail(StreamFailure::Local { problem: error.to_string() });
        shared.end(&entry);
    }
}

/// Why a link could not be made.
enum Unlinked {
    /// Another attempt may succeed.
    Failed(String),
    /// The peer has refused the stream.
    Refused(String),
}

/// Dials links for a stream until it is over, or has had none for too long.
fn keep_linked(shared: &Shared, entry: &Entry, target: &Target) {
    let (stream, peer) = (&entry.stream, &entry.name.peer);
    let (mut attempt, mut is_known, mut pause) = (0, false, FIRST_PAUSE);
    let mut broken: Option<Instant> = None;
    while stream.needs_link() {
        let timings = shared.config().timings;
        attempt += 1;
        let last = match dial(shared, entry, target, attempt, is_known) {
            Ok(link) => {
                (is_known, pause) = (true, FIRST_PAUSE);
                if let Some(since) = broken.take() {
                    let (stream, after) = (entry.name.clone(), since.elapsed());
                    shared.tell(ProxyEvent::LinkMade { stream, after });
                }
                match run_link(stream, link, &timings, &entry.pacer) {
                    LinkEnd::Over | LinkEnd::Superseded => continue,
                    LinkEnd::Broken(reason) => {
                        broken = Some(Instant::now());
                        let (stream, reason) = (entry.name.clone(), reason);
                        shared.tell(ProxyEvent::LinkBroken { stream, reason });
                        continue;
                    }
                }
            }
            Err(Unlinked::Refused(reason)) => {
                stream.fail(StreamFailure::Refused { peer: peer.clone(), reason });
                return;
            }
            Err(Unlinked::Failed(reason)) => reason,
        };
        let Some(since) = stream.unlinked_since() else { continue };
        let waited = timings.reconnect;
        if since.elapsed() >= waited {
            stream.fail(StreamFailure::LinkLost { peer: peer.clone(), waited, last });
            return;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Connects to a peer; `None` if the configuration does not name it.
pub(crate) fn dialer(config: &ProxyConfig, peer: &str) -> Option<Dialer> {
    let peer = config.peers.iter().find(|known| known.name == peer)?;
    let mut dialer = Dialer::new(peer.address.clone(), config.tls.clone());
    dialer.destination_id.clone_from(&peer.id);
    dialer.connect_timeout = config.timings.connect;
    Some(dialer)
}

fn dial(
    shared: &Shared,
    entry: &Entry,
    target: &Target,
    attempt: u64,
    is_known: bool,
) -> Result<Link, Unlinked> {
    let config = shared.config();
    let Some(dialer) = dialer(&config, &entry.name.peer) else {
        return Err(Unlinked::Refused("the configuration does not name this host".into()));
    };
    let failed = |error: &dyn std::error::Error| Unlinked::Failed(vmferry::chain(error));
    let channel = dialer.connect().map_err(|error| failed(&error))?;
    let closer = channel.closer();
    let (number, received) = entry.stream.next_link(closer.clone());
    let (mut reader, mut writer) = channel.split();
    let limit = Some(config.timings.connect);
    let limited = reader.set_timeout(limit).and_then(|()| writer.set_timeout(limit));
    limited.map_err(|error| failed(&error))?;
    let hello = Hello {
        version_min: PROXY_VERSION,
        version_max: PROXY_VERSION,
        role: Role::Stream,
        lane: 0,
        token: Token(entry.token),
        attempt,
    };
    let opening = Opening { target: target.clone(), is_known, received };
    io::Write::write_all(&mut writer, &hello.encode()).map_err(|error| failed(&error))?;
    opening.write(&mut writer).map_err(|error| failed(&error))?;
    match Answer::read(&mut reader).map_err(|error| failed(&error))? {
        Answer::Opened { received } => Ok(Link { number, reader, writer, closer, received }),
        Answer::Refused { reason } => Err(Unlinked::Refused(reason)),
        Answer::Word(_) => Err(Unlinked::Failed("it answers another question".into())),
    }
}
