//! The record of a migration that `--save-run` writes: the events that `--json` prints, a line
//! each, and then the result.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::exit::{Code, Failure};

/// A file that a migration's events are written into.
#[derive(Debug)]
pub struct SavedRun {
    path: PathBuf,
    file: BufWriter<File>,
    /// The first write error. It is reported once, at the end: a migration does not fail because of
    /// its record.
    failed: Option<std::io::Error>,
}

impl SavedRun {
    /// Creates the file, or truncates an existing one.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let file = File::create(path).map_err(|error| {
            Failure::new(
                Code::Usage,
                format!("the run can't be saved in {}: {error}", path.display()),
            )
        })?;
        Ok(Self { path: path.to_owned(), file: BufWriter::new(file), failed: None })
    }

    /// Adds an event.
    pub fn event(&mut self, event: &Value) {
        if self.failed.is_none() {
            // Flushed after each event, so that a killed process leaves a usable record.
            let written = writeln!(self.file, "{event}").and_then(|()| self.file.flush());
            self.failed = written.err();
        }
    }

    /// Adds the result. Returns a message if an event or the result could not be written.
    pub fn end(
        mut self,
        result: Result<&Value, &Failure>,
        stamp: impl Fn(&Value) -> Value,
    ) -> Option<String> {
        let last = match result {
            Ok(stats) => json!({ "event": "done", "stats": stats }),
            Err(failure) => json!({ "event": "failed", "error": failure.facts(), "stats": null }),
        };
        self.event(&stamp(&last));
        let (path, error) = (self.path, self.failed?);
        Some(format!("the run could not be saved completely in {}: {error}", path.display()))
    }
}
