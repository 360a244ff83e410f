//! Guests of QEMU that other hosts send here, each to a receiver of its own.
//!
//! ```text
//!  source                              daemon                            receiver
//!    Opening: receive GUEST by TEMPLATE  ->   policy; Receivers::start  ->  starts
//!         <-  Answer: receiving; or not, and why
//!    connections, each with the session   ->   read its ticket, pass the socket  ->
//!    as its ticket (plain text)
//!    TLS and the engine's protocol               <->                          accepts
//! ```
//! The daemon ends neither TLS nor the migration's protocol, so that a receiver outlives it, and
//! the next daemon passes sockets to the same receivers.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use vmferry::MigrateError;
use vmferry::destination::answer_without_receiver;
use vmferry_handover::{GuestIdentity, SessionId};
use vmferry_transport::{
    ChannelReader, ChannelWriter, Dialer, PeerIdentity, Pending, Ticket, TransportError,
    pass_socket,
};
use vmferry_wire::{HELLO_BYTES, Hello, Reason, ReasonCode, Token};

use crate::config::is_plain_name;
use crate::event::ProxyEvent;
use crate::proxy::Shared;
use crate::records::{Answer, RecordError, Target, ask};

/// How long a source waits for its receiver: QEMU may have to populate its memory first.
const START_TIMEOUT: Duration = Duration::from_secs(150);

/// The first byte of a receiver's answer to a greeting, which is no daemon's.
const GREETING_BYTE: u8 = b'V';

/// What a source asks a daemon for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// The name of the template in the daemon's configuration.
    pub template: String,
    /// The guest.
    pub guest: GuestIdentity,
    /// The session, whose number is the ticket of its connections.
    pub session: SessionId,
}

/// Starts receivers.
pub trait Receivers: fmt::Debug + Send + Sync {
    /// Starts a receiver for a guest that the policy allows, and returns when it waits for its
    /// source. It listens at [`socket`](Self::socket) for the sockets of the session.
    ///
    /// # Errors
    /// Why there is none, for the people on both hosts.
    fn start(&self, request: &ReceiveRequest, source: &PeerIdentity) -> Result<(), Reason>;

    /// The socket at which the receiver of a session listens, if there is one.
    fn socket(&self, session: SessionId) -> PathBuf;
}

/// Asks the daemon that `dialer` reaches to receive a guest by a template. After that, connections
/// with the session's number as their [ticket](Dialer::ticket) reach the receiver.
///
/// # Errors
/// [`MigrateError::Refused`], or the link's error.
pub fn ask_to_receive(dialer: &Dialer, request: &ReceiveRequest) -> Result<(), MigrateError> {
    let refused = |code, text: &str| {
        let reason = Reason::new(code, text);
        MigrateError::Refused { peer: "destination", reason }
    };
    if !is_plain_name(&request.template) {
        return Err(refused(ReasonCode::Incompatible, "no template can have this name"));
    }
    check_guest_name(&request.guest).map_err(|text| refused(ReasonCode::Incompatible, &text))?;
    let mut dialer = dialer.clone();
    dialer.ticket = None;
    let address = dialer.address.to_string();
    let lost = |error| MigrateError::from(TransportError::from_io(error, &address));
    let (mut reader, mut writer) = dialer.connect()?.split();
    writer.set_timeout(Some(dialer.connect_timeout))?;
    reader.set_timeout(Some(START_TIMEOUT))?;
    let target = Target::Receive(request.clone());
    ask(&mut writer, Token(request.session.0), target).map_err(lost)?;
    match Answer::read(&mut reader) {
        Ok(Answer::Receiving) => Ok(()),
        Ok(Answer::NotReceiving(reason)) => {
            Err(MigrateError::Refused { peer: "destination", reason })
        }
        Ok(Answer::Refused { reason }) => Err(refused(ReasonCode::Unauthorized, &reason)),
        Err(RecordError::Unknown { value: GREETING_BYTE, .. }) => Err(refused(
            ReasonCode::Incompatible,
            "a receiver for one guest listens there, and not a daemon: send the guest without a \
             template, or to the daemon's port",
        )),
        Err(RecordError::Io(error)) => Err(lost(error)),
        Ok(answer @ (Answer::Opened { .. } | Answer::Word(_) | Answer::Judged)) => {
            Err(refused(ReasonCode::Protocol, &format!("it answers another question: {answer:?}")))
        }
        Err(error) => Err(refused(ReasonCode::Protocol, &vmferry::chain(&error))),
    }
}

/// Commands of templates use the guest's name in paths and in QEMU's options.
fn check_guest_name(guest: &GuestIdentity) -> Result<(), String> {
    if is_plain_name(&guest.name) {
        return Ok(());
    }
    Err(format!(
        "a guest with the name {:?} can't be received by a template: give it one of up to \
         64 letters, digits, `-`, `_` and `.` that does not begin with a dot",
        guest.name
    ))
}

/// Starts a receiver if the policy allows it, and answers the source.
pub(crate) fn answer(
    shared: &Shared,
    peer: &PeerIdentity,
    request: &ReceiveRequest,
    mut writer: ChannelWriter,
) {
    let answer = match start(shared, peer, request) {
        Ok(()) => {
            shared.tell(ProxyEvent::Receiving {
                guest: request.guest.name.clone(),
                uuid: request.guest.uuid.to_string(),
                template: request.template.clone(),
                peer: peer.name().unwrap_or_else(|| peer.address.clone()),
                session: request.session.to_string(),
            });
            Answer::Receiving
        }
        Err(reason) => {
            let wanted = format!("have {} received by {}", request.guest.name, request.template);
            refuse(shared, peer.to_string(), &wanted, reason.text.clone());
            Answer::NotReceiving(reason)
        }
    };
    // A source that has gone does not connect, and the receiver ends.
    let _ = answer.write(&mut writer);
    let _ = writer.finish();
}

fn start(shared: &Shared, peer: &PeerIdentity, request: &ReceiveRequest) -> Result<(), Reason> {
    let config = shared.config();
    if let Some(policy) = &config.policy {
        let allowed =
            policy.check_source(peer).and_then(|()| policy.check_guest(peer, &request.guest));
        allowed.map_err(|text| Reason::new(ReasonCode::Unauthorized, &text))?;
    }
    let incompatible = |text: &str| Reason::new(ReasonCode::Incompatible, text);
    check_guest_name(&request.guest).map_err(|text| incompatible(&text))?;
    let unknown = || incompatible("the daemon there has no templates");
    config.receivers.as_ref().ok_or_else(unknown)?.start(request, peer)
}

/// Passes a connection that begins with a ticket to its receiver. Gives back other connections.
pub(crate) fn unless_ticket(shared: &Shared, pending: Pending) -> Option<Pending> {
    let address = pending.peer_address();
    let timeout = shared.config().timings.connect;
    let session = match pending.ticket(timeout) {
        Ok(None) => return Some(pending),
        Ok(Some(Ticket(number))) => SessionId(number),
        Err(error) => {
            refuse(shared, address, "connect", vmferry::chain(&error));
            return None;
        }
    };
    let wanted = format!("connect to the receiver of session {session}");
    match pass(shared, session, &pending) {
        Ok(()) => {}
        Err(error) if is_absent(&error) => {
            if let Err(error) = answer_absent(shared, pending, timeout) {
                refuse(shared, address, &wanted, vmferry::chain(&error));
            }
        }
        // The source dials again.
        Err(error) => refuse(shared, address, &wanted, error.to_string()),
    }
    None
}

fn pass(shared: &Shared, session: SessionId, pending: &Pending) -> io::Result<()> {
    let config = shared.config();
    let receivers = config.receivers.as_ref().ok_or(io::ErrorKind::NotFound)?;
    pass_socket(&receivers.socket(session), pending, config.timings.connect)
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Answers in place of a receiver that has ended.
fn answer_absent(shared: &Shared, pending: Pending, timeout: Duration) -> Result<(), MigrateError> {
    let channel = pending.handshake(timeout)?;
    let peer = channel.peer().clone();
    let (mut reader, writer) = channel.split();
    let lost = |error| MigrateError::from(TransportError::from_io(error, &peer.address));
    reader.set_timeout(Some(timeout))?;
    let mut bytes = [0; HELLO_BYTES];
    io::Read::read_exact(&mut reader, &mut bytes).map_err(lost)?;
    let hello = Hello::parse(&bytes).map_err(|error| MigrateError::Refused {
        peer: "destination",
        reason: Reason::new(ReasonCode::Protocol, &error.to_string()),
    })?;
    answer_query(shared, &hello, (reader, writer), &peer)
}

/// Answers a source in doubt, and any other channel of a session that has no receiver here.
pub(crate) fn answer_query(
    shared: &Shared,
    hello: &Hello,
    halves: (ChannelReader, ChannelWriter),
    peer: &PeerIdentity,
) -> Result<(), MigrateError> {
    let config = shared.config();
    answer_without_receiver(hello, halves, peer, &config.journals, config.timings.connect)
}

fn refuse(shared: &Shared, peer: String, wanted: &str, reason: String) {
    shared.tell(ProxyEvent::Refused { peer, wanted: wanted.to_owned(), reason });
}
