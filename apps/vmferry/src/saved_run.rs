//! The record of a migration that `--save-run` keeps: what `--json` prints, line by line, and how it ended.

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
    /// What could not be written; told once, at the end: a migration does not fail for its record.
    failed: Option<std::io::Error>,
}

impl SavedRun {
    /// Makes the file, or begins it anew.
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
            // One at a time: what is there when the process is killed counts.
            let written = writeln!(self.file, "{event}").and_then(|()| self.file.flush());
            self.failed = written.err();
        }
    }

    /// Adds how it ended, and says what of all this could not be written.
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
        Some(format!("the run is not, or not whole, in {}: {error}", path.display()))
    }
}
