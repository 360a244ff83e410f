//! Finishes the sessions of a sender that was killed together with its guardian.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use vmferry::SourceConfig;
use vmferry::source::{Orders, Recovered, Report, recover};
use vmferry_control::{Directories, Server};
use vmferry_handover::journal::{self, LaterSession, Record, SessionSummary};
use vmferry_qemu::{AbandonedQemu, QemuError, process_name};
use vmferry_transport::{Dialer, Ticket};
use vmferry_wire::{GuestIdentity, SessionId};

use super::guard::{note_interrupted_post_copy, unread};
use super::kept::{has_ended, report_kept, report_not_ended};
use super::service::QemuService;
use crate::commands::fleet::witness::of_session;
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::progress::{JsonEvents, Progress};

/// The sessions of the QEMU at a QMP socket, and the way to their destination.
pub struct Settling<'a> {
    /// The QMP socket.
    pub qmp: &'a Path,
    /// Where the journals are, and how pages are sent.
    pub config: &'a SourceConfig,
    /// Reaches the destination.
    pub dialer: &'a Dialer,
    /// Whether a session's number is the ticket of its channels.
    pub by_ticket: bool,
    /// The socket of the sessions' witness.
    pub witness: Option<&'a Path>,
}

impl Settling<'_> {
    /// Finishes all sessions. Blocks while a guest that has moved still fetches its pages. Returns
    /// the session by which the guest of this QEMU has moved, if it has; then QEMU was quit,
    /// unless `keep_source` is set.
    pub fn settle(
        &self,
        directory: &Directories,
        keep_source: bool,
        output: &Output,
    ) -> Result<Option<SessionId>, Failure> {
        let abandoned = AbandonedQemu::new(self.qmp, None);
        let identity = abandoned.identity()?;
        let pid = abandoned.pid()?;
        let process = pid.and_then(process_name);
        let name = super::socket_name(&identity, pid);
        let mut settled = HashSet::new();
        // A session that a later one has superseded is settled after it: the latest decision
        // counts.
        while let Some(unfinished) = self.next(&identity, process.as_deref(), &settled)? {
            let session = unfinished.session;
            settled.insert(session);
            // A guest that runs after COMMIT must be another one: vmferry never leaves it running.
            let is_given = unfinished.records.iter().any(Record::is_commit);
            let is_its = process.is_some() && unfinished.process() == process.as_deref();
            if is_given && !is_its && abandoned.is_running()? {
                return Err(unclear(session));
            }
            let finishing = json!({ "event": "finishing-session", "session": session });
            output.event(&finishing, || format!("finishing session {session} of a killed vmferry"));
            match self.recover(session, (&name, &identity), directory, output)? {
                Recovered::Kept(_) => {}
                Recovered::Given(qemu) if is_its => {
                    if !keep_source {
                        match qemu.leave() {
                            Ok(release) => report_kept(&release, output),
                            Err(error) => report_not_ended(&error, output),
                        }
                    }
                    return Ok(Some(session));
                }
                Recovered::Lost(qemu, error) if is_its => {
                    if !keep_source
                        && !has_ended(&error)
                        && let Err(error) = qemu.leave()
                    {
                        report_not_ended(&error, output);
                    }
                    return Err(error.into());
                }
                Recovered::Given(_) | Recovered::Lost(..) => {
                    let text = "this guest was already handed over and runs at the destination: \
                                quit this QEMU";
                    return Err(Failure::new(Code::WrongState, text));
                }
                Recovered::Unread(_, error) => return Err(unread(&error)),
                Recovered::Stuck(_, error) => {
                    let text = format!("the guest is paused and could not be resumed: {error}");
                    return Err(Failure::new(Code::Internal, text));
                }
            }
        }
        Ok(None)
    }

    /// Finishes one session of the guest, whose control socket has this name.
    fn recover(
        &self,
        session: SessionId,
        (name, identity): (&str, &GuestIdentity),
        directory: &Directories,
        output: &Output,
    ) -> Result<Recovered<AbandonedQemu>, Failure> {
        let mut config = self.config.clone();
        config.session = session;
        config.witness = of_session(self.witness, &config.journal_directory, session);
        let orders = Orders::new();
        let about =
            json!({ "name": name, "uuid": identity.uuid, "guest": "qemu", "phase": "stopped" });
        let service =
            Arc::new(QemuService { about, orders: orders.clone(), throttle: 0, gate: None });
        // For `vmferry resolve`, because recovery waits while the session is in doubt.
        let _server = Server::bind(&directory.socket(name), service)
            .map_err(|error| Failure::of(Code::Busy, error))?;
        let mut dialer = self.dialer.clone();
        // The session's receiver may still be there.
        dialer.ticket = self.by_ticket.then_some(Ticket(session.0));
        let qemu = AbandonedQemu::new(self.qmp, None);
        let journals = self.config.journal_directory.as_path();
        note_interrupted_post_copy(&qemu, (journals, session), output);
        let to = self.dialer.address.to_string();
        let progress = Progress::new(output, JsonEvents::All, None).of(&identity.name, &to);
        let recovered = progress.during(&orders, || {
            let mut watch = |report: &Report| progress.event(&json!(report));
            recover(qemu, &dialer, config, &orders, &mut watch)
                .map_err(|(_, error)| Failure::of(Code::Busy, error))
        });
        progress.finish(recovered.as_ref().map(|_| &Value::Null));
        recovered
    }

    /// A session of the guest that is unfinished and that no later one has superseded.
    fn next(
        &self,
        guest: &GuestIdentity,
        process: Option<&str>,
        settled: &HashSet<SessionId>,
    ) -> Result<Option<SessionSummary>, Failure> {
        let sessions = journal::sessions_in(&self.config.journal_directory, guest, process)
            .map_err(|error| Failure::of(Code::Internal, error))?;
        for one in journal::unfinished(&sessions, guest) {
            match journal::later_session(&sessions, one.session) {
                _ if settled.contains(&one.session) => {}
                LaterSession::None => return Ok(Some(one.clone())),
                LaterSession::SentAgain(_) => {}
                LaterSession::Unclear(session) => {
                    let error = QemuError::MayBeGiven { session };
                    return Err(Failure::of(Code::WrongState, error));
                }
            }
        }
        Ok(None)
    }
}

/// The failure if a guest runs in this QEMU that a session may have given away.
fn unclear(session: SessionId) -> Failure {
    let text = format!(
        "session {session} gave away a guest with this name and UUID, a guest runs in this QEMU, \
         and the session's journal does not say whether it is the same guest. Look at the other \
         host. If this is another guest, decide session {session} with `vmferry resolve`, and \
         give each guest its own UUID; if it is the same guest and the other host runs it too, \
         end one of the two"
    );
    Failure::new(Code::WrongState, text)
}
