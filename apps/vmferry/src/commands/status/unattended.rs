//! Guests that lack pages, and whose processes of vmferry have died.

use std::path::Path;

use serde_json::{Value, json};
use vmferry_handover::journal::{SessionSummary, Side};
use vmferry_qemu::Arrived;

use super::{guest_name, peer};

/// A guest whose missing pages are not served, or not fetched, until a process takes over.
pub struct Unattended<'a> {
    session: &'a SessionSummary,
    /// At the destination, the QEMU that it runs in.
    qemu: Option<Arrived>,
}

impl<'a> Unattended<'a> {
    /// The guest of a session, if it lacks pages and no process leads the session.
    pub fn of(journals: &Path, session: &'a SessionSummary) -> Option<Self> {
        if !session.lacks_pages() || session.led {
            return None;
        }
        let qemu = match session.side {
            Side::Source => None,
            Side::Destination => Arrived::of(journals, session.session).ok().flatten(),
        };
        Some(Self { session, qemu })
    }

    /// The guest's name, if the journal has it.
    pub fn name(&self) -> Option<&str> {
        guest_name(self.session)
    }

    /// The guest as JSON, with the members of a guest's status.
    pub fn to_json(&self) -> Value {
        json!({
            "name": guest_name(self.session),
            "uuid": self.session.guest().map(|guest| guest.uuid),
            "phase": match (self.session.side, &self.qemu) {
                (Side::Source, _) => "moved",
                (Side::Destination, Some(_)) => "running",
                (Side::Destination, None) => "gone",
            },
            "session": self.session.session,
            "side": self.session.side,
            "peer": peer(self.session),
            "pid": self.qemu.as_ref().map(Arrived::pid),
            "qmp": self.qemu.as_ref().map(Arrived::monitor),
        })
    }

    /// What happens to the guest, and what to do.
    pub fn describe(&self) -> String {
        let name = guest_name(self.session).unwrap_or("a guest");
        let peer = peer(self.session).unwrap_or("another host");
        let session = self.session.session;
        match (self.session.side, &self.qemu) {
            (Side::Source, _) => format!(
                "{name} runs at {peer} and may need pages of this host, which no process serves: \
                 the same `vmferry send` as before goes on with session {session}, and `vmferry \
                 resolve {session} --give-up` gives the guest up"
            ),
            (Side::Destination, Some(qemu)) => format!(
                "{name} runs here in QEMU process {} and may need pages of {peer}, which no \
                 process fetches: its threads wait. The same `vmferry receive` as before goes on \
                 with session {session}; if {peer} is lost for good, `vmferry resolve \
                 {session} --give-up` ends the guest",
                qemu.pid()
            ),
            (Side::Destination, None) => format!(
                "{name} has run here while it lacked pages of {peer}, and its VMM has ended or is \
                 not visible: `vmferry resolve {session} --give-up` notes that it needs none any \
                 more"
            ),
        }
    }
}
