//! The device state: QEMU's own migration, which leaves shared memory out, through a socket pair.
//!
//! At the source the migration starts while the guest runs. `pause-before-switchover` holds it once
//! QEMU has stopped the guest. It continues after the last harvest, and its bytes are the state. At
//! the destination QEMU reads the same bytes. QEMU sees a local descriptor and nothing of the
//! network.
//!
//! Source: QEMU `qapi/migration.json`, `migration/ram.c`.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use vmferry_memory::GuestBytes;

use crate::error::QemuError;
use crate::qmp::Qmp;
use crate::settings::Settings;

/// The name of the descriptor within QEMU.
const DESCRIPTOR: &str = "vmferry-state";

/// How long QEMU may take from one phase of its migration to the next.
const PHASE_TIMEOUT: Duration = Duration::from_secs(30);

/// The largest state in bytes: far more than any that was seen, and less than a message may have.
const MAX_STATE_BYTES: usize = 60 << 20;

/// QEMU's migration at the source, started and held.
pub struct Saving {
    reader: JoinHandle<std::io::Result<GuestBytes>>,
    /// Ends the reader, whatever QEMU does.
    ours: UnixStream,
}

impl Saving {
    /// Starts it. On return QEMU has stopped the guest and waits. Also returns for how long the
    /// guest has been paused: the setup takes longer than that, and the guest runs during most of
    /// it.
    ///
    /// # Errors
    /// QEMU's refusal. The guest then keeps running, or can be resumed.
    pub fn begin(qmp: &mut Qmp) -> Result<(Self, Duration), QemuError> {
        let begun = Instant::now();
        Settings::for_saving(qmp)?;
        let (ours, theirs) = pair()?;
        let mut source = ours.try_clone().map_err(local("clone a socket"))?;
        qmp.give_descriptor(DESCRIPTOR, &theirs)?;
        drop(theirs);
        let reader = std::thread::Builder::new()
            .name("qemu-state".into())
            .spawn(move || {
                let mut bytes = GuestBytes::new();
                bytes.read_to_end(&mut source, MAX_STATE_BYTES)?;
                Ok(bytes)
            })
            .map_err(local("start a thread"))?;
        let saving = Self { reader, ours };
        qmp.forget_events();
        qmp.execute("migrate", json!({ "uri": format!("fd:{DESCRIPTOR}") }))?;
        await_status(qmp, "stop the guest", &["pre-switchover"])?;
        let stopped = qmp.take_event("STOP").and_then(|event| age(&event["timestamp"]));
        let since_begun = begun.elapsed();
        // The clock that QEMU stamps events with can be set meanwhile.
        Ok((saving, stopped.map_or(since_begun, |age| age.min(since_begun))))
    }

    /// Lets QEMU write the state.
    ///
    /// # Errors
    /// QMP and socket errors. The guest stays stopped.
    pub fn finish(self, qmp: &mut Qmp) -> Result<GuestBytes, QemuError> {
        qmp.execute("migrate-continue", json!({ "state": "pre-switchover" }))?;
        await_status(qmp, "save its state", &["completed"])?;
        // QEMU closes its end with the state's last byte.
        let joined = self.reader.join();
        let bytes = match joined {
            Ok(read) => read.map_err(local("read the state"))?,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        if bytes.len() == MAX_STATE_BYTES {
            let text = "its device state has more than 60 MiB".to_owned();
            return Err(QemuError::Unsupported(text));
        }
        Ok(bytes)
    }

    /// Cancels QEMU's migration without a state.
    ///
    /// # Errors
    /// QMP errors.
    pub fn cancel(self, qmp: &mut Qmp) -> Result<(), QemuError> {
        qmp.execute("migrate_cancel", json!({}))?;
        // QEMU waits for its writer, and the writer for this end of the socket.
        let _ = self.ours.shutdown(std::net::Shutdown::Both);
        await_status(qmp, "cancel its migration", &["cancelled", "failed", "completed"])?;
        let _ = self.reader.join();
        Ok(())
    }
}

/// Lets a QEMU that waits for a migration load a state. The guest is paused afterwards.
///
/// # Errors
/// If the state can't be loaded. This QEMU can't be used any more then.
pub fn load(qmp: &mut Qmp, state: &[u8]) -> Result<(), QemuError> {
    load_into(qmp, state).map_err(QemuError::while_taking)
}

fn load_into(qmp: &mut Qmp, state: &[u8]) -> Result<(), QemuError> {
    let (mut ours, theirs) = pair()?;
    qmp.give_descriptor(DESCRIPTOR, &theirs)?;
    drop(theirs);
    qmp.forget_events();
    qmp.execute("migrate-incoming", json!({ "uri": format!("fd:{DESCRIPTOR}") }))?;
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || {
            // A QEMU that rejects the state reports it by QMP, or has ended.
            let _ = ours.write_all(state);
        });
        let loaded = await_status(qmp, "load the state", &["completed"]);
        let _ = writer.join();
        loaded
    })
}

fn await_status(qmp: &mut Qmp, what: &'static str, wanted: &[&str]) -> Result<(), QemuError> {
    let ends = |status: &str| wanted.contains(&status) || matches!(status, "failed" | "cancelled");
    let event = qmp.wait_for(what, PHASE_TIMEOUT, |event| {
        event["event"] == "MIGRATION" && event["data"]["status"].as_str().is_some_and(ends)
    })?;
    let status = event["data"]["status"].as_str().unwrap_or_default();
    if wanted.contains(&status) {
        return Ok(());
    }
    Err(given_up(qmp)?)
}

/// QEMU's reason for the failure of its migration.
fn reason(qmp: &mut Qmp) -> Result<String, QemuError> {
    let migration = qmp.execute("query-migrate", json!({}))?;
    Ok(migration["error-desc"].as_str().unwrap_or("it gives no reason").to_owned())
}

/// The error for a migration that QEMU has given up by itself.
///
/// # Errors
/// QMP errors.
pub fn given_up(qmp: &mut Qmp) -> Result<QemuError, QemuError> {
    Ok(QemuError::GivenUp { reason: reason(qmp)?, printed: None })
}

/// The error for a post-copy that QEMU has given up by itself.
///
/// # Errors
/// QMP errors.
pub fn post_copy_failed(qmp: &mut Qmp) -> Result<QemuError, QemuError> {
    let (reason, source) = (reason(qmp)?, vmferry::PostCopyFailed);
    Ok(QemuError::PostCopyFailed { reason, source })
}

/// How long ago an event was, by its timestamp.
pub fn age(timestamp: &Value) -> Option<Duration> {
    let at = Duration::from_secs(timestamp["seconds"].as_u64()?)
        .checked_add(Duration::from_micros(timestamp["microseconds"].as_u64()?))?;
    SystemTime::now().duration_since(UNIX_EPOCH.checked_add(at)?).ok()
}

/// The two ends of a local socket.
///
/// # Errors
/// System call errors.
pub fn pair() -> Result<(UnixStream, UnixStream), QemuError> {
    UnixStream::pair().map_err(local("make a socket pair"))
}

fn local(action: &'static str) -> impl FnOnce(std::io::Error) -> QemuError {
    move |source| QemuError::Local { action, source }
}
