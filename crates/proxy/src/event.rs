//! What happens in a proxy, for logs and for the status.

use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::stream::StreamFailure;

/// Which side of a stream this host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// A local program connected, and the stream goes to the peer.
    Opener,
    /// The peer opened the stream, which goes to a local program.
    Acceptor,
}

/// A stream, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StreamName {
    /// Counts the streams of this daemon, from 1.
    pub number: u64,
    /// The other host.
    pub peer: String,
    /// Where the stream comes out: `libvirt`, a socket, or a rule.
    pub target: String,
    /// Which side this host is.
    pub side: Side,
}

impl fmt::Display for StreamName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.side {
            Side::Opener => "to",
            Side::Acceptor => "from",
        };
        write!(f, "stream {} {way} {} ({})", self.number, self.peer, self.target)
    }
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum ProxyEvent {
    /// A stream has begun.
    Opened {
        /// The stream.
        stream: StreamName,
    },
    /// A stream has ended.
    Ended {
        /// The stream.
        stream: StreamName,
        /// Why, if it failed.
        #[serde(serialize_with = "as_text")]
        failure: Option<StreamFailure>,
        /// Bytes read from the local program, and sent on links.
        read: u64,
        /// See `read`.
        sent: u64,
        /// Bytes written to the local program.
        written: u64,
    },
    /// A link broke. The stream waits for the next one.
    LinkBroken {
        /// The stream.
        stream: StreamName,
        /// Why.
        reason: String,
    },
    /// The stream has a link again.
    LinkMade {
        /// The stream.
        stream: StreamName,
        /// For how long there was none.
        #[serde(rename = "after_ms", serialize_with = "as_millis")]
        after: Duration,
    },
    /// A peer or a local program was refused.
    Refused {
        /// Who.
        peer: String,
        /// What it wanted.
        wanted: String,
        /// Why not.
        reason: String,
    },
    /// More refusals of a peer followed in quick succession, of which no event told.
    Untold {
        /// Who.
        peer: String,
        /// Their number.
        count: u64,
    },
    /// A receiver waits for a guest that a source sends by a template.
    Receiving {
        /// The guest's name.
        guest: String,
        /// Its UUID.
        uuid: String,
        /// The template.
        template: String,
        /// The source.
        peer: String,
        /// The session.
        session: String,
    },
    /// A guest is announced: libvirt's Prepare has passed.
    Prepared {
        /// The guest's name.
        guest: String,
        /// Its UUID.
        uuid: String,
        /// The other host.
        peer: String,
        /// Which side this host is.
        side: Side,
    },
    /// libvirt's Finish is about to pass: the destination's libvirt runs the guest, or fails.
    Finishing {
        /// The guest's name.
        guest: String,
        /// The other host.
        peer: String,
        /// Which side this host is.
        side: Side,
    },
    /// The destination's libvirt may run the guest, and its answer is lost. libvirt of this host
    /// waits, with its guest paused, until the other host's daemon has the word.
    InDoubt {
        /// The session.
        session: String,
        /// The guest's name.
        guest: String,
        /// The other host.
        peer: String,
    },
    /// The link is lost, and libvirt of this host has not answered Finish. Its connection is kept
    /// until it does.
    Awaiting {
        /// The session.
        session: String,
        /// The guest's name.
        guest: String,
    },
    /// The word about a Finish can't be written to the journal. It is tried again at intervals.
    Unjournaled {
        /// The session.
        session: String,
        /// The guest's name.
        guest: String,
        /// Why.
        reason: String,
    },
    /// A session of an earlier daemon can't be led yet. libvirt's connection stays open, and its
    /// guest paused, until another attempt succeeds.
    NotTakenOver {
        /// The session.
        session: String,
        /// Why.
        reason: String,
        /// The time until the next attempt.
        #[serde(rename = "again_in_ms", serialize_with = "as_millis")]
        again_in: Duration,
    },
    /// The process that keeps connections had ended, and was started again.
    KeeperRestarted {
        /// The connections that it was given.
        connections: usize,
    },
    /// The process that keeps connections has ended, and can't be started. It is tried again once
    /// a second.
    KeeperFailed {
        /// Why.
        reason: String,
    },
    /// The destination's libvirt has answered Finish.
    Finished {
        /// The guest's name.
        guest: String,
        /// The other host.
        peer: String,
        /// Which side this host is.
        side: Side,
        /// libvirt's error, if the guest does not run at the destination.
        error: Option<String>,
    },
}

impl fmt::Display for ProxyEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Opened { stream } => write!(f, "{stream} has begun"),
            Self::Ended { stream, failure: None, read, sent, written } => {
                write!(f, "{stream} has ended: read {read} bytes, sent {sent}, wrote {written}")
            }
            Self::Ended { stream, failure: Some(failure), .. } => {
                write!(f, "{stream} failed: {failure}")
            }
            Self::LinkBroken { stream, reason } => {
                write!(f, "{stream} has lost its link: {reason}")
            }
            Self::LinkMade { stream, after } => {
                write!(f, "{stream} has a link again, after {:.1} s", after.as_secs_f64())
            }
            Self::Refused { peer, wanted, reason } => {
                write!(f, "{peer} may not {wanted}: {reason}")
            }
            Self::Untold { peer, count } => {
                write!(f, "{peer} was refused {count} more times")
            }
            Self::Receiving { guest, uuid, template, peer, session } => write!(
                f,
                "a receiver of template {template} waits for guest {guest} ({uuid}) from {peer} \
                 (session {session})"
            ),
            Self::Prepared { guest, uuid, peer, side: Side::Opener } => {
                write!(f, "guest {guest} ({uuid}) is moving to {peer}")
            }
            Self::Prepared { guest, uuid, peer, side: Side::Acceptor } => {
                write!(f, "guest {guest} ({uuid}) is arriving from {peer}")
            }
            Self::Finishing { guest, peer, side: Side::Opener } => {
                write!(f, "guest {guest} is handed over to {peer}")
            }
            Self::Finishing { guest, peer, side: Side::Acceptor } => {
                write!(f, "guest {guest} is handed over by {peer}")
            }
            Self::InDoubt { session, guest, peer } => write!(
                f,
                "guest {guest} may run at {peer}, whose answer is lost: it stays paused here until \
                 {peer} answers (session {session})"
            ),
            Self::Awaiting { session, guest } => write!(
                f,
                "the link is lost before libvirt has answered whether guest {guest} runs here: its \
                 answer is awaited (session {session})"
            ),
            Self::Unjournaled { session, guest, reason } => write!(
                f,
                "the word about guest {guest} can't be written, and is tried again (session \
                 {session}): {reason}"
            ),
            Self::NotTakenOver { session, reason, again_in } => write!(
                f,
                "session {session} of an earlier daemon can't be taken over: {reason}. Its guest \
                 stays paused here, and libvirt's connection open; the next attempt is in {:.1} s",
                again_in.as_secs_f64()
            ),
            Self::KeeperRestarted { connections } => write!(
                f,
                "the process that keeps connections was started again, with {connections} of them"
            ),
            Self::KeeperFailed { reason } => {
                write!(f, "the process that keeps connections can't be started: {reason}")
            }
            Self::Finished { guest, peer, side: Side::Opener, error: None } => {
                write!(f, "guest {guest} runs at {peer}")
            }
            Self::Finished { guest, peer, side: Side::Acceptor, error: None } => {
                write!(f, "guest {guest} from {peer} runs here")
            }
            Self::Finished { guest, peer, error: Some(error), .. } => {
                write!(f, "guest {guest} was not moved ({peer}): {error}")
            }
        }
    }
}

/// Hears of events. Called from any thread; must not block.
pub type Observer = dyn Fn(ProxyEvent) + Send + Sync;

fn as_text<S: Serializer>(
    failure: &Option<StreamFailure>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    failure.as_ref().map(ToString::to_string).serialize(serializer)
}

fn as_millis<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64() * 1e3)
}
