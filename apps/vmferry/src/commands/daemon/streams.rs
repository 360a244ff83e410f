//! What the streams from this host have carried, and why they failed: for `vmferry send --libvirt`
//! and `vmferry doctor`, on a socket beside the directories of the peers.

use std::collections::{HashSet, VecDeque};
use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::json;
use vmferry_control::{
    Answer, BoundServer, ClientError, ControlError, ErrorCode, Handler, Replies, Request, Server,
    ServerError, call,
};
use vmferry_proxy::stream::StreamFailure;
use vmferry_proxy::{Proxy, ProxyEvent, Side, StreamName};

use crate::exit::{Code, Failure};

/// The name of the socket. No peer can have it, because it begins with a dot.
const SOCKET: &str = ".daemon";

/// The most targets whose streams have all ended, and the most failures, that are remembered.
const MAX_ENDED: usize = 128;

/// What a running daemon says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Its release.
    pub release: String,
    /// Its process.
    pub pid: u32,
    /// The streams to other hosts.
    pub carried: Vec<Carried>,
    /// Failed streams to other hosts, the oldest first.
    pub failures: Vec<Failed>,
}

/// What all streams to one target have carried together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Carried {
    /// The peer's name.
    pub peer: String,
    /// Where they come out: `libvirt`, or a migration's socket such as `host-b/web.mig`.
    pub target: String,
    /// Their number.
    pub streams: u64,
    /// The number of those that have not ended.
    pub open: u64,
    /// Bytes read from the local program.
    pub read_bytes: u64,
    /// Bytes sent on links, before TLS, with those that were sent again.
    pub sent_bytes: u64,
    /// Bytes from the peer, written to the local program.
    pub written_bytes: u64,
    /// How often a stream got another link after it had lost one.
    pub reconnections: u64,
    /// Time during which at least one of them had lost its link, in milliseconds.
    pub link_down_ms: f64,
    /// The last time of this kind, once it has ended.
    pub last_link_down_ms: f64,
    /// Why a link was lost, while a stream waits for another one.
    pub lost: Option<String>,
}

/// A stream that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// The peer's name.
    pub peer: String,
    /// See [`Carried::target`].
    pub target: String,
    /// The kind of failure.
    pub kind: FailureKind,
    /// Why, for people.
    pub reason: String,
    /// How long ago, in milliseconds.
    pub age_ms: u64,
}

/// Why a stream failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// No link could be made at all.
    Unreachable,
    /// The link was lost, and no other one could be made.
    LinkLost,
    /// The peer refuses the stream.
    Refused,
    /// Another reason, which the local program sees too.
    Other,
}

/// Listens to the proxy's events, and answers.
#[derive(Default)]
pub struct Streams {
    known: Mutex<Known>,
    proxy: OnceLock<Weak<Proxy>>,
}

#[derive(Default)]
struct Known {
    targets: VecDeque<Target>,
    failures: VecDeque<(Instant, Failed)>,
}

/// The streams to one target. The bytes of open streams are not in `ended`.
#[derive(Default)]
struct Target {
    ended: Carried,
    /// The numbers of streams that have lost their link.
    down: HashSet<u64>,
    down_since: Option<Instant>,
}

impl Streams {
    /// Serves the socket, which [`bind`] has made. It is removed when the server is dropped.
    ///
    /// # Errors
    /// There is no thread for it.
    pub fn serve(
        self: &Arc<Self>,
        socket: BoundServer,
        proxy: &Arc<Proxy>,
    ) -> Result<Server, ServerError> {
        // It is called once.
        let _ = self.proxy.set(Arc::downgrade(proxy));
        socket.serve(Arc::new(Served(Arc::clone(self))))
    }

    /// Takes note of an event.
    pub fn hear(&self, event: &ProxyEvent) {
        let mut known = self.known.lock();
        match event {
            ProxyEvent::Opened { stream } if is_ours(stream) => {
                let carried = &mut known.target(stream).ended;
                carried.streams += 1;
                carried.open += 1;
            }
            ProxyEvent::LinkBroken { stream, reason } if is_ours(stream) => {
                known.target(stream).lost(stream.number, reason);
            }
            ProxyEvent::LinkMade { stream, .. } if is_ours(stream) => {
                let target = known.target(stream);
                target.ended.reconnections += 1;
                target.has_link(stream.number);
            }
            ProxyEvent::Ended { stream, failure, read, sent, written } if is_ours(stream) => {
                let target = known.target(stream);
                target.has_link(stream.number);
                let carried = &mut target.ended;
                carried.open = carried.open.saturating_sub(1);
                carried.read_bytes += read;
                carried.sent_bytes += sent;
                carried.written_bytes += written;
                if let Some(failure) = failure {
                    known.failed(stream, failure, *sent);
                }
            }
            _ => {}
        }
    }

    fn status(&self) -> DaemonStatus {
        let open = self.proxy.get().and_then(Weak::upgrade).map(|proxy| proxy.status());
        let open = open.unwrap_or_default();
        let known = self.known.lock();
        let mut carried: Vec<Carried> = known.targets.iter().map(Target::now).collect();
        for stream in open.iter().filter(|stream| is_ours(&stream.name)) {
            let its = carried.iter_mut().find(|one| one.is_of(&stream.name));
            if let Some(its) = its {
                its.read_bytes += stream.read;
                its.sent_bytes += stream.sent;
                its.written_bytes += stream.written;
            }
        }
        let failures = known.failures.iter().map(|(at, failed)| {
            let age_ms = at.elapsed().as_millis() as u64;
            Failed { age_ms, ..failed.clone() }
        });
        DaemonStatus {
            release: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            carried,
            failures: failures.collect(),
        }
    }
}

/// Makes the socket in the directory of all sockets, and starts no thread.
///
/// # Errors
/// Another daemon has the directory, or the system's error.
pub fn bind(directory: &Path) -> Result<BoundServer, Failure> {
    BoundServer::bind(&directory.join(SOCKET)).map_err(|error| match error {
        ServerError::InUse { .. } => {
            let text = format!(
                "another daemon uses {}: end it, or name another `directory`",
                directory.display()
            );
            Failure::new(Code::Busy, text)
        }
        error => Failure::of(Code::Internal, error),
    })
}

/// Whether the stream goes to another host.
fn is_ours(stream: &StreamName) -> bool {
    stream.side == Side::Opener
}

impl Carried {
    fn is_of(&self, stream: &StreamName) -> bool {
        self.peer == stream.peer && self.target == stream.target
    }
}

impl Known {
    /// The target of a stream, which becomes the last one if it is new.
    fn target(&mut self, stream: &StreamName) -> &mut Target {
        let position = self.targets.iter().position(|target| target.ended.is_of(stream));
        let position = position.unwrap_or_else(|| {
            let ended = |target: &Target| target.ended.open == 0;
            if self.targets.iter().filter(|target| ended(target)).count() >= MAX_ENDED
                && let Some(oldest) = self.targets.iter().position(ended)
            {
                self.targets.remove(oldest);
            }
            let (peer, target) = (stream.peer.clone(), stream.target.clone());
            let ended = Carried { peer, target, ..Carried::default() };
            self.targets.push_back(Target { ended, ..Target::default() });
            self.targets.len() - 1
        });
        &mut self.targets[position]
    }

    fn failed(&mut self, stream: &StreamName, failure: &StreamFailure, sent: u64) {
        let kind = match failure {
            StreamFailure::LinkLost { .. } if sent == 0 => FailureKind::Unreachable,
            StreamFailure::LinkLost { .. } => FailureKind::LinkLost,
            StreamFailure::Refused { .. } => FailureKind::Refused,
            _ => FailureKind::Other,
        };
        if self.failures.len() >= MAX_ENDED {
            self.failures.pop_front();
        }
        let (peer, target) = (stream.peer.clone(), stream.target.clone());
        let failed = Failed { peer, target, kind, reason: failure.to_string(), age_ms: 0 };
        self.failures.push_back((Instant::now(), failed));
    }
}

impl Target {
    fn lost(&mut self, stream: u64, reason: &str) {
        self.down.insert(stream);
        self.ended.lost = Some(reason.to_owned());
        self.down_since.get_or_insert_with(Instant::now);
    }

    fn has_link(&mut self, stream: u64) {
        self.down.remove(&stream);
        if self.down.is_empty()
            && let Some(since) = self.down_since.take()
        {
            self.ended.last_link_down_ms = since.elapsed().as_secs_f64() * 1e3;
            self.ended.link_down_ms += self.ended.last_link_down_ms;
            self.ended.lost = None;
        }
    }

    /// The counts with the time without a link until now.
    fn now(&self) -> Carried {
        let mut carried = self.ended.clone();
        if let Some(since) = self.down_since {
            carried.link_down_ms += since.elapsed().as_secs_f64() * 1e3;
        }
        carried
    }
}

/// The server's handler.
struct Served(Arc<Streams>);

impl Handler for Served {
    fn handle(&self, request: Request, _replies: &Replies) -> Result<Answer, ControlError> {
        match request {
            Request::Status => Ok(json!(self.0.status()).into()),
            _ => {
                let text = "this is the socket of `vmferry daemon`, which has no guest of its own";
                Err(ControlError::new(ErrorCode::WrongState, text))
            }
        }
    }
}

/// Asks the daemon that serves this directory of sockets.
///
/// # Errors
/// No daemon runs, or it is of another release and answers something else.
pub fn ask(directory: &Path) -> Result<DaemonStatus, ClientError> {
    let path = directory.join(SOCKET);
    let answer = call(&path, &Request::Status, &mut |_| {})?;
    serde_json::from_value(answer)
        .map_err(|error| ClientError::BadAnswer { path, reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn stream(number: u64, target: &str, side: Side) -> StreamName {
        StreamName { number, peer: "host-b".into(), target: target.into(), side }
    }

    fn ended(stream: StreamName, failure: Option<StreamFailure>, sent: u64) -> ProxyEvent {
        ProxyEvent::Ended { stream, failure, read: 2 * sent, sent, written: 1 }
    }

    #[test]
    fn streams_of_a_target_are_added_up() {
        let streams = Streams::default();
        let (one, two) = (stream(1, "host-b/a", Side::Opener), stream(2, "host-b/a", Side::Opener));
        let of_peer = stream(3, "host-b/a", Side::Acceptor);
        for stream in [&one, &two, &of_peer] {
            streams.hear(&ProxyEvent::Opened { stream: stream.clone() });
        }
        streams.hear(&ProxyEvent::LinkBroken { stream: one.clone(), reason: "x".into() });
        assert_eq!(streams.status().carried[0].lost.as_deref(), Some("x"));
        let after = Duration::from_millis(1);
        streams.hear(&ProxyEvent::LinkMade { stream: one.clone(), after });
        streams.hear(&ended(one, None, 100));
        streams.hear(&ended(two, None, 10));
        streams.hear(&ended(of_peer, None, 1000));
        let carried = streams.status().carried;
        assert_eq!(carried.len(), 1, "{carried:?}");
        let Carried { streams, open, read_bytes, sent_bytes, reconnections, link_down_ms, .. } =
            carried[0];
        assert_eq!((streams, open, read_bytes, sent_bytes), (2, 0, 220, 110));
        assert!(reconnections == 1 && link_down_ms > 0.0 && carried[0].lost.is_none());
    }

    #[test]
    fn failures_tell_an_unreachable_host_from_a_lost_link() {
        let streams = Streams::default();
        let lost = || StreamFailure::LinkLost {
            peer: "host-b".into(),
            waited: Duration::from_secs(30),
            last: "connection refused".into(),
        };
        let refused = StreamFailure::Refused { peer: "host-b".into(), reason: "no rule".into() };
        for (number, failure, sent) in [(1, lost(), 0), (2, lost(), 9), (3, refused, 0)] {
            streams.hear(&ended(stream(number, "libvirt", Side::Opener), Some(failure), sent));
        }
        let failures = streams.status().failures;
        let kinds: Vec<_> = failures.iter().map(|failed| failed.kind).collect();
        assert_eq!(kinds, [FailureKind::Unreachable, FailureKind::LinkLost, FailureKind::Refused]);
        assert!(failures[0].reason.contains("connection refused"), "{failures:?}");
    }

    #[test]
    fn memory_of_targets_and_failures_is_bounded() {
        let streams = Streams::default();
        for number in 0..2 * MAX_ENDED as u64 {
            let stream = stream(number, &format!("host-b/{number}"), Side::Opener);
            streams.hear(&ProxyEvent::Opened { stream: stream.clone() });
            streams.hear(&ended(stream, Some(StreamFailure::Ending), 1));
        }
        let status = streams.status();
        assert_eq!((status.carried.len(), status.failures.len()), (MAX_ENDED, MAX_ENDED));
        assert_eq!(status.carried.last().unwrap().target, format!("host-b/{}", 2 * MAX_ENDED - 1));
    }
}
