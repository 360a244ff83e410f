//! Whether a QEMU's guest may be continued, and by which party.
//!
//! vmferry pauses guests: for a harvest, and through QEMU's own migration. Other causes of a pause
//! are an operator's `stop`, a disk with `werror=stop`, a watchdog or a panic whose action is to
//! pause, and a guest that has powered off under `-no-shutdown`. vmferry continues only what it has
//! paused itself. All `cont` commands go through this module.
//!
//! Every connection has a [`Life`], which processes all events from its beginning. Whether the
//! guest ran when QEMU's migration stopped it is in the state that QEMU saves; that state overrides
//! the events. One case can't be detected: an operator's `stop` while vmferry or QEMU's migration
//! has already paused the guest. QEMU does not report it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::json;
use vmferry::PoweredOff;

use crate::error::QemuError;
use crate::qmp::{Qmp, QmpError};
use crate::settings;
use crate::stream::is_paused;

/// How long QEMU may refuse to continue a guest: it cleans up after a migration, or another QEMU is
/// about to release the locks of the guest's disks.
const CONTINUE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait for an event that may have come before this connection did.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// The section of QEMU's state that says whether the guest ran: its name, and the number of bytes
/// between the name and the text. Source: QEMU `migration/global_state.c`.
const GLOBAL_STATE: &[u8] = b"\x0bglobalstate";
const BEFORE_TEXT: usize = 4 + 4 + 4;

/// Pausing and continuing the guest of a connection.
impl Qmp {
    /// Checks the run state of the guest to move: it runs, or another client has paused it, in
    /// which case it stays paused.
    ///
    /// # Errors
    /// If the guest has powered off, or can't be moved in its state.
    pub(crate) fn take_custody(&mut self) -> Result<(), QemuError> {
        let status = self.status()?;
        match status.as_str() {
            "paused" if self.has_failed_in_post_copy()? => {
                return Err(QemuError::State {
                    found: status,
                    wanted: "running. Its post-copy has failed at the end: the guest runs at \
                             another host. `quit` by QMP ends this QEMU",
                });
            }
            "running" => self.life.paused_by_others = false,
            "paused" | "io-error" | "watchdog" | "guest-panicked" | "prelaunch" => {
                self.life.paused_by_others = true;
            }
            "shutdown" => return Err(QemuError::PoweredOff(PoweredOff)),
            "postmigrate" => {
                return Err(QemuError::State {
                    found: status,
                    wanted: "running, or paused by another client. A migration of it has come to \
                         its end, and QEMU allows no other one before the guest has run. If the \
                         journals say that the guest is this host's, continue it with `cont` by \
                         QMP; `stop` right after that pauses it again",
                });
            }
            _ => {
                return Err(QemuError::State {
                    found: status,
                    wanted: "running, or paused by another client: if the journals say that \
                         the guest is this host's, continue it with `cont` by QMP",
                });
            }
        }
        Ok(())
    }

    /// Whether a post-copy from here has failed after its guest was handed over. QEMU's settings
    /// are restored if the guest stays.
    pub(crate) fn has_failed_in_post_copy(&mut self) -> Result<bool, QemuError> {
        let migration = self.execute("query-migrate", json!({}))?;
        Ok(migration["status"] == "failed" && settings::may_use_post_copy(self)?)
    }

    /// Whether another client, or QEMU itself after an error, has paused the guest.
    pub(crate) fn is_paused_by_others(&self) -> bool {
        self.life.paused_by_others
    }

    /// Records that the guest was already paused when it was found.
    pub(crate) fn found_paused(&mut self) {
        self.life.paused_by_others = true;
    }

    /// Checks that the guest has not powered off.
    ///
    /// # Errors
    /// `QemuError::PoweredOff`, or connection errors.
    pub(crate) fn must_be_alive(&mut self) -> Result<(), QemuError> {
        let heard = self.look_at_events().map(|_| ());
        if self.life.powered_off {
            return Err(QemuError::PoweredOff(PoweredOff));
        }
        Ok(heard?)
    }

    /// Maps the result of an attempt to continue the guest: it is no failure if the guest has
    /// powered off.
    ///
    /// # Errors
    /// The error of the attempt, otherwise.
    pub(crate) fn unless_powered_off(
        &mut self,
        resumed: Result<(), QemuError>,
    ) -> Result<(), QemuError> {
        resumed.or_else(|error| match self.explain(error) {
            QemuError::PoweredOff(_) => Ok(()),
            error => Err(error),
        })
    }

    /// Replaces an error by its cause if the guest has powered off.
    pub(crate) fn explain(&mut self, error: QemuError) -> QemuError {
        match self.must_be_alive() {
            Err(powered_off @ QemuError::PoweredOff(_)) => powered_off,
            _ => error,
        }
    }

    /// Pauses the guest, if it runs. On return all of its I/O is complete: `stop` drains every
    /// disk.
    ///
    /// # Errors
    /// QMP errors.
    pub(crate) fn pause_guest(&mut self) -> Result<(), QemuError> {
        let status = self.status()?;
        if status != "running" {
            self.life.paused_by_others = true;
            return Ok(());
        }
        let asked = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.life.failed = false;
        self.execute("stop", json!({}))?;
        // If the guest was stopped before the request, another client stopped it between the two
        // commands.
        if self.life.stopped_at.is_some_and(|stopped| stopped < asked) || self.life.failed {
            self.life.paused_by_others = true;
        } else {
            self.life.our_stop = true;
        }
        Ok(())
    }

    /// Pauses the guest before QEMU is told to start its own post-copy. QEMU 10.0 continues a guest
    /// that ran when its migration stopped it, if its streams end while it sends the last page: the
    /// destination runs the guest by then. A guest that was paused before stays paused. Source:
    /// QEMU 10.0 `migration/migration.c`, `migration_iteration_finish`.
    ///
    /// Returns false if QEMU's migration has stopped the guest first, at the end of its pre-copy.
    ///
    /// # Errors
    /// QMP errors.
    pub(crate) fn pause_for_post_copy(&mut self) -> Result<bool, QemuError> {
        let (others, ours) = (self.life.paused_by_others, self.life.our_stop);
        self.pause_guest()?;
        if self.status()? != "finish-migrate" {
            return Ok(true);
        }
        // QEMU stopped the guest before `stop`, or before that was decided.
        (self.life.paused_by_others, self.life.our_stop) = (others, ours);
        Ok(false)
    }

    /// Continues a guest that [`pause_guest`](Self::pause_guest) has paused, unless another client
    /// has paused it meanwhile, or its I/O has failed.
    ///
    /// # Errors
    /// QEMU's last error.
    pub(crate) fn end_pause(&mut self) -> Result<(), QemuError> {
        if !self.life.our_stop {
            return Ok(());
        }
        if self.life.failed {
            (self.life.our_stop, self.life.paused_by_others) = (false, true);
            return Ok(());
        }
        self.continue_guest()
    }

    /// Learns from a guest's saved state whether the guest ran when QEMU stopped it.
    pub(crate) fn learn_from_state(&mut self, state: &[u8]) {
        if let Some(runs) = ran_by(state) {
            self.life.paused_by_others = !runs && !self.life.our_stop;
        }
    }

    /// Records that the guest was already paused when QEMU's migration stopped it, as its saved
    /// state says.
    pub(crate) fn was_paused(&mut self) {
        // If no other client has paused it, vmferry has, for its whole migration.
        self.life.paused_by_others |= !self.life.our_stop;
    }

    /// After a possible stop of the guest: finds out whether another party than QEMU's migration
    /// did it.
    ///
    /// # Errors
    /// QMP errors.
    pub(crate) fn heard_stop(&mut self) -> Result<(), QemuError> {
        if !self.life.our_stop && matches!(self.status()?.as_str(), "paused" | "io-error") {
            self.life.paused_by_others = true;
        }
        Ok(())
    }

    /// Continues a guest that vmferry, or QEMU's migration, has paused. Any other paused guest
    /// stays paused.
    ///
    /// # Errors
    /// QMP errors, and QEMU's refusal after the timeout.
    pub(crate) fn continue_guest(&mut self) -> Result<(), QemuError> {
        let deadline = Instant::now() + CONTINUE_TIMEOUT;
        loop {
            let status = self.status()?;
            let ours = match status.as_str() {
                "running" => {
                    self.life.our_stop = false;
                    return Ok(());
                }
                "finish-migrate" | "postmigrate" | "inmigrate" => !self.life.paused_by_others,
                "paused" => self.life.our_stop,
                _ => false,
            };
            if !ours {
                self.life.paused_by_others = true;
                return Ok(());
            }
            match self.execute("cont", json!({})) {
                Ok(_) => {
                    self.life.our_stop = false;
                    return Ok(());
                }
                Err(QmpError::Refused { .. }) if Instant::now() < deadline => {
                    self.look_for("run its guest", "RESUME")?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Continues a guest that has arrived, was promised to this host, and never ran here.
    ///
    /// # Errors
    /// QMP errors.
    pub(crate) fn run_arrived(&mut self) -> Result<(), QemuError> {
        self.execute("cont", json!({}))?;
        self.announce();
        Ok(())
    }

    /// Records that an earlier process may have paused the guest by `stop`.
    pub(crate) fn may_have_stopped(&mut self) {
        self.life.our_stop = true;
    }

    /// Announces the guest's new location to the network switches. Failures are ignored.
    pub(crate) fn announce(&mut self) {
        // The same values as QEMU uses after a migration. Source: QEMU `qapi/net.json`,
        // `migration/options.c`.
        let times = json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 });
        let _ = self.execute("announce-self", times);
    }

    fn status(&mut self) -> Result<String, QemuError> {
        let status = self.execute("query-status", json!({}))?;
        Ok(status["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Waits briefly for an event, which need not come.
    pub(crate) fn look_for(&mut self, what: &str, name: &str) -> Result<(), QemuError> {
        match self.wait_for(what, LOOK_PERIOD, |event| event["event"] == name) {
            Ok(_) | Err(QmpError::TimedOut { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether the guest ran when this state was saved; `None` if the state does not say.
fn ran_by(state: &[u8]) -> Option<bool> {
    let at = state.windows(GLOBAL_STATE.len()).position(|window| window == GLOBAL_STATE)?;
    // Instance and version of the section, and the length of the text.
    let text = state.get(at + GLOBAL_STATE.len() + BEFORE_TEXT..)?;
    let end = text.iter().take(100).position(|&byte| byte == 0)?;
    Some(!is_paused(&text[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ran_by_reads_the_section_of_the_state() {
        let state = |text: &[u8]| {
            let mut bytes = b"QEVM....\x04\0\0\0\x02".to_vec();
            bytes.extend_from_slice(GLOBAL_STATE);
            bytes.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, text.len() as u8 + 1]);
            bytes.extend_from_slice(text);
            bytes.extend_from_slice(&[0; 100]);
            bytes
        };
        assert_eq!(ran_by(&state(b"running")), Some(true));
        assert_eq!(ran_by(&state(b"paused")), Some(false));
        assert_eq!(ran_by(b"QEVM"), None);
    }
}
