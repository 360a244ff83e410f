//! What QEMU's events report of a guest: who has paused it, and whether it has powered off.

use std::time::Duration;

use serde_json::Value;

/// The guest's state as one connection knows it from events.
#[derive(Debug, Default)]
pub(crate) struct Life {
    /// Another client, or QEMU itself after an error, has paused it.
    pub paused_by_others: bool,
    /// vmferry has stopped it for a harvest, or for its whole migration.
    pub our_stop: bool,
    pub powered_off: bool,
    /// When it was last stopped, since 1970, by the timestamp of the event.
    pub stopped_at: Option<Duration>,
    /// QEMU has paused it by itself, such as after an I/O error.
    pub failed: bool,
}

impl Life {
    /// Processes an event.
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

fn stamp(event: &Value) -> Option<Duration> {
    let seconds = event["timestamp"]["seconds"].as_u64()?;
    let micros = event["timestamp"]["microseconds"].as_u64()?;
    Duration::from_secs(seconds).checked_add(Duration::from_micros(micros))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn heard(names: &[(&str, Option<&str>)]) -> Life {
        let mut life = Life::default();
        for (name, action) in names {
            life.hear(&json!({ "event": name, "data": { "action": action } }));
        }
        life
    }

    #[test]
    fn life_records_pauses_and_the_end_of_a_guest() {
        assert!(heard(&[("BLOCK_IO_ERROR", Some("stop")), ("STOP", None)]).failed);
        assert!(!heard(&[("BLOCK_IO_ERROR", Some("report"))]).failed);
        assert!(heard(&[("WATCHDOG", Some("pause"))]).failed);
        assert!(!heard(&[("GUEST_PANICKED", Some("pause")), ("RESUME", None)]).failed);
        assert!(heard(&[("SHUTDOWN", None), ("STOP", None)]).powered_off);
    }
}
