//! What the command prints: tables and sentences for people, JSON for machines.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};

use crate::exit::Failure;

/// Where results, progress and failures go.
#[derive(Clone, Debug)]
pub struct Output {
    json: bool,
    quiet: bool,
    terminal: bool,
    /// The migration (`run`) that events belong to; set by the first event that names one.
    run: Arc<Mutex<Option<Value>>>,
}

impl Output {
    /// For people, or with `json` for machines. `quiet` suppresses everything but results and
    /// failures.
    pub fn new(json: bool, quiet: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self { json, quiet, terminal, run: Arc::default() }
    }

    /// Whether the output is JSON.
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
            printable(&text())
        };
        // A reader that closed standard output does not want the result.
        let _ = writeln!(std::io::stdout(), "{}", line.trim_end());
    }

    /// One event of a long-running command: a JSON line with its time and its migration, or the
    /// text.
    pub fn event(&self, value: &impl Serialize, text: impl FnOnce() -> String) {
        let stamped = if self.json { self.stamped(value) } else { Value::Null };
        self.result(&stamped, text);
        let _ = std::io::stdout().flush();
    }

    /// Adds `time` (RFC 3339, UTC) and, during a migration, `run` to an event. `run` is the
    /// session's number, which is the same on both hosts.
    pub fn stamped(&self, value: &impl Serialize) -> Value {
        let mut value = serde_json::to_value(value).unwrap_or_default();
        let mut run = self.run.lock();
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

    /// Later events belong to another migration, or to none.
    pub fn end_of_run(&self) {
        *self.run.lock() = None;
    }

    /// A remark for people. It is left out of JSON output.
    pub fn note(&self, text: impl AsRef<str>) {
        if !self.json && !self.quiet {
            let _ = writeln!(std::io::stderr(), "{}", printable(text.as_ref()));
        }
    }

    /// A failure, with which the command ends: one JSON object on standard output, where other
    /// threads can print nothing after it, or a line on standard error.
    pub fn failure(&self, failure: &Failure) {
        let message = failure.to_string();
        if self.json {
            let error = json!({ "ok": false, "error": failure.facts() });
            let mut last = std::io::stdout().lock();
            let _ = writeln!(last, "{error}");
            // Threads of the command may still tell events, and the failure is the last line.
            std::mem::forget(last);
        } else {
            let options = failure.code.options().map(|options| format!(" (options: {options})"));
            let options = options.unwrap_or_default();
            let _ = writeln!(std::io::stderr(), "vmferry: {}{options}", printable(&message));
        }
    }
}

/// A text without control characters, with which a peer's words could change the terminal.
fn printable(text: &str) -> String {
    text.replace(|c: char| c.is_control() && !matches!(c, '\n' | '\t'), " ")
}

/// Width of the terminal on standard output, or `None` if it is not a terminal.
pub fn columns() -> Option<usize> {
    let stdout = std::io::stdout();
    let size = rustix::termios::tcgetwinsize(&stdout).ok()?;
    (size.ws_col > 0).then_some(usize::from(size.ws_col))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_have_no_control_characters_but_line_ends() {
        assert_eq!(printable("a\n\tb"), "a\n\tb");
        assert_eq!(printable("a\u{1b}[2K\rb\u{9b}"), "a [2K b ");
    }

    #[test]
    fn event_has_its_time_and_once_known_its_migration() {
        let output = Output::new(true, false);
        let before = output.stamped(&json!({ "event": "listening" }));
        assert!(before["run"].is_null() && before["time"].as_str().unwrap().ends_with('Z'));
        output.stamped(&json!({ "event": "started", "run": "x" }));
        assert_eq!(output.clone().stamped(&json!({ "event": "ready" }))["run"], "x");
        output.end_of_run();
        assert!(output.stamped(&json!({ "event": "listening" }))["run"].is_null());
    }
}
