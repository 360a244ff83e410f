//! Links from other daemons.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use vmferry_libvirt_rpc::REFUSED;
use vmferry_transport::{Listener, PeerIdentity, Pending};
use vmferry_wire::{Hello, HelloReply, HelloStatus, Role};

use crate::access::{self, Exit};
use crate::event::{ProxyEvent, Side};
use crate::greeting::{Greeting, GreetingPlace};
use crate::judging;
use crate::libvirt;
use crate::proxy::{Ends, Entry, Shared};
use crate::receive;
use crate::records::{Answer, Opening, PROXY_VERSION, RecordError, Target, read_hello};
use crate::stream::{Link, LinkEnd, StreamFailure, run_link};

/// How often connections that greet are checked for their time, and refusals are counted.
const CHECK_PERIOD: Duration = Duration::from_secs(1);

/// Accepts links until the listener is closed.
pub(crate) fn accept(shared: &Arc<Shared>, listener: &Listener) {
    let greeting = Arc::new(Greeting::default());
    let (end, ended) = channel::<()>();
    let (of_checks, of_greeting) = (Arc::clone(shared), Arc::clone(&greeting));
    let checks = std::thread::Builder::new().name("greeting".into()).spawn(move || {
        while ended.recv_timeout(CHECK_PERIOD) == Err(RecvTimeoutError::Timeout) {
            of_greeting.close_slow(of_checks.config().timings.connect, Instant::now());
            of_checks.tell_counted_refusals();
        }
    });
    accept_all(shared, listener, &greeting);
    drop(end);
    if let Ok(checks) = checks {
        let _ = checks.join();
    }
}

fn accept_all(shared: &Arc<Shared>, listener: &Listener, greeting: &Arc<Greeting>) {
    loop {
        let pending = match listener.accept() {
            Ok(Some(pending)) => pending,
            Ok(None) => return,
            Err(error) => {
                let reason = vmferry::chain(&error);
                let (peer, wanted) = ("a host".into(), "connect".into());
                shared.tell(ProxyEvent::Refused { peer, wanted, reason });
                // Such as: no descriptor is free. It may be better soon.
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        let closer = Some(pending.closer());
        let Some(place) = greeting.enter(pending.peer_ip(), closer, Instant::now()) else {
            let (peer, wanted) = (pending.peer_address(), "connect".into());
            let reason = "too many connections have not greeted yet".into();
            shared.tell(ProxyEvent::Refused { peer, wanted, reason });
            continue;
        };
        let (shared, greeting) = (Arc::clone(shared), Arc::clone(greeting));
        // Without a thread the connection closes, and the peer dials again.
        let _ = std::thread::Builder::new().name("link".into()).spawn(move || {
            if let Some((entry, link)) = greet(&shared, pending, place, &greeting) {
                carry(&shared, &entry, link);
            }
        });
    }
}

/// Greets a peer, and finds or begins its stream.
fn greet(
    shared: &Arc<Shared>,
    pending: Pending,
    place: GreetingPlace,
    greeting: &Arc<Greeting>,
) -> Option<(Arc<Entry>, Link)> {
    let address = pending.peer_address();
    let timings = shared.config().timings;
    let refused = |peer: String, wanted: &str, reason: String| {
        shared.tell(ProxyEvent::Refused { peer, wanted: wanted.to_owned(), reason });
    };
    let pending = receive::unless_ticket(shared, pending)?;
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
        Ok((hello, None)) if hello.role == Role::Probe => {
            drop(place);
            let probes = &shared.probes;
            if let Err(error) = probes.answer(shared, &hello, &mut reader, &mut writer, &peer) {
                refused(peer.to_string(), "ask about this host", vmferry::chain(&error));
            }
            return None;
        }
        Ok((hello, None)) if hello.role == Role::Query => {
            let halves = (reader, writer);
            if let Err(error) = receive::answer_query(shared, &hello, halves, &peer) {
                refused(peer.to_string(), "ask for a session's word", vmferry::chain(&error));
            }
            return None;
        }
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
    // From here on it is known who it is, and it has said all that it has to say.
    drop(place);
    let name = peer.name().unwrap_or_else(|| peer.address.clone());
    let Some(_opening) = greeting.open(&name) else {
        refused(peer.to_string(), &format!("open {}", opening.target), "it opens too many".into());
        // The peer dials again.
        return None;
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
    if let Target::Receive(request) = &opening.target {
        receive::answer(shared, &peer, request, writer);
        return None;
    }
    if let Target::Judge(guest) = &opening.target {
        judging::answer(shared, &peer, guest, (reader, writer), closer);
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
        policy.check_source(peer).map_err(|reason| format!("{REFUSED}{reason}"))?;
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
        Target::Word { .. } | Target::Receive(_) | Target::Judge(_) => {
            Err("it is a question and no stream".into())
        }
        Target::Socket { directory, file } => {
            if !shared.migrations.sockets.may_open(peer, directory, file) {
                return Err(format!("no guest that was announced by this host uses {target}"));
            }
            plain(shared, Exit::Qemu { directory: directory.clone(), file: file.clone() })
        }
        Target::Forward { name } => {
            let rule = config.forwards.iter().find(|rule| rule.name == *name);
            let Some(exit) = rule.and_then(|rule| rule.connect.as_ref()) else {
                return Err(format!("there is no rule {name:?} here"));
            };
            if !exit.admits(peer) {
                return Err(format!("`from` of the rule {name:?} does not name this host"));
            }
            plain(shared, Exit::Rule { name: name.clone() })
        }
    }
}

/// A connection to a local program whose bytes are carried as they are.
fn plain(shared: &Shared, exit: Exit) -> Result<Ends, String> {
    let socket = access::connect(&*shared.access, exit);
    let socket = socket.map_err(|error| vmferry::chain(&error))?;
    Ends::plain(socket).map_err(|error| error.to_string())
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
