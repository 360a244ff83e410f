//! What the command prints: tables and sentences for people, JSON for machines.

use std::io::{IsTerminal, Write};

use serde::Serialize;
use serde_json::json;

use crate::exit::Failure;

/// Where results, progress and failures go.
#[derive(Clone, Debug)]
pub struct Output {
    json: bool,
    terminal: bool,
}

impl Output {
    /// For people, or with `json` for machines.
    pub fn new(json: bool) -> Self {
        Self { json, terminal: std::io::stderr().is_terminal() }
    }

    /// Whether machines read it.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// Whether a progress line can be redrawn.
    pub fn is_terminal(&self) -> bool {
        self.terminal && !self.json
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

    /// One event of a long-running command: a JSON line, or the text.
    pub fn event(&self, value: &impl Serialize, text: impl FnOnce() -> String) {
        self.result(value, text);
        let _ = std::io::stdout().flush();
    }

    /// A remark for people; machines get nothing.
    pub fn note(&self, text: impl AsRef<str>) {
        if !self.json {
            let _ = writeln!(std::io::stderr(), "{}", text.as_ref());
        }
    }

    /// A failure: one JSON object on standard output, or a line on standard error.
    pub fn failure(&self, failure: &Failure) {
        let message = failure.to_string();
        if self.json {
            let error = json!({
                "ok": false,
                "error": { "code": failure.code.name(), "exit": failure.code.number(), "message": message },
            });
            let _ = writeln!(std::io::stdout(), "{error}");
        } else {
            let _ = writeln!(std::io::stderr(), "vmferry: {message}");
        }
    }
}
