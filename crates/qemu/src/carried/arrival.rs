//! A QEMU that receives a carried guest.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::channels;
use super::place::Place;
use super::sleep::Sleep;
use crate::error::QemuError;
use crate::qmp::Qmp;
use crate::settings::Settings;
use crate::state;
use crate::view::Looker;

/// How long QEMU may take to finish loading after it got the last byte.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);

/// A guest that a QEMU is receiving.
#[derive(Debug)]
pub struct Arrival {
    /// Our ends of its streams.
    sockets: Vec<UnixStream>,
    /// Detects that QEMU is stopped, if its process is visible.
    sleep: Option<Sleep>,
}

impl Arrival {
    /// Tells QEMU, which has these `settings`, to receive a guest. Returns the sockets that the
    /// streams must be written into. With several streams, they use a socket in `place`. QEMU may
    /// answer no command until each stream has begun. It can receive no other guest afterwards.
    ///
    /// # Errors
    /// QMP errors and system call errors.
    pub fn begin(
        qmp: &mut Qmp,
        settings: &Settings,
        channels: u8,
        place: Option<&Place>,
        looker: &Looker,
    ) -> Result<(Self, Vec<UnixStream>), QemuError> {
        settings.for_taking_streams(qmp, channels)?;
        let streams = channels::open_incoming(qmp, channels, place)?;
        let copies = || {
            let copies: Result<Vec<_>, _> = streams.iter().map(UnixStream::try_clone).collect();
            copies.map_err(|source| QemuError::Local { action: "duplicate a socket", source })
        };
        let watched = qmp.pid().or_else(|| qmp.listener());
        let sleep = watched.map(|pid| Sleep::watch(pid, Arc::clone(looker), copies()?));
        let sleep = sleep.transpose()?;
        Ok((Self { sockets: copies()?, sleep }, streams))
    }

    /// Waits until QEMU has received everything. The guest is paused.
    ///
    /// # Errors
    /// Why QEMU could not receive it. This QEMU can't be used any more.
    pub fn complete(&self, qmp: &mut Qmp) -> Result<(), QemuError> {
        if let Some(asleep) = self.sleep.as_ref().and_then(Sleep::error) {
            return Err(asleep);
        }
        let wanted = |status: &str| matches!(status, "completed" | "failed");
        let event = qmp.wait_for("load the guest", LOAD_TIMEOUT, |event| {
            event["event"] == "MIGRATION" && event["data"]["status"].as_str().is_some_and(wanted)
        });
        let event = event.map_err(QemuError::from).map_err(QemuError::while_taking)?;
        if event["data"]["status"] != "completed" {
            return Err(state::given_up(qmp).unwrap_or_else(QemuError::while_taking));
        }
        let status = qmp.execute("query-status", json!({}))?;
        if status["running"] == true {
            return Err(QemuError::State {
                found: "running".into(),
                wanted: "standing still until the source has given its guest away",
            });
        }
        Ok(())
    }

    /// Unblocks all that wait for these streams.
    pub fn end(&self) {
        for socket in &self.sockets {
            // A stream that QEMU has closed can't be shut down any more.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}
