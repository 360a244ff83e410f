//! `vmferry send --qemu`: moves the guest of a running QEMU.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use serde_json::json;
use vmferry::SourceConfig;
use vmferry::source::{Orders, Recovered, Report, recover};
use vmferry_api::Recorded;
use vmferry_control::{Directories, Server, ServerError, Started};
use vmferry_handover::journal::{self, LaterSession, Record, SessionSummary, Verdict};
use vmferry_proxy::{ReceiveRequest, ask_to_receive};
use vmferry_qemu::{AbandonedQemu, Arrived, QemuError, Release, process_name};
use vmferry_transport::{Address, Dialer, RecordingSide, Ticket};
use vmferry_wire::{GuestIdentity, SessionId};

use super::found::{Found, Moved, NotMoved};
use super::guard::{GuardOrder, Guardian};
use super::hook::{Call, Hook, Outcome, Phase, Side};
use super::hooked::{Gate, SwitchoverRelease};
use super::kept::report_kept;
use super::service::QemuService;
use crate::args::SendOptions;
use crate::commands::link::{address, dialer, recorder, source_files};
use crate::commands::migration::{migrate_request, saved_run};
use crate::commands::prepared_directories;
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::progress::{JsonEvents, Progress};
use crate::tables::outcome;

/// How often progress is shown.
const PROGRESS_PERIOD: Duration = Duration::from_millis(200);

/// Moves the guest of the QEMU at a QMP socket.
pub fn run(qmp: &Path, options: &SendOptions, output: &Output) -> Result<(), Failure> {
    let tls = source_files(options)?;
    let to = address(&options.to, &options.tls)?;
    let mut dialer = dialer(&to, tls.as_ref())?;
    dialer.recorder = recorder(&options.record, RecordingSide::Source, output)?;
    let saved = saved_run(&options.migration)?;
    let directory = prepared_directories()?;
    let mut config = source_config(options, directory.journals())?;
    let by_ticket = options.template.is_some();
    must_have_a_port(by_ticket, &dialer.address)?;
    settle_unfinished(qmp, &config, (&dialer, by_ticket), &directory, output)?;
    let found = Found::look(qmp, options)?;
    let (identity, pid) = (found.identity().clone(), found.pid());
    config.process = pid.and_then(process_name);
    if found.is_paused() {
        must_be_ours(&identity, pid, &config)?;
    }
    let name = super::socket_name(&identity, pid);
    let about = found.about(&name);
    let orders = Orders::new();
    let socket = directory.socket(&name);
    let throttle = options.migration.throttle;
    let user_holds = options.migration.pause_before_switchover;
    let release = if user_holds { SwitchoverRelease::HookAndUser } else { SwitchoverRelease::Hook };
    let hook = Hook::of(&options.hook)?.map(|hook| (hook, before(&identity, &config, &to)));
    let gate = hook.clone().map(|(hook, call)| {
        config.pause_before_switchover = found.can_be_held();
        Gate::new(hook, call, orders.clone(), release, output)
    });
    let gate = gate.transpose()?;
    let service =
        QemuService { about: about.clone(), orders: orders.clone(), throttle, gate: gate.clone() };
    let server = Server::bind(&socket, Arc::new(service)).map_err(|error| match error {
        ServerError::InUse { .. } => Failure::of(Code::Busy, error),
        error => Failure::of(Code::Internal, error),
    })?;
    if let Some(template) = &options.template {
        let (template, session) = (template.clone(), config.session);
        let request = ReceiveRequest { template, guest: identity.clone(), session };
        ask_to_receive(&dialer, &request)?;
        dialer.ticket = Some(Ticket(session.0));
    }
    let (on_signal, hook_on_signal) = (orders.clone(), gate.clone());
    crate::signals::on_end(move || {
        on_signal.cancel();
        if let Some(gate) = hook_on_signal {
            gate.stop();
        }
    })?;
    let guardian = Guardian::start(&GuardOrder {
        qmp: std::path::absolute(qmp)?,
        pid,
        session: config.session,
        journals: config.journal_directory.clone(),
        socket,
        about,
        to,
        by_ticket: dialer.ticket.is_some(),
        tls,
        settings: found.settings().clone(),
        paused: found.is_paused(),
        keep_source: options.keep_source,
        hook,
        hook_runner: gate.as_ref().map(|gate| gate.runner()),
    })?;
    let facts = found.facts();
    found.describe(output);
    let progress = Progress::new(output, JsonEvents::All, saved);
    progress.event(&json!(Started::new(
        &identity.name,
        found.memory_bytes(),
        &options.to,
        &config
    )));
    let moved = with_progress(&orders, &progress, || {
        if let Some(gate) = gate.as_ref().filter(|_| !found.can_be_held()) {
            gate.run_at_once();
        }
        found.migrate(&dialer, config, &orders, &mut |report| match &gate {
            Some(gate) => {
                gate.watch(report);
                // If only the hook holds the migration, the hook's own event says so.
                if user_holds || !matches!(report, Report::Held { .. }) {
                    progress.event(&json!(report));
                }
            }
            None => progress.event(&json!(report)),
        })
    });
    drop(server);
    if let Some(gate) = &gate {
        gate.end();
    }
    match moved {
        Ok(Moved { quit, stats }) => {
            let recorded = stats.as_ref().clone().sparse();
            let mut stats = json!(stats);
            stats["qemu"] = facts;
            progress.finish(Ok(&stats));
            // Before QEMU ends, because a manager may be watching it.
            if let Some(gate) = &gate {
                gate.run_after(Outcome::Moved);
            }
            // An error does not fail the migration: the guest runs at the destination.
            let ended = if options.keep_source { Ok(Release::default()) } else { quit() };
            if let Err(error) = &ended {
                let reason = vmferry::chain(error);
                output.event(&json!({ "event": "not-ended", "reason": reason }), || {
                    format!(
                        "the source's QEMU could not be quit; do not resume its guest: {reason}"
                    )
                });
            }
            match ended {
                Err(error) if error.is_timeout() => guardian.hand_over(),
                Err(_) => guardian.dismiss(),
                Ok(release) => {
                    guardian.dismiss();
                    report_kept(&release, output);
                    stats["qemu"]["freed_bytes"] = json!(release.freed_bytes);
                }
            }
            output.result(&stats, || outcome(&recorded));
            Ok(())
        }
        Err(NotMoved { error, runs, stays_paused }) => {
            let by_hook = gate.as_ref().and_then(|gate| gate.failure());
            let failure = by_hook.unwrap_or_else(|| Failure::from(error));
            progress.finish(Err(&failure));
            if runs || stays_paused {
                // If this process is killed here, the guardian runs it.
                if let Some(gate) = &gate {
                    gate.run_after(Outcome::Kept);
                }
                guardian.dismiss();
            } else {
                guardian.hand_over();
            }
            Err(failure)
        }
    }
}

/// Daemons listen for TLS, or for TCP.
fn must_have_a_port(by_ticket: bool, address: &Address) -> Result<(), Failure> {
    match address {
        Address::Tls { .. } | Address::Tcp { .. } => Ok(()),
        _ if !by_ticket => Ok(()),
        _ => {
            let text = "--template is for a daemon: give --to the address of its port, HOST:PORT";
            Err(Failure::new(Code::Usage, text))
        }
    }
}

/// The hook's `before` call.
fn before(guest: &GuestIdentity, config: &SourceConfig, to: &str) -> Call {
    Call {
        phase: Phase::Before,
        side: Side::Source,
        guest: guest.clone(),
        session: Some(config.session.to_string()),
        peer: Some(to.to_owned()),
        result: None,
    }
}

/// Makes sure that this host owns a paused guest: one that is being received is paused, too, and
/// may run at its source. Sessions that were received into other QEMUs do not matter.
fn must_be_ours(
    guest: &GuestIdentity,
    pid: Option<u32>,
    config: &SourceConfig,
) -> Result<(), Failure> {
    let journals = &config.journal_directory;
    let sessions = journal::sessions_of(journals, guest)
        .map_err(|error| Failure::of(Code::Internal, error))?;
    for last in sessions.iter().rev() {
        if last.side != journal::Side::Destination || last.verdict == Verdict::Here {
            break;
        }
        if Arrived::may_be_in(journals, last.session, pid)? {
            let text = format!(
                "the guest in this QEMU was received in session {} and never ran here: its source \
                 has it. Start `vmferry receive` again, which quits this QEMU",
                last.session
            );
            return Err(Failure::new(Code::WrongState, text));
        }
    }
    Ok(())
}

/// Finishes the sessions of a sender that was killed together with its guardian.
fn settle_unfinished(
    qmp: &Path,
    config: &SourceConfig,
    (dialer, by_ticket): (&Dialer, bool),
    directory: &Directories,
    output: &Output,
) -> Result<(), Failure> {
    let abandoned = AbandonedQemu::new(qmp, None);
    let identity = abandoned.identity()?;
    let pid = abandoned.pid()?;
    let process = pid.and_then(process_name);
    let name = super::socket_name(&identity, pid);
    let mut settled = HashSet::new();
    // A session that a later one has superseded is settled after it: the latest decision counts.
    while let Some(unfinished) =
        next_unfinished(&config.journal_directory, &identity, process.as_deref(), &settled)?
    {
        let session = unfinished.session;
        settled.insert(session);
        // A guest that runs after COMMIT must be another one: vmferry never leaves it running.
        let is_given = unfinished.records.iter().any(Record::is_commit);
        let is_its = process.is_some() && unfinished.process() == process.as_deref();
        if is_given && !is_its && abandoned.is_running()? {
            let text = format!(
                "session {session} gave away a guest with this name and UUID, a guest runs in this \
                 QEMU, and the session's journal does not say whether it is the same guest. Look \
                 at the other host. If this is another guest, decide session {session} with \
                 `vmferry resolve`, and give each guest its own UUID; if it is the same guest and \
                 the other host runs it too, end one of the two"
            );
            return Err(Failure::new(Code::WrongState, text));
        }
        let finishing = json!({ "event": "finishing-session", "session": session });
        output.event(&finishing, || format!("finishing session {session} of a killed vmferry"));
        let mut config = config.clone();
        config.session = session;
        let orders = Orders::new();
        let about =
            json!({ "name": name, "uuid": identity.uuid, "guest": "qemu", "phase": "stopped" });
        let service =
            Arc::new(QemuService { about, orders: orders.clone(), throttle: 0, gate: None });
        // For `vmferry resolve`, because recovery waits while the session is in doubt.
        let _server = Server::bind(&directory.socket(&name), service)
            .map_err(|error| Failure::of(Code::Busy, error))?;
        let qemu = AbandonedQemu::new(qmp, None);
        let mut dialer = dialer.clone();
        // The session's receiver may still be there.
        dialer.ticket = by_ticket.then_some(Ticket(session.0));
        match recover(qemu, &dialer, config, &orders, &mut |_| {}) {
            Ok(Recovered::Kept(_)) => {}
            Ok(Recovered::Given(_)) => {
                let text = "this guest was already handed over and runs at the destination: quit \
                            this QEMU";
                return Err(Failure::new(Code::WrongState, text));
            }
            Ok(Recovered::Stuck(_, error)) => {
                let text = format!("the guest is paused and could not be resumed: {error}");
                return Err(Failure::new(Code::Internal, text));
            }
            Err((_, error)) => return Err(Failure::of(Code::Busy, error)),
        }
    }
    Ok(())
}

/// A session of the guest that is unfinished and that no later one has superseded.
fn next_unfinished(
    journals: &Path,
    guest: &GuestIdentity,
    process: Option<&str>,
    settled: &HashSet<SessionId>,
) -> Result<Option<SessionSummary>, Failure> {
    let sessions = journal::sessions_in(journals, guest, process)
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

fn source_config(
    options: &SendOptions,
    journals: std::path::PathBuf,
) -> Result<SourceConfig, Failure> {
    let request = migrate_request(String::new(), None, &options.migration, options.verify);
    request.source_config(journals).map_err(|error| Failure::of(Code::Usage, error))
}

/// Shows progress while `work` runs.
fn with_progress<R>(orders: &Orders, progress: &Progress, work: impl FnOnce() -> R) -> R {
    let (over, is_over) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while is_over.recv_timeout(PROGRESS_PERIOD) == Err(RecvTimeoutError::Timeout) {
                let mut event = json!(orders.progress());
                event["event"] = json!("progress");
                progress.event(&event);
            }
        });
        let result = work();
        drop(over);
        result
    })
}
