//! The proxy of a host: its streams, and what makes them.

mod bound;

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::{Mutex, RwLock};
use vmferry::config::compression::CompressionConfig;
use vmferry::data::source::chooser::Chooser;
use vmferry_codec::StreamEncoder;
use vmferry_handover::{OperatorWord, SessionId};
use vmferry_transport::{Address, ListenerCloser, PeerIdentity, RateLimiter};
use vmferry_wire::Token;

use crate::access::HostAccess;
use crate::arrival_directories::ArrivalDirectories;
use crate::config::ProxyConfig;
use crate::entrances::Entrances;
use crate::error::ProxyError;
use crate::event::{Observer, ProxyEvent, Side, StreamName};
use crate::host_sockets::{HostSockets, Places};
use crate::keeper::Keeper;
use crate::libvirt::{DoubtStatus, MigrationStatus, Migrations};
use crate::packers::Packers;
use crate::packing::{Pacer, Packer};
use crate::probes::{HostReport, Probes};
use crate::refusals::Refusals;
use crate::stream::{LocalReader, LocalWriter, Output, Stream, StreamFailure, Tap, Waker};

pub use bound::BoundProxy;

/// The most streams at once. Each has up to 64 MiB of frames on this host, and up to 256 MiB of
/// kept pages if it is a guest's memory.
const MAX_STREAMS: usize = 512;

/// The most streams of one peer at once, so that it leaves some to the others.
const MAX_STREAMS_OF_ONE: usize = 256;

/// A running proxy. Dropping it ends all streams.
pub struct Proxy {
    pub(crate) shared: Arc<Shared>,
    entrances: Mutex<Entrances>,
    address: Address,
    closer: ListenerCloser,
    accepting: Option<JoinHandle<()>>,
}

/// What all threads of a proxy share.
pub(crate) struct Shared {
    config: RwLock<Arc<ProxyConfig>>,
    observer: Box<Observer>,
    streams: Mutex<HashMap<[u8; 16], Arc<Entry>>>,
    numbers: AtomicU64,
    sessions: AtomicU64,
    limiters: Mutex<HashMap<String, RateLimiter>>,
    packers: Packers,
    refusals: Mutex<Refusals>,
    /// Access to files and names of this host.
    pub access: Arc<dyn HostAccess>,
    own: Own,
    pub ending: AtomicBool,
    /// Holds connections if this daemon dies.
    pub keeper: Option<Keeper>,
    /// Where QEMUs of guests that arrive make sockets.
    pub arrival_directories: Arc<ArrivalDirectories>,
    /// Guests on their way.
    pub migrations: Migrations,
    /// What probes of other hosts are answered with.
    pub probes: Probes,
}

/// This process's own access to this host, which follows the configuration.
type Own = Option<Arc<HostSockets>>;

/// A stream and what is known about it.
pub(crate) struct Entry {
    pub stream: Arc<Stream>,
    pub name: StreamName,
    pub token: [u8; 16],
    /// The peer that opened it, if this side is the acceptor.
    pub opener: Option<PeerIdentity>,
    /// The number of the opener's last attempt.
    pub attempt: AtomicU64,
    pub pacer: Pacer,
    is_ended: AtomicBool,
}

/// What a stream does with its bytes on this host.
pub(crate) struct Ends {
    /// The local socket.
    pub socket: UnixStream,
    /// Sees what is read.
    pub tap: Option<Box<dyn Tap>>,
    /// Takes what is written.
    pub output: Box<dyn Output>,
    /// Wakes the reader for the tap.
    pub waker: Arc<Waker>,
    /// Whether the bytes are compressed when that pays.
    pub compress: bool,
    /// While it is set, the local program does not see its socket closed when the stream fails.
    pub shelter: Arc<AtomicBool>,
}

impl Ends {
    /// A socket whose bytes are carried as they are.
    pub fn plain(socket: UnixStream) -> std::io::Result<Self> {
        let output = Box::new(socket.try_clone()?);
        let (waker, shelter) = (Arc::new(Waker::new()?), Arc::default());
        Ok(Self { socket, tap: None, output, waker, compress: true, shelter })
    }
}

/// A stream in the status.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamStatus {
    /// Its name.
    pub name: StreamName,
    /// Whether it has a link now.
    pub linked: bool,
    /// Links so far.
    pub links: u64,
    /// Bytes read from the local program.
    pub read: u64,
    /// Bytes sent on links.
    pub sent: u64,
    /// Bytes written to the local program.
    pub written: u64,
    /// Bytes per second of the local program's data that the peer has placed lately.
    pub rate: Option<f64>,
}

impl Proxy {
    /// Starts listening for peers and for local programs.
    ///
    /// # Errors
    /// An address, a directory or a socket that can't be used.
    pub fn start(config: ProxyConfig, observer: Box<Observer>) -> Result<Self, ProxyError> {
        BoundProxy::bind(config)?.start(observer)
    }

    /// Where other daemons connect to, with the actual port.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Uses another configuration from now on: peers and rules that are new get their sockets, and
    /// those that are gone lose theirs. Streams that exist go on. The listening address, its
    /// identity and the directory stay as they are.
    ///
    /// # Errors
    /// What of it can't be used. Then the configuration is the same as before.
    pub fn reconfigure(&self, config: ProxyConfig) -> Result<(), ProxyError> {
        let mut entrances = self.entrances.lock();
        if let Some(own) = &self.shared.own {
            own.attempt(Places::of(&config));
        }
        let new = match entrances.prepare(&self.shared, &config) {
            Ok(new) => new,
            Err(error) => {
                if let Some(own) = &self.shared.own {
                    own.abandon();
                }
                return Err(error);
            }
        };
        let config = Arc::new(config);
        *self.shared.config.write() = Arc::clone(&config);
        entrances.adopt(&config, new);
        if let Some(own) = &self.shared.own {
            own.adopt();
        }
        Ok(())
    }

    /// Reports this host to hosts that may send guests here, and ask. Until then they learn only
    /// whether they may, and how much memory is free.
    pub fn report(&self, report: Arc<dyn HostReport>) {
        self.shared.probes.set_report(report);
    }

    /// All streams, in the order in which they began.
    #[must_use]
    pub fn status(&self) -> Vec<StreamStatus> {
        let entries: Vec<_> = self.shared.streams.lock().values().cloned().collect();
        let mut all: Vec<_> = entries.iter().map(|entry| entry.status()).collect();
        all.sort_by_key(|status| status.name.number);
        all
    }

    /// The guests of this host that may run at another one, because the answer is lost.
    #[must_use]
    pub fn doubts(&self) -> Vec<DoubtStatus> {
        self.shared.migrations.doubts()
    }

    /// An operator, who has looked at the other host or fenced it, decides about a guest that is in
    /// doubt. Returns whether it is.
    #[must_use]
    pub fn decide(&self, session: SessionId, word: OperatorWord) -> bool {
        self.shared.migrations.decide(session, word)
    }

    /// The guests that libvirt moves or has moved, the oldest first.
    #[must_use]
    pub fn migrations(&self) -> Vec<MigrationStatus> {
        self.shared.migrations.list()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::Release);
        self.closer.close();
        *self.entrances.lock() = Entrances::default();
        let entries: Vec<_> = self.shared.streams.lock().values().cloned().collect();
        for entry in entries {
            entry.stream.fail(StreamFailure::Ending);
        }
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

impl Shared {
    pub fn config(&self) -> Arc<ProxyConfig> {
        Arc::clone(&self.config.read())
    }

    /// Whether the proxy ends.
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// A number for an RPC connection.
    pub fn next_session(&self) -> u64 {
        self.sessions.fetch_add(1, Ordering::Relaxed)
    }

    /// The keeper need not hold the session's connection any more.
    pub fn release_from_keeper(&self, session: SessionId) {
        if let Some(keeper) = &self.keeper {
            // A keeper that has gone holds nothing.
            let _ = keeper.drop_session(session);
        }
    }

    /// Tells the observer of an event. Refusals of one peer in quick succession are only counted.
    pub fn tell(&self, event: ProxyEvent) {
        let ProxyEvent::Refused { peer, .. } = &event else { return (self.observer)(event) };
        if self.refusals.lock().is_told(peer, Instant::now()) {
            (self.observer)(event);
        }
    }

    /// Tells the observer of refusals that were only counted.
    pub fn tell_counted_refusals(&self) {
        let counted = self.refusals.lock().counted(Instant::now());
        for (peer, count) in counted {
            (self.observer)(ProxyEvent::Untold { peer, count });
        }
    }

    /// The bandwidth cap of a peer, which all streams to it share.
    fn limiter(&self, peer: &str) -> RateLimiter {
        let cap = self.config().bandwidth;
        let mut limiters = self.limiters.lock();
        let limiter =
            limiters.entry(peer.to_owned()).or_insert_with(|| RateLimiter::new(cap)).clone();
        limiter.set_rate(cap);
        limiter
    }

    /// A stream that exists.
    pub fn stream(&self, token: &Token) -> Option<Arc<Entry>> {
        self.streams.lock().get(&token.0).cloned()
    }

    /// Begins a stream: starts the threads of its local socket.
    ///
    /// # Errors
    /// Why it can't begin, for people.
    pub fn begin(
        self: &Arc<Self>,
        token: [u8; 16],
        name: (String, String, Side),
        opener: Option<PeerIdentity>,
        ends: Ends,
    ) -> Result<Arc<Entry>, String> {
        let local = |error: std::io::Error| format!("the system can't start a stream: {error}");
        let Ends { socket, tap, output, waker, compress, shelter } = ends;
        let of_writer = socket.try_clone().map_err(local)?;
        let stream = Arc::new(Stream::new(&socket, Arc::clone(&waker), shelter).map_err(local)?);
        let (peer, target, side) = name;
        let limiter = self.limiter(&peer);
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let config = self.config();
        let (packer, pacer) = packing(&config.compression, compress, config.bandwidth, limiter);
        let encoder = StreamEncoder::new(config.compression.compressors.clone());
        let entry = Arc::new(Entry {
            stream: Arc::clone(&stream),
            name: StreamName { number, peer, target, side },
            token,
            opener,
            attempt: AtomicU64::new(0),
            pacer,
            is_ended: AtomicBool::new(false),
        });
        {
            let (mut streams, entry_peer) = (self.streams.lock(), &entry.name.peer);
            if self.ending.load(Ordering::Acquire) {
                return Err("the daemon ends".into());
            }
            if streams.len() >= MAX_STREAMS {
                return Err(format!("there are {MAX_STREAMS} streams already"));
            }
            let of_peer = streams.values().filter(|entry| entry.name.peer == *entry_peer).count();
            if of_peer >= MAX_STREAMS_OF_ONE {
                return Err(format!(
                    "there are {MAX_STREAMS_OF_ONE} streams with {entry_peer} already"
                ));
            }
            if streams.contains_key(&token) {
                return Err("the stream has begun on another link".into());
            }
            streams.insert(token, Arc::clone(&entry));
        }
        let writer = LocalWriter { stream: Arc::clone(&stream), socket: of_writer, output };
        let packers = self.packers.clone();
        let reader = LocalReader { stream, socket, packer, encoder, packers, tap, waker };
        let started = std::thread::Builder::new()
            .name("local-write".into())
            .spawn(move || writer.run())
            .and_then(|_| {
                std::thread::Builder::new().name("local-read".into()).spawn(move || reader.run())
            });
        if let Err(error) = started {
            let problem = local(error);
            entry.stream.fail(StreamFailure::Local { problem: problem.clone() });
            self.streams.lock().remove(&token);
            return Err(problem);
        }
        self.tell(ProxyEvent::Opened { stream: entry.name.clone() });
        Ok(entry)
    }

    /// Forgets a stream that is over, once.
    pub fn end(&self, entry: &Entry) {
        if entry.is_ended.swap(true, Ordering::AcqRel) {
            return;
        }
        self.streams.lock().remove(&entry.token);
        let StreamStatus { name, read, sent, written, .. } = entry.status();
        let failure = entry.stream.failure();
        self.tell(ProxyEvent::Ended { stream: name, failure, read, sent, written });
    }
}

impl Entry {
    fn status(&self) -> StreamStatus {
        let counters = &self.stream.counters;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StreamStatus {
            name: self.name.clone(),
            linked: self.stream.unlinked_since().is_none(),
            links: load(&counters.links),
            read: load(&counters.read),
            sent: load(&counters.sent),
            written: load(&counters.written),
            rate: self.stream.rate(),
        }
    }
}

/// How a stream's frames are made and sent.
fn packing(
    config: &CompressionConfig,
    compress: bool,
    cap: Option<u64>,
    limiter: RateLimiter,
) -> (Packer, Pacer) {
    if !compress {
        return (Packer::plain(), Pacer::new(None, Some(limiter)));
    }
    let chooser = Arc::new(Chooser::new(config, 1, cap));
    let packer = Packer::compressing(Arc::clone(&chooser), config);
    (packer, Pacer::new(Some(chooser), Some(limiter)))
}
