//! The links that are dialed for streams of local programs.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_transport::Dialer;
use vmferry_wire::{Hello, Role, Token};

use crate::config::ProxyConfig;
use crate::entrances::refuse;
use crate::event::{ProxyEvent, Side};
use crate::proxy::{Ends, Entry, Shared};
use crate::records::{Answer, Opening, PROXY_VERSION, Target};
use crate::stream::{Link, LinkEnd, StreamFailure, run_link};

/// The name of libvirt's socket in a peer's directory.
pub const LIBVIRT_SOCKET: &str = "libvirt";

/// The first wait after a failed attempt to connect, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Begins a stream for a local connection, with a thread that keeps it linked.
///
/// The peer connects it to its program after the stream `after`: QEMU before 8.0 takes the first
/// connection for the main channel of a migration.
pub(crate) fn open(
    shared: &Arc<Shared>,
    peer: &str,
    target: Target,
    ends: Ends,
    after: Option<Arc<Entry>>,
) -> Option<Arc<Entry>> {
    let mut token = [0; 16];
    if let Err(error) = getrandom::fill(&mut token) {
        refuse(shared, &target, format!("no random number: {error}"));
        return None;
    }
    let name = (peer.to_owned(), target.to_string(), Side::Opener);
    let entry = match shared.begin(token, name, None, ends) {
        Ok(entry) => entry,
        Err(reason) => {
            refuse(shared, &target, reason);
            return None;
        }
    };
    let (of_thread, of_entry) = (Arc::clone(shared), Arc::clone(&entry));
    let spawned = std::thread::Builder::new().name("link".into()).spawn(move || {
        if let Some(earlier) = after {
            let deadline = Instant::now() + of_thread.config().timings.reconnect;
            earlier.stream.await_first_link(deadline);
        }
        keep_linked(&of_thread, &of_entry, &target);
        of_thread.end(&of_entry);
    });
    if let Err(error) = spawned {
        entry.stream.fail(StreamFailure::Local { problem: error.to_string() });
        shared.end(&entry);
    }
    Some(entry)
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

/// Connects to a peer.
///
/// # Errors
/// Why it can't be dialed.
pub(crate) fn dialer(
    shared: &Shared,
    config: &ProxyConfig,
    peer: &str,
) -> Result<Dialer, Undialed> {
    let known = config.peers.iter().find(|known| known.name == peer);
    let peer = known.ok_or(Undialed::Unknown)?;
    let mut dialer = Dialer::new(peer.address.clone(), config.tls.clone());
    dialer.destination_id.clone_from(&peer.id);
    dialer.connect_timeout = config.timings.connect;
    let found = shared.access.addresses(&peer.address);
    dialer.known_addresses = found.map_err(|error| Undialed::NoAddress(vmferry::chain(&error)))?;
    Ok(dialer)
}

/// Why a peer can't be dialed.
#[derive(Debug)]
pub(crate) enum Undialed {
    /// The configuration does not name it.
    Unknown,
    /// Its address is not known now.
    NoAddress(String),
}

fn dial(
    shared: &Shared,
    entry: &Entry,
    target: &Target,
    attempt: u64,
    is_known: bool,
) -> Result<Link, Unlinked> {
    let config = shared.config();
    let dialer = match dialer(shared, &config, &entry.name.peer) {
        Ok(dialer) => dialer,
        Err(Undialed::Unknown) => {
            return Err(Unlinked::Refused("the configuration does not name this host".into()));
        }
        Err(Undialed::NoAddress(reason)) => return Err(Unlinked::Failed(reason)),
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
        Answer::Word(_) | Answer::Receiving | Answer::NotReceiving(_) | Answer::Judged => {
            Err(Unlinked::Failed("it answers another question".into()))
        }
    }
}
