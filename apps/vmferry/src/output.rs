//! What the command prints: tables and sentences for people, JSON for machines.

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use serde::Serialize;
use serde_json::{Value, json};

use crate::exit::Failure;

/// Where results, progress and failures go.
#[derive(Clone, Debug)]
pub struct Output {
    json: bool,
    quiet: bool,
    terminal: bool,
    /// The migration that events are about, since one has said it.
    run: Arc<Mutex<Option<Value>>>,
}

impl Output {
    /// For people, or with `json` for machines; `quiet` leaves out what is neither a result nor a failure.
    pub fn new(json: bool, quiet: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self { json, quiet, terminal, run: Arc::default() }
    }

    /// Whether machines read it.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// Whether progress can be redrawn.
    pub fn is_terminal(&self) -> bool {
        self.terminal && !self.json && !self.quiet
    }

    /// The result: one JSON object, or the text.
    pub fn result(&self, value: &impl Serialize, text: impl FnOnce() -> String) {
        let line = if self.json {
            serde_json::to_string(value)
                .unwrap_or_else(|error| json!({ "error": error.to_string() }).to_string())
        } else {
            text()
        };
        // Whoever closed standard output does not want it.
        let _ = writeln!(std::io::stdout(), "{}", line.trim_end());
    }

    /// One event of a long-running command: a JSON line with its time and its migration, or the text.
    pub fn event(&self, value: &impl Serialize, text: impl FnOnce() -> String) {
        let stamped = if self.json { self.stamped(value) } else { Value::Null };
        self.result(&stamped, text);
        let _ = std::io::stdout().flush();
    }

    /// An event with `time` (RFC 3339, UTC) and, of a migration, `run`: the session's number, which both hosts have.
    pub fn stamped(&self, value: &impl Serialize) -> Value {
        let mut value = serde_json::to_value(value).unwrap_or_default();
        let mut run = self.run.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(said) = value.get("run") {
            *run = Some(said.clone());
        }
        if let Value::Object(members) = &mut value {
            let now = humantime::format_rfc3339_millis(SystemTime::now());
            members.insert("time".into(), now.to_string().into());
            if let Some(run) = &*run {
                members.insert("run".into(), run.clone());
            }
        }
        value
    }

    /// What comes is about another migration, or none.
    pub fn end_of_run(&self) {
        *self.run.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// A remark for people; machines get nothing.
    pub fn note(&self, text: impl AsRef<str>) {
        if !self.json && !self.quiet {
            let _ = writeln!(std::io::stderr(), "{}", text.as_ref());
        }
    }

    /// A failure: one JSON object on standard output, or a line on standard error.
    pub fn failure(&self, failure: &Failure) {
        let message = failure.to_string();
        if self.json {
            let error = json!({ "ok": false, "error": failure.facts() });
            let _ = writeln!(std::io::stdout(), "{error}");
        } else {
            let options = failure.code.options().map(|options| format!(" (options: {options})"));
            let options = options.unwrap_or_default();
            let _ = writeln!(std::io::stderr(), "vmferry: {message}{options}");
        }
    }
}

/// Columns of the terminal that standard output is, if it is one.
pub fn columns() -> Option<usize> {
    let stdout = std::io::stdout();
    let size = rustix::termios::tcgetwinsize(&stdout).ok()?;
    (size.ws_col > 0).then_some(usize::from(size.ws_col))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_bear_their_time_and_once_it_is_known_their_migration() {
        let output = Output::new(true, false);
        let before = output.stamped(&json!({ "event": "listening" }));
        assert!(before["run"].is_null() && before["time"].as_str().unwrap().ends_with('Z'));
        output.stamped(&json!({ "event": "started", "run": "x" }));
        assert_eq!(output.clone().stamped(&json!({ "event": "ready" }))["run"], "x");
        output.end_of_run();
        assert!(output.stamped(&json!({ "event": "listening" }))["run"].is_null());
    }
}
