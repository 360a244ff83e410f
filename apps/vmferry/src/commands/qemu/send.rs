//! `vmferry send --qemu`: moves the guest of a running QEMU.

use std::path::Path;
use std::sync::Arc;

use serde_json::json;
use vmferry::SourceConfig;
use vmferry::source::{Orders, Report};
use vmferry_api::Recorded;
use vmferry_control::{Directories, MigrateRequest, Server, ServerError, Started};
use vmferry_handover::journal::{self, Verdict};
use vmferry_proxy::{ReceiveRequest, ask_to_receive};
use vmferry_qemu::{Arrived, Release, process_name};
use vmferry_transport::{Address, RecordingSide, Ticket};
use vmferry_wire::GuestIdentity;

use super::arrived::lacks_pages;
use super::found::{Found, Moved, NotMoved};
use super::guard::{GuardOrder, Guardian};
use super::hook::{Call, Hook, Outcome, Phase, Side};
use super::hooked::{Gate, SwitchoverRelease};
use super::kept::{has_ended, report_kept, report_not_ended};
use super::service::QemuService;
use super::settle::Settling;
use crate::args::SendOptions;
use crate::commands::fleet::witness::of_new_session;
use crate::commands::link::{address, dialer, recorder, source_files};
use crate::commands::migration::{migrate_request, saved_run};
use crate::commands::prepared_directories;
use crate::commands::status::ask_all;
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::progress::fetch::needs;
use crate::progress::{JsonEvents, Progress};
use crate::tables::outcome;

/// Moves the guest of the QEMU at a QMP socket.
pub fn run(qmp: &Path, options: &SendOptions, output: &Output) -> Result<(), Failure> {
    let tls = source_files(options)?;
    let to = address(&options.to, &options.tls)?;
    let mut dialer = dialer(&to, tls.as_ref())?;
    dialer.recorder = recorder(&options.record, RecordingSide::Source, output)?;
    let saved = saved_run(&options.migration)?;
    let directory = prepared_directories()?;
    let mut config = source_config(options, directory.journals())?;
    let witness = options.witness.witness.as_deref().map(std::path::absolute).transpose()?;
    let by_ticket = options.template.is_some();
    must_have_a_port(by_ticket, &dialer.address)?;
    must_have_all_pages(qmp, &directory)?;
    let settling =
        Settling { qmp, config: &config, dialer: &dialer, by_ticket, witness: witness.as_deref() };
    if let Some(session) = settling.settle(&directory, options.keep_source, output)? {
        output.result(&json!({ "session": session, "moved_before": true }), || {
            format!("session {session} has moved this guest: it runs at the destination")
        });
        return Ok(());
    }
    config.witness = of_new_session(witness.as_deref())?;
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
        request: request(options),
        witness,
        settings: found.settings().clone(),
        paused: found.is_paused(),
        keep_source: options.keep_source,
        hook,
        hook_runner: gate.as_ref().map(|gate| gate.runner()),
    })?;
    let facts = found.facts();
    let ended_bitmaps = found.ending_bitmaps().join(", ");
    found.describe(output);
    let progress = Progress::new(output, JsonEvents::All, saved);
    progress.event(&json!(Started::new(
        &identity.name,
        found.memory_bytes(),
        &options.to,
        &config
    )));
    let moved = progress.during(&orders, || {
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
        Ok(Moved { quit, stats, lost }) => {
            let recorded = stats.as_ref().clone().sparse();
            let mut stats = json!(stats);
            stats["qemu"] = facts;
            let stays = options.keep_source || lost.as_ref().is_some_and(has_ended);
            let lost = lost.map(Failure::from);
            progress.finish(lost.as_ref().map_or(Ok(&stats), Err));
            // Before QEMU ends, because a manager may be watching it.
            if let Some(gate) = &gate {
                gate.run_after(Outcome::Moved);
            }
            // An error does not fail the migration: the guest runs at the destination.
            let ended = if stays { Ok(Release::default()) } else { quit() };
            if let Err(error) = &ended {
                report_not_ended(error, output);
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
            if !ended_bitmaps.is_empty() {
                output.note(format!(
                    "these dirty bitmaps were not moved, so the next backup is a full one: \
                     {ended_bitmaps}"
                ));
            }
            if let Some(failure) = lost {
                return Err(failure);
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

/// A guest that lacks pages waits for them here. Its QEMU need not answer, so the journals are
/// asked.
fn must_have_all_pages(qmp: &Path, directory: &Directories) -> Result<(), Failure> {
    let journals = directory.journals();
    for one in Arrived::at(&journals, qmp)? {
        let session = one.session();
        if !lacks_pages(&journals, session) {
            continue;
        }
        // What the receiver says, if it lives and fetches the pages itself.
        let shown = ask_all(directory, &[])?;
        let shown = shown.iter().find(|shown| shown["pid"] == one.pid());
        let fetch = shown.map(|shown| &shown["fetch"]).filter(|fetch| fetch.is_object());
        let left = fetch.map_or_else(String::new, |fetch| format!(" (it {})", needs(fetch)));
        let text = format!(
            "the guest has not all its pages yet{left}: it was received in session {session}, and \
             its receiver still fetches pages from its source. Wait until `vmferry receive` says \
             that every page has arrived; if it has ended, start it again"
        );
        return Err(Failure::new(Code::WrongState, text));
    }
    Ok(())
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

fn source_config(
    options: &SendOptions,
    journals: std::path::PathBuf,
) -> Result<SourceConfig, Failure> {
    request(options).source_config(journals).map_err(|error| Failure::of(Code::Usage, error))
}

/// The options as a request, without an address.
fn request(options: &SendOptions) -> MigrateRequest {
    migrate_request(String::new(), None, &options.migration, options.verify)
}
