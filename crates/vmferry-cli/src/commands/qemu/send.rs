//! `vmferry send --qemu`: moves the guest of a QEMU that runs.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use serde_json::json;
use vmferry::SourceConfig;
use vmferry::journal::{self, Since};
use vmferry::source::{Orders, Recovered, recover};
use vmferry_control::{RuntimeDirectory, Server, ServerError, Started};
use vmferry_qemu::{AbandonedQemu, QemuError};
use vmferry_transport::{Dialer, RecordingSide};
use vmferry_wire::{GuestIdentity, SessionId};

use super::found::{Found, Moved, NotMoved};
use super::guard::{GuardOrder, Guardian};
use super::service::QemuService;
use crate::args::SendOptions;
use crate::commands::directory;
use crate::commands::send::{address, dialer, migrate_request, recorder, saved_run, source_files};
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::progress::Progress;
use crate::tables::outcome;

/// How often it is shown how far the migration is.
const PROGRESS_PERIOD: Duration = Duration::from_millis(200);

/// Moves the guest of the QEMU whose QMP socket this is.
pub fn run(qmp: &Path, options: &SendOptions, output: &Output) -> Result<(), Failure> {
    let tls = source_files(options)?;
    let to = address(&options.to, &options.tls)?;
    let mut dialer = dialer(&to, tls.as_ref())?;
    dialer.recorder = recorder(&options.record, RecordingSide::Source, output)?;
    let saved = saved_run(&options.migration)?;
    let directory = directory()?;
    let config = source_config(options, directory.journals())?;
    settle_unfinished(qmp, &config, &dialer, &directory, output)?;
    let found = Found::look(qmp, options)?;
    let (identity, pid) = (found.identity().clone(), found.pid());
    let name = super::socket_name(&identity, pid);
    let about = found.about(&name);
    let orders = Orders::new();
    let socket = directory.socket(&name);
    let throttle = options.migration.throttle;
    let service = QemuService { about: about.clone(), orders: orders.clone(), throttle };
    let server = Server::bind(&socket, Arc::new(service)).map_err(|error| match error {
        ServerError::InUse { .. } => Failure::of(Code::Busy, error),
        error => Failure::of(Code::Internal, error),
    })?;
    let on_signal = orders.clone();
    crate::signals::on_end(move || on_signal.cancel())?;
    let guardian = Guardian::start(&GuardOrder {
        qmp: std::path::absolute(qmp)?,
        pid,
        session: config.session,
        journals: config.journal_directory.clone(),
        socket,
        about,
        to,
        tls,
        settings: found.settings().clone(),
        keep_source: options.keep_source,
    })?;
    let facts = found.facts();
    found.tell(output);
    let progress = Progress::new(output, true, saved);
    progress.event(&json!(Started::new(
        &identity.name,
        found.memory_bytes(),
        &options.to,
        &config
    )));
    let moved = with_progress(&orders, &progress, || {
        found.migrate(&dialer, config, &orders, &mut |report| progress.event(&json!(report)))
    });
    drop(server);
    match moved {
        Ok(Moved { quit, stats }) => {
            let mut stats = json!(stats);
            stats["qemu"] = facts;
            progress.finish(Ok(&stats));
            // One that has died meanwhile has ended too; and the guest is elsewhere in any case.
            let ended = if options.keep_source { Ok(()) } else { quit() };
            if let Err(error) = &ended {
                let reason = vmferry::chain(error);
                output.event(&json!({ "event": "not-ended", "reason": reason }), || {
                    format!(
                        "the QEMU that the guest has left could not be ended, and must not be continued: {reason}"
                    )
                });
            }
            match ended {
                Err(error) if error.is_timeout() => guardian.hand_over(),
                _ => guardian.dismiss(),
            }
            output.result(&stats, || outcome(&stats));
            Ok(())
        }
        Err(NotMoved { error, runs }) => {
            let failure = Failure::from(error);
            progress.finish(Err(&failure));
            if runs {
                guardian.dismiss();
            } else {
                guardian.hand_over();
            }
            Err(failure)
        }
    }
}

/// Finishes what a vmferry has left that was killed together with its guardian.
fn settle_unfinished(
    qmp: &Path,
    config: &SourceConfig,
    dialer: &Dialer,
    directory: &RuntimeDirectory,
    output: &Output,
) -> Result<(), Failure> {
    let abandoned = AbandonedQemu::new(qmp, None);
    let identity = abandoned.identity()?;
    let name = super::socket_name(&identity, abandoned.pid()?);
    let mut settled = HashSet::new();
    // What a later session has overtaken comes when that one is settled: the last word counts.
    while let Some(session) = next_unfinished(&config.journal_directory, &identity, &settled)? {
        settled.insert(session);
        let finishing = json!({ "event": "finishing-session", "session": session });
        output
            .event(&finishing, || format!("finishing session {session}, whose vmferry was killed"));
        let mut config = config.clone();
        config.session = session;
        let orders = Orders::new();
        let about =
            json!({ "name": name, "uuid": identity.uuid, "guest": "qemu", "phase": "stopped" });
        let service = Arc::new(QemuService { about, orders: orders.clone(), throttle: 0 });
        // For `vmferry resolve`: in doubt, this waits.
        let _server = Server::bind(&directory.socket(&name), service)
            .map_err(|error| Failure::of(Code::Busy, error))?;
        let qemu = AbandonedQemu::new(qmp, None);
        match recover(qemu, dialer, config, &orders, &mut |_| {}) {
            Ok(Recovered::Kept(_)) => {}
            Ok(Recovered::Given(_)) => {
                let text = "this guest was handed over already, and runs at the destination: end this QEMU";
                return Err(Failure::new(Code::WrongState, text));
            }
            Ok(Recovered::Stuck(_, error)) => {
                let text = format!("the guest stands still and could not be resumed: {error}");
                return Err(Failure::new(Code::Internal, text));
            }
            Err((_, error)) => return Err(Failure::of(Code::Busy, error)),
        }
    }
    Ok(())
}

/// A session of the guest that nobody has brought to its end, and that no later one has overtaken.
fn next_unfinished(
    journals: &Path,
    guest: &GuestIdentity,
    settled: &HashSet<SessionId>,
) -> Result<Option<SessionId>, Failure> {
    let sessions = journal::sessions_of(journals, guest)
        .map_err(|error| Failure::of(Code::Internal, error))?;
    for one in journal::unfinished(&sessions, guest) {
        match journal::since(&sessions, one.session) {
            _ if settled.contains(&one.session) => {}
            Since::Nothing => return Ok(Some(one.session)),
            Since::SentAgain(_) => {}
            Since::Unclear(session) => {
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
    let config = request.source_config(journals);
    config.check().map_err(|error| Failure::of(Code::Usage, error))?;
    Ok(config)
}

/// Shows how far it is while `work` runs.
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
