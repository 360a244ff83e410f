//! The gate: which calls may pass to the destination's libvirt.

use std::fmt;

use crate::calls::{Call, PrepareCall, PreparedGuests};
use crate::error::RpcError;
use crate::guest::Guest;
use crate::header::{HEADER_BYTES, PacketHeader, PacketKind, PacketStatus};
use crate::keepalive;
use crate::open;
use crate::procedures::{REMOTE_PROGRAM, REMOTE_VERSION, Reading, allowed, procedure};
use crate::refusal::refusal;
use crate::splitter::{Handling, Policy, Splitter};

/// The most guests that are prepared on one connection at a time. libvirt prepares one.
pub const MAX_PREPARED_GUESTS: usize = 16;

/// Decides on a call. An error is the message of the refusal.
pub type Admit = Box<dyn FnMut(&Asking<'_>) -> Result<(), String> + Send>;

/// A call that waits for the caller's consent.
#[derive(Clone, Copy, Debug)]
pub enum Asking<'a> {
    /// A Prepare.
    Prepare(&'a PrepareCall),
    /// A Finish with a cookie, which is not canceled. libvirt defines the persistent guest from the
    /// cookie's `<domain>`, if it has one (`qemuMigrationDstPersist` in
    /// `src/qemu/qemu_migration.c`).
    Finish {
        /// The guest of its Prepare.
        guest: &'a Guest,
        /// The cookie, without the NUL at its end.
        cookie: &'a str,
    },
}

impl Asking<'_> {
    /// The guest that the call is about.
    #[must_use]
    pub fn guest(&self) -> &Guest {
        match self {
            Self::Prepare(call) => &call.guest,
            Self::Finish { guest, .. } => guest,
        }
    }
}

/// What [`CallGate::push`] appends to. The caller takes it out.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// Bytes for libvirt.
    pub bytes: Vec<u8>,
    /// Refused calls, whose replies the client waits for. A reply may be sent only between two
    /// packets of libvirt ([`ReplyWatch::is_between_packets`](crate::ReplyWatch)).
    pub refused: Vec<Refused>,
    /// Answers to the client's pings, whole packets. They are sent to the client as replies to
    /// refused calls are.
    pub pongs: Vec<u8>,
    /// Calls of interest that are in `bytes`, in order. The caller must act on them before it
    /// writes `bytes`.
    pub calls: Vec<Call>,
}

/// A call that does not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The call's header.
    pub header: PacketHeader,
    /// Why, for the log. May contain text of the client.
    pub message: String,
    /// The whole reply packet.
    pub reply: Vec<u8>,
}

/// Reads the calls of a client and lets only those of a migration pass. One per connection.
///
/// - Calls of [`ALLOWED_PROCEDURES`](crate::ALLOWED_PROCEDURES) that are not read pass as they
///   arrive, after their header.
/// - Open, Prepare and Finish are collected and pass whole: an Open of
///   [`OPEN_URI`](crate::OPEN_URI), a Prepare that the caller admits, a Finish after its Prepare.
/// - Keep-alive messages are dropped, and pings are answered.
/// - Every other call is dropped, and answered with libvirt's error reply. The reply is complete
///   when the call has been read to its end, because a client that gets a reply stops sending.
/// - Every other packet ends the connection.
pub struct CallGate {
    splitter: Splitter,
    decisions: Decisions,
}

struct Decisions {
    admit: Admit,
    prepared: PreparedGuests,
    /// Why the current packet is refused.
    refused: Option<String>,
}

impl fmt::Debug for CallGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallGate")
            .field("splitter", &self.splitter)
            .field("prepared", &self.decisions.prepared)
            .finish_non_exhaustive()
    }
}

impl CallGate {
    /// A gate at the beginning of a connection. `admit` is asked as [`Asking`] says.
    #[must_use]
    pub fn new(admit: Admit) -> Self {
        let prepared = PreparedGuests::default();
        Self { splitter: Splitter::new(), decisions: Decisions { admit, prepared, refused: None } }
    }

    /// Takes the next bytes of the client, in pieces of any size, and appends the results.
    ///
    /// # Errors
    /// The connection must end: the bytes are not libvirt's RPC, or a packet can neither pass nor
    /// be answered. What was appended before is valid. Later calls return the same error.
    pub fn push(&mut self, bytes: &[u8], out: &mut Passed) -> Result<(), RpcError> {
        self.splitter.push(bytes, &mut Gating { decisions: &mut self.decisions, out })
    }

    /// Whether [`Passed::bytes`] so far are whole packets, so that an answer to a ping of libvirt
    /// ([`Heard::pongs`](crate::Heard)) may follow them.
    #[must_use]
    pub fn is_between_packets(&self) -> bool {
        self.splitter.is_between_packets()
    }
}

struct Gating<'a> {
    decisions: &'a mut Decisions,
    out: &'a mut Passed,
}

impl Policy for Gating<'_> {
    fn begin(&mut self, header: &PacketHeader) -> Result<Handling, RpcError> {
        match header.kind {
            PacketKind::Call => {
                let handling = on_call(header);
                Ok(handling.unwrap_or_else(|message| {
                    self.decisions.refused = Some(message);
                    Handling::Skip
                }))
            }
            _ if keepalive::is_keepalive(header) => {
                keepalive::answer(header, &mut self.out.pongs)?;
                Ok(Handling::Skip)
            }
            kind => {
                let PacketHeader { program, procedure, .. } = *header;
                Err(RpcError::Unanswerable { kind, program, procedure })
            }
        }
    }

    fn stream(&mut self, bytes: &[u8]) {
        self.out.bytes.extend_from_slice(bytes);
    }

    fn end(&mut self, header: &PacketHeader, packet: Vec<u8>) {
        if let Some(payload) = packet.get(HEADER_BYTES..) {
            match self.decisions.decide(header, payload) {
                Ok(call) => {
                    self.out.bytes.extend_from_slice(&packet);
                    self.out.calls.extend(call);
                }
                Err(message) => self.decisions.refused = Some(message),
            }
        }
        if let Some(message) = self.decisions.refused.take() {
            let reply = refusal(header, &message);
            self.out.refused.push(Refused { header: *header, message, reply });
        }
    }
}

/// What happens to a call, or why it is refused.
fn on_call(header: &PacketHeader) -> Result<Handling, String> {
    let &PacketHeader { program, version, procedure, status, .. } = header;
    if status != PacketStatus::Ok {
        return Err(format!("the call has the status {status:?}"));
    }
    let row = if (program, version) == (REMOTE_PROGRAM, REMOTE_VERSION) {
        allowed(procedure)
    } else {
        None
    };
    let Some(row) = row else {
        return Err(format!(
            "procedure {procedure} of libvirt's program {program:#x} version {version} is not one of \
             a peer-to-peer migration"
        ));
    };
    let bytes = header.payload_bytes();
    if bytes > row.max_bytes {
        return Err(RpcError::TooLarge { call: row.name, bytes, limit: row.max_bytes }.to_string());
    }
    Ok(match row.reading {
        Reading::Header => Handling::Stream,
        Reading::Whole => Handling::Collect,
    })
}

impl Decisions {
    /// Decides on a call that has been collected. An error is the message of its refusal.
    fn decide(&mut self, header: &PacketHeader, payload: &[u8]) -> Result<Option<Call>, String> {
        let serial = header.serial;
        match header.procedure {
            procedure::OPEN => open::check(payload).map(|()| None).map_err(refused("Open")),
            procedure::PREPARE3_PARAMS => {
                let call = PrepareCall::read(serial, payload).map_err(refused("Prepare"))?;
                if self.prepared.len() >= MAX_PREPARED_GUESTS {
                    return Err(refused("Prepare")(RpcError::TooManyPrepared));
                }
                (self.admit)(&Asking::Prepare(&call))?;
                self.prepared.add(&call);
                Ok(Some(Call::Prepare(Box::new(call))))
            }
            _ => {
                let finish = self.prepared.finish(serial, payload);
                let (call, cookie) = finish.map_err(refused("Finish"))?;
                // One that is canceled removes the guest.
                if let Some(cookie) = cookie.filter(|_| !call.cancelled) {
                    (self.admit)(&Asking::Finish { guest: &call.guest, cookie })?;
                }
                Ok(Some(Call::Finish(call)))
            }
        }
    }
}

fn refused(call: &'static str) -> impl Fn(RpcError) -> String {
    move |error| format!("the migration's {call}: {error}")
}

#[cfg(test)]
mod tests;
