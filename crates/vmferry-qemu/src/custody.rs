//! Whether a QEMU's guest may be continued, and by whom.
//!
//! vmferry pauses guests: for a harvest, and by QEMU's own migration. Others pause them too: an
//! operator's `stop`, a disk with `werror=stop`, a watchdog or a panic whose action is to pause, a
//! guest that has powered off under `-no-shutdown`. vmferry continues only what it has paused
//! itself. All `cont`s go through here.
//!
//! Every connection has a [`Life`], which hears all events from its beginning. Whether the guest
//! ran when QEMU's migration stopped it is in the state that QEMU saves, which has the last word.
//! What nobody can tell is an operator's `stop` while vmferry or QEMU's migration has paused the
//! guest already: QEMU says nothing of it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use vmferry::PoweredOff;

use crate::error::QemuError;
use crate::qmp::{Qmp, QmpError};
use crate::stream::is_paused;

/// How long QEMU may refuse to run a guest on: it tidies up after a migration, or another QEMU is
/// about to give the locks of the guest's disks back.
const CONTINUE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long an event is awaited that may have come before this connection did.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// The section of QEMU's state that says whether the guest ran: its name, and the bytes between the
/// name and the text. Source: QEMU `migration/global_state.c`.
const GLOBAL_STATE: &[u8] = b"\x0bglobalstate";
const BEFORE_TEXT: usize = 4 + 4 + 4;

/// What is known of a guest's life by one connection.
#[derive(Debug, Default)]
pub(crate) struct Life {
    /// Somebody else than vmferry has paused it.
    paused_by_others: bool,
    /// vmferry has stopped it for a harvest, or for the whole of its migration.
    our_stop: bool,
    powered_off: bool,
    /// When it was stopped last, since 1970, by the stamp of the event.
    stopped_at: Option<Duration>,
    /// QEMU has paused it by itself.
    failed: bool,
}

impl Life {
    /// Hears of an event.
    pub fn hear(&mut self, event: &Value) {
        let action = event["data"]["action"].as_str();
        match event["event"].as_str() {
            Some("SHUTDOWN") => self.powered_off = true,
            Some("STOP") => self.stopped_at = stamp(event),
            Some("RESUME") => {
                (self.stopped_at, self.failed, self.powered_off) = (None, false, false);
                // The client that paused it has continued it.
                self.paused_by_others = false;
            }
            Some("BLOCK_IO_ERROR") if action == Some("stop") => self.failed = true,
            Some("WATCHDOG" | "GUEST_PANICKED") if action == Some("pause") => self.failed = true,
            _ => {}
        }
    }
}

/// What is done with the guest of a connection.
impl Qmp {
    /// Looks at the guest to move: it runs, or another client has paused it, and it stays so.
    ///
    /// # Errors
    /// One that has powered off, or can't be moved as it is.
    pub(crate) fn take_custody(&mut self) -> Result<(), QemuError> {
        let status = self.status()?;
        match status.as_str() {
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

    /// Whether somebody else than vmferry has paused the guest.
    pub(crate) fn is_paused_by_others(&self) -> bool {
        self.life.paused_by_others
    }

    /// The guest was paused when it was found.
    pub(crate) fn found_paused(&mut self) {
        self.life.paused_by_others = true;
    }

    /// Makes sure that the guest has not powered off.
    ///
    /// # Errors
    /// That it has, or the connection's.
    pub(crate) fn must_be_alive(&mut self) -> Result<(), QemuError> {
        let heard = self.look_at_events().map(|_| ());
        if self.life.powered_off {
            return Err(QemuError::PoweredOff(PoweredOff));
        }
        Ok(heard?)
    }

    /// What came of the attempt to let the guest run on, which is no failure where it has powered
    /// off.
    ///
    /// # Errors
    /// As it came.
    pub(crate) fn unless_powered_off(
        &mut self,
        resumed: Result<(), QemuError>,
    ) -> Result<(), QemuError> {
        resumed.or_else(|error| match self.explain(error) {
            QemuError::PoweredOff(_) => Ok(()),
            error => Err(error),
        })
    }

    /// Why something has failed: that the guest has powered off, if it has.
    pub(crate) fn explain(&mut self, error: QemuError) -> QemuError {
        match self.must_be_alive() {
            Err(powered_off @ QemuError::PoweredOff(_)) => powered_off,
            _ => error,
        }
    }

    /// Pauses the guest, if it runs. On return all of its I/O is done: `stop` drains every disk.
    ///
    /// # Errors
    /// QMP's.
    pub(crate) fn pause_guest(&mut self) -> Result<(), QemuError> {
        let status = self.status()?;
        if status != "running" {
            self.life.paused_by_others = true;
            return Ok(());
        }
        let asked = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.life.failed = false;
        self.execute("stop", json!({}))?;
        // One that was stopped before it was asked was stopped by somebody else, between the two
        // orders.
        if self.life.stopped_at.is_some_and(|stopped| stopped < asked) || self.life.failed {
            self.life.paused_by_others = true;
        } else {
            self.life.our_stop = true;
        }
        Ok(())
    }

    /// Continues a guest that [`pause_guest`](Self::pause_guest) has paused; not one that somebody
    /// has paused, or whose I/O has failed meanwhile.
    ///
    /// # Errors
    /// What QEMU says last.
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

    /// Takes from a guest's state what QEMU itself says: whether the guest ran when QEMU stopped
    /// it.
    pub(crate) fn learn_from_state(&mut self, state: &[u8]) {
        if let Some(runs) = ran_by(state) {
            self.life.paused_by_others = !runs && !self.life.our_stop;
        }
    }

    /// The guest was paused already when QEMU's migration stopped it, by what QEMU says in its
    /// state.
    pub(crate) fn was_paused(&mut self) {
        // By vmferry, for the whole of its migration, if not by somebody else.
        self.life.paused_by_others |= !self.life.our_stop;
    }

    /// The guest may have been stopped: whether somebody else than QEMU's migration did it.
    ///
    /// # Errors
    /// QMP's.
    pub(crate) fn heard_stop(&mut self) -> Result<(), QemuError> {
        if !self.life.our_stop && matches!(self.status()?.as_str(), "paused" | "io-error") {
            self.life.paused_by_others = true;
        }
        Ok(())
    }

    /// Continues a guest that vmferry, or QEMU's migration, has paused, and leaves every other as
    /// it is.
    ///
    /// # Errors
    /// QMP's, and QEMU's refusal after some time.
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

    /// Continues a guest that has come, was promised to this host, and never ran here.
    ///
    /// # Errors
    /// QMP's.
    pub(crate) fn run_arrived(&mut self) -> Result<(), QemuError> {
        self.execute("cont", json!({}))?;
        self.announce();
        Ok(())
    }

    /// A process before this one may have paused the guest by `stop`.
    pub(crate) fn may_have_stopped(&mut self) {
        self.life.our_stop = true;
    }

    /// Tells the switches of the network where the guest is. That is worth no failure.
    pub(crate) fn announce(&mut self) {
        // As QEMU does it after a migration. Source: QEMU `qapi/net.json`, `migration/options.c`.
        let times = json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 });
        let _ = self.execute("announce-self", times);
    }

    fn status(&mut self) -> Result<String, QemuError> {
        let status = self.execute("query-status", json!({}))?;
        Ok(status["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Waits a moment for an event, which need not come.
    pub(crate) fn look_for(&mut self, what: &str, name: &str) -> Result<(), QemuError> {
        match self.wait_for(what, LOOK_PERIOD, |event| event["event"] == name) {
            Ok(_) | Err(QmpError::TimedOut { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether the guest ran when this state was saved; none if the state does not say.
fn ran_by(state: &[u8]) -> Option<bool> {
    let at = state.windows(GLOBAL_STATE.len()).position(|window| window == GLOBAL_STATE)?;
    // Instance and version of the section, and the length of the text.
    let text = state.get(at + GLOBAL_STATE.len() + BEFORE_TEXT..)?;
    let end = text.iter().take(100).position(|&byte| byte == 0)?;
    Some(!is_paused(&text[..end]))
}

fn stamp(event: &Value) -> Option<Duration> {
    let seconds = event["timestamp"]["seconds"].as_u64()?;
    let micros = event["timestamp"]["microseconds"].as_u64()?;
    Duration::from_secs(seconds).checked_add(Duration::from_micros(micros))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(names: &[(&str, Option<&str>)]) -> Life {
        let mut life = Life::default();
        for (name, action) in names {
            life.hear(&json!({ "event": name, "data": { "action": action } }));
        }
        life
    }

    #[test]
    fn life_hears_what_pauses_a_guest_and_what_ends_it() {
        assert!(heard(&[("BLOCK_IO_ERROR", Some("stop")), ("STOP", None)]).failed);
        assert!(!heard(&[("BLOCK_IO_ERROR", Some("report"))]).failed);
        assert!(heard(&[("WATCHDOG", Some("pause"))]).failed);
        assert!(!heard(&[("GUEST_PANICKED", Some("pause")), ("RESUME", None)]).failed);
        assert!(heard(&[("SHUTDOWN", None), ("STOP", None)]).powered_off);
    }

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
