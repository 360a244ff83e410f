//! Links from other daemons.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use parking_lot::Mutex;
use vmferry_transport::{Listener, PeerIdentity, Pending};
use vmferry_wire::{Hello, HelloReply, HelloStatus, Role};

use crate::directory;
use crate::event::{ProxyEvent, Side};
use crate::libvirt;
use crate::proxy::{Ends, Entry, Shared};
use crate::records::{Answer, Opening, PROXY_VERSION, RecordError, Target, read_hello};
use crate::stream::{Link, LinkEnd, StreamFailure, run_link};

/// Connections that greet at the same time. More wait in the listener's queue.
const MAX_GREETING: usize = 64;

/// Connections from one address that greet at the same time. More are closed.
const MAX_GREETING_OF_ONE: usize = 16;

/// Connections that greet, by their address.
#[derive(Default)]
struct Greeting {
    all: usize,
    by_address: HashMap<Option<IpAddr>, usize>,
}

impl Greeting {
    fn enter(&mut self, address: Option<IpAddr>) -> bool {
        let of_one = self.by_address.entry(address).or_default();
        if self.all >= MAX_GREETING || *of_one >= MAX_GREETING_OF_ONE {
            return false;
        }
        (self.all, *of_one) = (self.all + 1, *of_one + 1);
        true
    }

    fn leave(&mut self, address: Option<IpAddr>) {
        self.all -= 1;
        if let Some(of_one) = self.by_address.get_mut(&address) {
            *of_one -= 1;
            if *of_one == 0 {
                self.by_address.remove(&address);
            }
        }
    }
}

/// Accepts links until the listener is closed.
pub(crate) fn accept(shared: &Arc<Shared>, listener: &Listener) {
    let greeting = Arc::new(Mutex::new(Greeting::default()));
    loop {
        let pending = match listener.accept() {
            Ok(Some(pending)) => pending,
            Ok(None) => return,
            Err(error) => {
                let reason = vmferry::chain(&error);
                let (peer, wanted) = ("a host".into(), "connect".into());
                shared.tell(ProxyEvent::Refused { peer, wanted, reason });
                // Such as: no descriptor is free. It may be better soon.
                std::thread::sleep(std::time::Duration::from_millis(100));
                continue;
            }
        };
        let address = pending.peer_ip();
        if !greeting.lock().enter(address) {
            continue;
        }
        let (shared, of_thread) = (Arc::clone(shared), Arc::clone(&greeting));
        let spawned = std::thread::Builder::new().name("link".into()).spawn(move || {
            let greeted = greet(&shared, pending);
            of_thread.lock().leave(address);
            if let Some((entry, link)) = greeted {
                carry(&shared, &entry, link);
            }
        });
        if spawned.is_err() {
            greeting.lock().leave(address);
        }
    }
}

/// Greets a peer, and finds or begins its stream.
fn greet(shared: &Arc<Shared>, pending: Pending) -> Option<(Arc<Entry>, Link)> {
    let address = pending.peer_address();
    let timings = shared.config().timings;
    let refused = |peer: String, wanted: &str, reason: String| {
        shared.tell(ProxyEvent::Refused { peer, wanted: wanted.to_owned(), reason });
    };
    let channel = match pending.handshake(timings.connect) {
        Ok(channel) => channel,
        Err(error) => {
            refused(address, "connect", vmferry::chain(&error));
            return None;
        }
    };
    let (peer, closer) = (channel.peer().clone(), channel.closer());
    let (mut reader, mut writer) = channel.split();
    if reader.set_timeout(Some(timings.connect)).is_err()
        || writer.set_timeout(Some(timings.connect)).is_err()
    {
        return None;
    }
    let read = read_hello(&mut reader).and_then(|hello| match hello.role {
        Role::Stream => Ok((hello, Some(Opening::read(&mut reader)?))),
        _ => Ok((hello, None)),
    });
    let (hello, opening) = match read {
        Ok((hello, Some(opening))) => (hello, opening),
        Ok((hello, None)) => {
            let role = u8::from(hello.role);
            refused(peer.to_string(), "connect", format!("this daemon does not serve role {role}"));
            // A source of a guest: it understands this reply.
            let _ = io::Write::write_all(&mut writer, &not_served().encode());
            let _ = writer.finish();
            return None;
        }
        Err(error) => {
            let reason = vmferry::chain(&error);
            refused(peer.to_string(), "connect", reason.clone());
            if matches!(error, RecordError::Version { .. }) {
                let _ = Answer::Refused { reason }.write(&mut writer);
                let _ = writer.finish();
            }
            return None;
        }
    };
    if let Target::Word { session } = opening.target {
        match libvirt::word(shared, &peer, session) {
            Ok(answer) => {
                let _ = Answer::Word(answer).write(&mut writer);
            }
            Err(reason) => {
                refused(peer.to_string(), &format!("ask for {}", opening.target), reason)
            }
        }
        // The peer asks again if it does not get the answer.
        let _ = writer.finish();
        return None;
    }
    let entry = match find_or_begin(shared, &peer, &hello, &opening) {
        Ok(entry) => entry,
        Err(reason) => {
            refused(peer.to_string(), &format!("open {}", opening.target), reason.clone());
            // The peer may have gone.
            let _ = Answer::Refused { reason }.write(&mut writer);
            let _ = writer.finish();
            return None;
        }
    };
    let (number, received) = entry.stream.next_link(closer.clone());
    // If it fails, the link turns out to be broken.
    let _ = Answer::Opened { received }.write(&mut writer);
    Some((entry, Link { number, reader, writer, closer, received: opening.received }))
}

/// The reply to a greeting of a role that daemons do not have.
fn not_served() -> HelloReply {
    HelloReply {
        status: HelloStatus::Refused,
        version_min: PROXY_VERSION,
        version_max: PROXY_VERSION,
        version: 0,
        placed: 0,
    }
}

fn find_or_begin(
    shared: &Arc<Shared>,
    peer: &PeerIdentity,
    hello: &Hello,
    opening: &Opening,
) -> Result<Arc<Entry>, String> {
    if let Some(policy) = &shared.config().policy {
        policy.check_source(peer)?;
    }
    if let Some(entry) = shared.stream(&hello.token) {
        let same = entry.opener.as_ref().is_some_and(|opener| opener.is_same_as(peer));
        let is_newer = || entry.attempt.fetch_max(hello.attempt, Ordering::AcqRel) < hello.attempt;
        if !same || !is_newer() || entry.name.target != opening.target.to_string() {
            return Err("another host's stream, or an old attempt".into());
        }
        return Ok(entry);
    }
    if opening.is_known {
        return Err("the stream has ended here, or this daemon was started again".into());
    }
    let ends = connect(shared, peer, &opening.target)?;
    let name = (peer_name(shared, peer), opening.target.to_string(), Side::Acceptor);
    let entry = shared.begin(hello.token.0, name, Some(peer.clone()), ends)?;
    entry.attempt.store(hello.attempt, Ordering::Release);
    Ok(entry)
}

/// The configured name of a peer, or else the name in its certificate.
fn peer_name(shared: &Shared, peer: &PeerIdentity) -> String {
    let config = shared.config();
    let known = config
        .peers
        .iter()
        .find(|known| known.id.as_ref().is_some_and(|id| peer.names.contains(id)));
    match known {
        Some(known) => known.name.clone(),
        None => peer.name().unwrap_or_else(|| peer.address.clone()),
    }
}

/// Connects to where a stream goes on this host.
fn connect(shared: &Arc<Shared>, peer: &PeerIdentity, target: &Target) -> Result<Ends, String> {
    let config = shared.config();
    match target {
        Target::Libvirt { directory, session } => {
            libvirt::arrive(shared, peer, peer_name(shared, peer), directory, *session)
        }
        Target::Word { .. } => Err("it is a question and no stream".into()),
        Target::Socket { directory, file } => {
            if !shared.migrations.may_open(peer, directory, file) {
                return Err(format!("no guest that was announced by this host uses {target}"));
            }
            let path = config.directory.join(directory);
            let socket = directory::connect_to_qemu(&path, file, config.qemu);
            let socket =
                socket.map_err(|error| format!("{} can't be reached: {error}", path.display()))?;
            Ends::plain(socket).map_err(|error| error.to_string())
        }
        Target::Forward { name } => {
            let rule = config.forwards.iter().find(|rule| rule.name == *name);
            let path = rule.and_then(|rule| rule.connect.as_ref());
            let Some(path) = path else { return Err(format!("there is no rule {name:?} here")) };
            let socket = std::os::unix::net::UnixStream::connect(path);
            let socket =
                socket.map_err(|error| format!("{} can't be reached: {error}", path.display()))?;
            Ends::plain(socket).map_err(|error| error.to_string())
        }
    }
}

/// Carries a stream over the link, and waits for the next one.
fn carry(shared: &Arc<Shared>, entry: &Entry, link: Link) {
    let (number, timings) = (link.number, shared.config().timings);
    let stream = &entry.stream;
    match run_link(stream, link, &timings, &entry.pacer) {
        LinkEnd::Superseded => return,
        LinkEnd::Over => {}
        LinkEnd::Broken(reason) => {
            let broken =
                ProxyEvent::LinkBroken { stream: entry.name.clone(), reason: reason.clone() };
            shared.tell(broken);
            stream.await_next_link(number, Instant::now() + timings.reconnect);
            if !stream.is_last_link(number) {
                return;
            }
            let (peer, waited) = (entry.name.peer.clone(), timings.reconnect);
            stream.fail(StreamFailure::LinkLost { peer, waited, last: reason });
        }
    }
    shared.end(entry);
}
