//! Sending guests of this host.

use std::path::PathBuf;
use std::process::Command;

use serde_json::json;
use vmferry_control::{Request, call};
use vmferry_fleet::{Fleet, FleetError, GuestVmm, Migration, MigrationPhase};
use vmferry_handover::SessionId;
use vmferry_handover::journal::{self, JournalError, Side, Verdict};
use vmferry_wire::GuestIdentity;

use super::sender::{End, Said, Sender};
use super::{Mover, Tell};
use crate::commands::daemon::config::Configuration;
use crate::commands::fleet::witness::witness_socket;
use crate::exit::Failure;

impl Mover {
    /// Starts the process that sends an admitted guest, unless it was started before.
    pub(super) fn send(
        &mut self,
        fleet: &Fleet,
        migration: &Migration,
        address: &str,
        tell: Tell<'_>,
    ) -> Result<(), FleetError> {
        if self.sender(migration).is_none() {
            if migration.cancel {
                return Self::set(fleet, migration, MigrationPhase::Cancelled).map(drop);
            }
            if self.guests.lock().is_none() {
                // The guests of this host are not known yet.
                return Ok(());
            }
            let command = || self.command(fleet, migration, address);
            match Sender::begin(&self.moves(), migration.id, command, self.daemon.waker()) {
                Ok(sender) => drop(self.senders.insert(migration.id, sender)),
                Err(failure) => return self.fail(fleet, migration, failure.to_string(), tell),
            }
        }
        self.watch(fleet, migration, tell)
    }

    /// Looks how far the process is that sends a guest.
    pub(super) fn watch(
        &mut self,
        fleet: &Fleet,
        migration: &Migration,
        tell: Tell<'_>,
    ) -> Result<(), FleetError> {
        let address = match &migration.phase {
            MigrationPhase::Admitted { address } | MigrationPhase::Sending { address, .. } => {
                address.clone()
            }
            _ => return Ok(()),
        };
        let (mut ended, mut said) = (true, Said::default());
        let socket = self.directories.socket(&migration.guest.name);
        // Without its file it was killed, for all that is known.
        if let Some(sender) = self.sender(migration) {
            ended = match sender.listen() {
                Ok(ended) => ended,
                Err(error) => return self.fail(fleet, migration, error.to_string(), tell),
            };
            if migration.cancel && !ended && !sender.cancelled {
                // Until it serves its control socket, it is asked again.
                sender.cancelled = call(&socket, &Request::Cancel, &mut |_| {}).is_ok();
            }
            said = sender.said.clone();
        }
        if !ended {
            let (session, progress) = (said.session, said.progress);
            let now = MigrationPhase::Sending { address, session, progress };
            return match is_news(&migration.phase, &now) {
                true => Self::set(fleet, migration, now).map(drop),
                false => Ok(()),
            };
        }
        let session = said.session.or(match &migration.phase {
            MigrationPhase::Sending { session, .. } => *session,
            _ => None,
        });
        let is_doubt = |end: &End| matches!(end, End::Failed { code, .. } if code == "in-doubt");
        match said.end.filter(|end| !is_doubt(end)) {
            Some(End::Moved { downtime_ms, carried }) => {
                let done = MigrationPhase::Done { session, downtime_ms, carried };
                self.finish(fleet, migration, done, tell)
            }
            Some(End::Failed { code, .. }) if code == "cancelled" => {
                self.finish(fleet, migration, MigrationPhase::Cancelled, tell)
            }
            Some(End::Failed { message, .. }) => self.fail(fleet, migration, message, tell),
            // It was killed or told to end in doubt, and its guardian goes on.
            None => match self.verdict(&migration.guest, session) {
                Ok(Verdict::There) => {
                    let done = MigrationPhase::Done { session, downtime_ms: None, carried: None };
                    self.finish(fleet, migration, done, tell)
                }
                Ok(Verdict::Here) => {
                    let text = "the process that sent it was killed; the guest stays here";
                    self.fail(fleet, migration, text.to_owned(), tell)
                }
                // A journal that can't be read decides nothing: the order stays open.
                Ok(Verdict::InDoubt) | Err(_) => Ok(()),
            },
        }
    }

    /// The process that sends a guest, which an earlier agent may have started.
    fn sender(&mut self, migration: &Migration) -> Option<&mut Sender> {
        if !self.senders.contains_key(&migration.id) {
            let found = Sender::find(&self.moves(), migration.id)?;
            self.senders.insert(migration.id, found);
        }
        self.senders.get_mut(&migration.id)
    }

    fn fail(
        &mut self,
        fleet: &Fleet,
        migration: &Migration,
        reason: String,
        tell: Tell<'_>,
    ) -> Result<(), FleetError> {
        self.finish(fleet, migration, MigrationPhase::Failed { reason }, tell)
    }

    fn finish(
        &mut self,
        fleet: &Fleet,
        migration: &Migration,
        phase: MigrationPhase,
        tell: Tell<'_>,
    ) -> Result<(), FleetError> {
        let (guest, to) = (&migration.guest.name, &migration.destination);
        let text = match &phase {
            MigrationPhase::Failed { reason } => {
                format!("guest {guest} was not moved to {to}: {reason}")
            }
            MigrationPhase::Cancelled => format!("the move of guest {guest} to {to} was cancelled"),
            _ => format!("moved guest {guest} to {to}"),
        };
        if Self::set(fleet, migration, phase.clone())? {
            if let Some(sender) = self.senders.remove(&migration.id) {
                sender.forget();
            }
            tell(json!({ "event": "move-ended", "guest": migration.guest, "end": phase }), &text);
        }
        Ok(())
    }

    /// Which host has the guest of a session whose sender has ended. It has said the session before
    /// it made a journal.
    fn verdict(
        &self,
        guest: &GuestIdentity,
        session: Option<SessionId>,
    ) -> Result<Verdict, JournalError> {
        let all = journal::sessions_of(&self.directories.journals(), guest)?;
        let found = all.iter().find(|one| Some(one.session) == session && one.side == Side::Source);
        Ok(match found {
            Some(found) if found.led => Verdict::InDoubt,
            Some(found) => found.verdict,
            None => Verdict::Here,
        })
    }

    fn moves(&self) -> PathBuf {
        self.directories.state().join("moves")
    }

    /// The process that sends a guest.
    fn command(
        &self,
        fleet: &Fleet,
        migration: &Migration,
        address: &str,
    ) -> Result<Command, Failure> {
        let wrong = |text: String| Failure::new(crate::exit::Code::WrongState, text);
        let config = Configuration::read(&self.config)?;
        let name = &migration.guest.name;
        let guests = self.guests.lock().clone().unwrap_or_default();
        let guest = guests.iter().find(|guest| guest.uuid == migration.guest.uuid);
        let guest = guest.ok_or_else(|| wrong(format!("guest {name} is not here")))?;
        let (GuestVmm::Qemu, Some(socket)) = (guest.vmm, &guest.socket) else {
            return Err(wrong(format!("guest {name} is not one of QEMU")));
        };
        let destination = fleet.host(&migration.destination)?;
        let scheme = if config.is_plain() { "tcp" } else { "tls" };
        let mut command = Command::new("/proc/self/exe");
        command.args(["--json", "send", "--qemu"]).arg(socket);
        command.arg("--to").arg(format!("{scheme}:{address}"));
        command.args(["--template", &migration.template, "--witness"]);
        command.arg(witness_socket(&self.directories));
        command.args(config.link_options()?);
        if let Some(identity) = destination.and_then(|host| host.identity)
            && identity.contains("://")
        {
            command.args(["--destination-id", &identity]);
        }
        if let Some(cap) = migration.max_bandwidth {
            command.args(["--max-bandwidth", &cap.to_string()]);
        }
        // A signal for the daemon's process group must not reach it.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        Ok(command)
    }
}

/// Whether a change is worth a transaction: a new session or phase, and progress once it has grown
/// by a tenth.
fn is_news(before: &MigrationPhase, now: &MigrationPhase) -> bool {
    let (
        MigrationPhase::Sending { session: s0, progress: p0, .. },
        MigrationPhase::Sending { session: s1, progress: p1, .. },
    ) = (before, now)
    else {
        return matches!(now, MigrationPhase::Sending { session: Some(_), .. });
    };
    match (p0, p1) {
        _ if s0 != s1 => true,
        (Some(p0), Some(p1)) => {
            p0.phase != p1.phase
                || p0.in_doubt != p1.in_doubt
                || p1.sent_bytes > p0.sent_bytes + p0.sent_bytes / 10 + (1 << 24)
        }
        (p0, p1) => p0.is_none() != p1.is_none(),
    }
}
