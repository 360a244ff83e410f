//! `vmferry send --qemu`: attaches to a QEMU that runs and moves its guest.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use serde_json::{Value, json};
use vmferry::SourceConfig;
use vmferry::journal::{self, SessionSummary};
use vmferry::source::{Orders, Recovered, SourceOutcome, migrate, recover};
use vmferry_microvm::control::{RuntimeDirectory, Server, ServerError};
use vmferry_qemu::{AbandonedQemu, QemuSource};
use vmferry_transport::Dialer;

use super::guard::{GuardOrder, Guardian};
use super::service::{QemuService, about};
use crate::args::SendOptions;
use crate::commands::directory;
use crate::commands::send::{address, dialer, source_files, when_stuck};
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::tables::{Progress, outcome};

/// How often it is shown how far the migration is.
const PROGRESS_PERIOD: Duration = Duration::from_millis(200);

/// Moves the guest of the QEMU whose QMP socket this is.
pub fn run(qmp: &Path, options: &SendOptions, output: &Output) -> Result<(), Failure> {
    let tls = source_files(options)?;
    let to = address(&options.to, &options.tls)?;
    let dialer = dialer(&to, tls.as_ref())?;
    let directory = directory()?;
    let config = source_config(options, directory.journals())?;
    settle_unfinished(qmp, &config, &dialer, &directory, output)?;
    let mut source = QemuSource::attach(qmp)?;
    if options.migration.throttle > 0 {
        source.allow_throttling()?;
    }
    let pid = source.pid();
    let name = super::socket_name(source.identity(), pid);
    let about = about(&name, &source, pid);
    let orders = Orders::new();
    let socket = directory.socket(&name);
    let service = QemuService { about: about.clone(), orders: orders.clone() };
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
        settings: source.settings().clone(),
        keep_source: options.keep_source,
    })?;
    let facts = facts(&source);
    tell(&facts, output);
    let progress = Progress::new(output, true);
    let outcome_of_it = with_progress(&orders, &progress, || {
        migrate(source, &dialer, config, &orders, &mut |report| {
            progress.event(&json!(report));
        })
    });
    progress.finish();
    drop(server);
    match outcome_of_it {
        SourceOutcome::Given { vm, stats } => {
            // One that has died meanwhile has ended too; and the guest is elsewhere in any case.
            if !options.keep_source
                && let Err(error) = vm.quit()
            {
                output.note(format!(
                    "the QEMU that the guest has left could not be ended, and must not be continued: {}",
                    vmferry::chain(&error)
                ));
            }
            guardian.dismiss();
            let mut stats = json!(stats);
            stats["qemu"] = facts;
            output.result(&stats, || outcome(&stats));
            Ok(())
        }
        SourceOutcome::Kept { error, mut vm, .. } => {
            let runs = vm.is_running();
            // Detached first, so that a guardian that must take over finds QMP free.
            drop(vm);
            if runs {
                guardian.dismiss();
            } else {
                guardian.hand_over();
            }
            Err(error.into())
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
    let sessions = journal::sessions(&config.journal_directory)
        .map_err(|error| Failure::of(Code::Internal, error))?;
    if !sessions.iter().any(SessionSummary::is_unfinished_source) {
        return Ok(());
    }
    let abandoned = AbandonedQemu::new(qmp, None);
    let identity = abandoned.identity()?;
    let name = super::socket_name(&identity, abandoned.pid()?);
    for session in journal::unfinished(&sessions, &identity) {
        output.note(format!("finishing session {}, whose vmferry was killed", session.session));
        let mut config = config.clone();
        config.session = session.session;
        let orders = Orders::new();
        let about =
            json!({ "name": name, "uuid": identity.uuid, "guest": "qemu", "phase": "stopped" });
        let service = Arc::new(QemuService { about, orders: orders.clone() });
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

fn source_config(
    options: &SendOptions,
    journals: std::path::PathBuf,
) -> Result<SourceConfig, Failure> {
    let mut config = SourceConfig::new(journals);
    let limits = &options.migration;
    config.channels = limits.channels;
    config.downtime_limit = limits.downtime_limit.max(Duration::from_micros(1));
    config.max_bandwidth = limits.max_bandwidth;
    config.max_rounds = limits.max_rounds;
    config.timeouts.reconnect = limits.reconnect_timeout;
    config.timeout = limits.timeout;
    config.when_stuck = when_stuck(limits.when_stuck);
    config.throttle = limits.throttle;
    config.compression.way = limits.compress;
    config.compression.when_busy = limits.when_busy.into();
    config.compression.workers = limits.workers;
    config.compression.delta_memory = limits.delta_memory;
    config.free_page_hints = !limits.no_free_page_hints;
    config.verify = options.verify;
    config.check().map_err(|error| Failure::of(Code::Usage, error))?;
    Ok(config)
}

/// What was found in the QEMU, for the result.
fn facts(source: &QemuSource) -> Value {
    let ram = source.ram();
    let habits = source.habits();
    json!({
        "version": source.version().to_string(),
        "machine": source.machine().kind,
        "blocks": ram.blocks,
        "state_bytes_in_use": ram.state_bytes_in_use(),
        "pins_pages": habits.pins_pages,
        "gives_pages_back": habits.gives_pages_back,
    })
}

fn tell(facts: &Value, output: &Output) {
    let blocks = facts["blocks"].as_array().map_or(&[][..], Vec::as_slice);
    let of = |carrier: &str| {
        let bytes = blocks.iter().filter(|block| block["carrier"] == carrier);
        bytes.map(|block| block["bytes"].as_u64().unwrap_or_default()).sum::<u64>() >> 20
    };
    output.note(format!(
        "attached to QEMU {} ({}): {} MiB of memory, and {} MiB of ROMs and video memory that QEMU \
         moves with its devices",
        facts["version"].as_str().unwrap_or_default(),
        facts["machine"].as_str().unwrap_or_default(),
        of("vmferry"),
        of("qemu"),
    ));
    if facts["pins_pages"] == true {
        output.note(
            "a disk is used without the host's cache (cache=none or direct): the guest is stopped for a \
             few milliseconds in each round, because such a disk writes memory unseen",
        );
    }
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
