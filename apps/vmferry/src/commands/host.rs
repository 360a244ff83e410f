//! Hosts a guest until it ends, for `run` and `receive`.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use serde_json::json;
use vmferry::destination::FetchHandle;
use vmferry_control::{Directories, Server, ServerError};
use vmferry_microvm::SharedMachine;
use vmferry_microvm::service::{End, GuestService, peak_rss_bytes};

use crate::exit::{Code, Failure};
use crate::output::Output;

/// How long to wait for the old VMM to release the guest's name, after a migration within this
/// host.
const NAME_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the guest is checked for a crash, and its balloon's driver for errors.
const POLL_PERIOD: Duration = Duration::from_millis(500);

/// How long to wait for a migration to be cancelled when the VMM must end.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);

/// The channel on which [`host`] is told to end.
pub type Ending = (Sender<End>, Receiver<End>);

/// Creates the channel.
pub fn ending() -> Ending {
    channel()
}

/// Serves the guest's control socket until the guest ends. A guest with `fetch` lacks pages. It
/// does not end before the last one has arrived: the source keeps its memory until then.
pub fn host(
    machine: &SharedMachine,
    fetch: Option<FetchHandle>,
    directory: &Directories,
    (ended, is_over): Ending,
    output: &Output,
) -> Result<(), Failure> {
    let name = {
        let machine = machine.lock();
        machine.config().identity.name.clone()
    };
    let service = GuestService::new(Arc::clone(machine), directory.journals(), ended);
    let service = Arc::new(match fetch.clone() {
        Some(fetch) => service.fetching(fetch),
        None => service,
    });
    let server = bind(directory, &name, &service)?;
    let status = service.status().map_err(|error| Failure::of(Code::Internal, error))?;
    let serving = json!({
        "event": "serving", "name": name, "socket": server.path(), "pid": status.pid,
        "guest": status.guest, "choice": status.choice, "memory_bytes": status.memory_bytes,
        "vcpus": status.vcpus,
    });
    output.event(&serving, || {
        format!(
            "{name} runs on {} ({}): {} vCPUs, {} MiB, control socket {}",
            status.guest,
            status.choice,
            status.vcpus,
            status.memory_bytes >> 20,
            server.path().display()
        )
    });
    let (mut warned, mut ordered) = (0, None);
    let end = loop {
        match is_over.recv_timeout(POLL_PERIOD) {
            Ok(end) => ordered = Some(end),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => ordered = Some(End::Quit),
        }
        let (crash, balloon) = {
            let machine = machine.lock();
            (machine.crash(), machine.balloon())
        };
        // Each warning is reported once in the device's life. The device may be waiting for a page
        // that is missing.
        let status = balloon.and_then(|balloon| balloon.status_within(POLL_PERIOD));
        let warnings = status.map_or_else(Vec::new, |status| status.warnings);
        for warning in warnings.iter().skip(warned) {
            let event = json!({ "event": "balloon-warning", "name": name, "warning": warning });
            output.event(&event, || format!("{name}: its balloon's driver: {warning}"));
        }
        warned = warned.max(warnings.len());
        if fetch.as_ref().is_some_and(|fetch| fetch.progress().is_some()) {
            continue;
        }
        if let Some(end) = ordered {
            break end;
        }
        if let Some(crash) = crash {
            let text = format!("the guest {name} has crashed: {crash}");
            return Err(Failure::new(Code::Corrupt, text));
        }
    };
    if end == End::Quit {
        leave_migration(&service)?;
    }
    // The client that requested the end reads its answer before the socket is removed.
    drop(server);
    let over = json!({
        "event": "ended", "name": name, "why": end, "peak_rss_bytes": peak_rss_bytes(),
    });
    output.event(&over, || match end {
        End::Quit => format!("{name} has ended"),
        End::Migrated => format!("{name} has moved away"),
    });
    Ok(())
}

fn bind(
    directory: &Directories,
    name: &str,
    service: &Arc<GuestService>,
) -> Result<Server, Failure> {
    let deadline = Instant::now() + NAME_TIMEOUT;
    loop {
        let handler: Arc<GuestService> = Arc::clone(service);
        match Server::bind(&directory.socket(name), handler) {
            Ok(server) => return Ok(server),
            Err(ServerError::InUse { .. }) if Instant::now() < deadline => {
                // The old VMM on this host is about to exit. Nothing signals that.
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error @ (ServerError::InUse { .. } | ServerError::NotASocket { .. })) => {
                return Err(Failure::of(Code::Busy, error));
            }
            Err(error) => return Err(Failure::of(Code::Internal, error)),
        }
    }
}

/// Cancels the guest's migration before the VMM ends. If the handover is in doubt, or the migration
/// does not end in time, that is an error.
fn leave_migration(service: &GuestService) -> Result<(), Failure> {
    let deadline = Instant::now() + CANCEL_TIMEOUT;
    service.cancel();
    loop {
        match service.progress() {
            None => return Ok(()),
            Some(progress) if progress.in_doubt => {
                let text = "ended while in doubt: the destination may run the guest; look there, \
                            then use `vmferry resolve`";
                return Err(Failure::new(Code::InDoubt, text));
            }
            Some(_) if Instant::now() >= deadline => {
                let text = format!(
                    "ended although the guest's migration was not cancelled within {} s: the \
                     journal says which host has the guest (`vmferry status --sessions`)",
                    CANCEL_TIMEOUT.as_secs()
                );
                return Err(Failure::new(Code::Internal, text));
            }
            // Polled: a notification would need a second channel for an event that happens once.
            Some(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
