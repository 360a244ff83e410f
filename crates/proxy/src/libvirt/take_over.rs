//! What an earlier daemon has left: connections of libvirt that the keeper holds, and sessions
//! whose word is not known.
//!
//! The keeper answers nothing while a daemon is connected to it, so this daemon answers on every
//! connection from the first moment on. libvirt resumes its guest 30 s after the last answer, and
//! the guest may run at the destination.

use std::collections::HashSet;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmferry_handover::journal::{SessionRecords, Side, record_files};
use vmferry_handover::{FinishEntry, SessionId, SourceFinish};
use vmferry_libvirt_rpc::{FinishCall, Guest, MigrateFlags};

use super::ledger::LeftDeparture;
use super::settle::{ASK_PERIOD, Heard, Unanswered, attend, attend_during, in_a_thread};
use crate::error::ProxyError;
use crate::event::ProxyEvent;
use crate::keeper::HeldConnection;
use crate::proxy::Shared;

/// The pause after the first failed attempt, and the longest. A guest is paused meanwhile.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A session that an earlier daemon has led.
struct Left {
    session: SessionId,
    /// The number of libvirt's call.
    serial: u32,
    /// The connection of the source's libvirt; `None` if it has ended.
    socket: Option<UnixStream>,
    is_open: bool,
    heard: Heard,
}

/// Takes over what an earlier daemon has left: the connections that the keeper holds, and sessions
/// without one whose word is not known.
///
/// # Errors
/// The keeper does not give its connections. Once this daemon has ended, it answers libvirt again.
pub(crate) fn take_over(shared: &Arc<Shared>) -> Result<(), ProxyError> {
    let failed = |source| {
        let action = "take over the connections of the keeper";
        ProxyError::System { action, source }
    };
    let held = shared.keeper.as_ref().map(|keeper| keeper.take()).transpose().map_err(failed)?;
    let mut taken = HashSet::new();
    for HeldConnection { session, serial, socket } in held.unwrap_or_default() {
        taken.insert(session);
        Left::new(session, serial, Some(socket)).start(shared);
    }
    let journals = &shared.config().journals;
    // Those that can't be read are reported by `vmferry status --sessions`.
    let left = record_files::<FinishEntry>(journals, Side::Source).unwrap_or_default();
    for SessionRecords { session, records, led } in left {
        let records = records.unwrap_or_default().into_iter().map(|entry| entry.record);
        let state = SourceFinish::recover(&records.collect::<Vec<_>>());
        if state == Ok(Some(SourceFinish::Sent)) && !led && !taken.contains(&session) {
            Left::new(session, 0, None).start(shared);
        }
    }
    Ok(())
}

impl Left {
    fn new(session: SessionId, serial: u32, socket: Option<UnixStream>) -> Self {
        let is_open = socket.is_some();
        Self { session, serial, socket, is_open, heard: Heard::default() }
    }

    /// Takes it over in a thread of its own.
    fn start(self, shared: &Arc<Shared>) {
        let shared = Arc::downgrade(shared);
        in_a_thread("take-over", (self, shared), |(this, shared)| this.run(&shared));
    }

    /// Opens the session's journal, as often as it takes, and settles the session then. When the
    /// daemon ends, the keeper has the connection.
    fn run(mut self, shared: &Weak<Shared>) {
        let mut pause = FIRST_PAUSE;
        while let Some(shared) = shared.upgrade().filter(|shared| !shared.is_ending()) {
            let (journals, session) = (shared.config().journals.clone(), self.session);
            let open = move || Some(LeftDeparture::open(&journals, session));
            let Self { socket, is_open, heard, .. } = &mut self;
            let reason = match attend_during(socket, is_open, heard, open) {
                Some(Ok(left)) => return self.settle(&shared, left),
                Some(Err(error)) => vmferry::chain(&error),
                None => "the system can't create a thread".into(),
            };
            let session = self.session.to_string();
            shared.tell(ProxyEvent::NotTakenOver { session, reason, again_in: pause });
            drop(shared);
            self.wait(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn settle(self, shared: &Arc<Shared>, left: LeftDeparture) {
        let LeftDeparture { ledger, guest, peer } = left;
        let Self { session, serial, socket, heard, .. } = self;
        let guest = Guest { name: guest.name, uuid: guest.uuid };
        let call = FinishCall { serial, guest, cancelled: false, flags: MigrateFlags(0) };
        let ledger = Arc::new(Mutex::new(ledger));
        Unanswered { session, ledger, call, peer, socket, heard }.settle(shared);
    }

    /// Answers libvirt for this long.
    fn wait(&mut self, period: Duration) {
        let deadline = Instant::now() + period;
        loop {
            let slice = deadline.saturating_duration_since(Instant::now()).min(ASK_PERIOD);
            if slice.is_zero() {
                return;
            }
            match self.socket.as_mut().filter(|_| self.is_open) {
                Some(socket) => self.is_open = attend(socket, &mut self.heard, slice),
                // Without a connection nothing can happen before the next attempt.
                None => std::thread::sleep(slice),
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
