//! The note that says in which process a guest is.
//!
//! A note is a file `SESSION.guest` next to the session's journal. Each line is a JSON object of
//! one of the kinds of [`Line`], appended and synced.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmferry_wire::SessionId;

use crate::error::QemuError;
use crate::identity::ProcessIdentity;
use crate::qmp::KeptConnection;
use crate::ram::Ranges;

/// The suffix of a note's name.
pub(super) const SUFFIX: &str = ".guest";

/// A line of a note.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Line {
    /// The guest is being received by this QEMU.
    Arriving(Whereabouts),
    /// It was paused at the source, not by vmferry, and stays paused.
    StaysPaused,
    /// It may run before all its pages have arrived. The addresses of its memory in QEMU, for each
    /// slot.
    Lacks(Ranges),
    /// It ran here, so vmferry must not continue it again.
    Run,
}

/// Where a guest is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Whereabouts {
    /// The receiver, named by the options that it was started with.
    pub receiver: String,
    /// The QEMU; `None` if its process is not visible to the receiver. The receiver's next process
    /// does not find the guest then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessIdentity>,
    /// Its QMP socket.
    pub monitor: PathBuf,
    /// The receiver's connection to it, which QEMU keeps while it fetches pages itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection: Option<KeptConnection>,
}

/// The note of a session that is under way.
#[derive(Debug)]
pub(crate) struct Note {
    pub(super) path: PathBuf,
    pub(super) file: File,
}

impl Note {
    /// Creates the note.
    pub fn leave(
        journals: &Path,
        session: SessionId,
        whereabouts: Whereabouts,
    ) -> Result<Self, QemuError> {
        let path = note_path(journals, session);
        let file = OpenOptions::new().append(true).create_new(true).open(&path);
        let mut note = Self { file: file.map_err(failed(MAKE))?, path };
        let written = note.append(&Line::Arriving(whereabouts));
        let synced = written.and_then(|()| {
            File::open(journals).and_then(|directory| directory.sync_all()).map_err(failed(SYNC))
        });
        synced.inspect_err(|_| note.remove())?;
        Ok(note)
    }

    /// Records that the guest must stay paused.
    pub fn stays_paused(&mut self) -> Result<(), QemuError> {
        self.append(&Line::StaysPaused)
    }

    /// Records that the guest may lack pages, and where its memory is in QEMU.
    pub fn lacks(&mut self, ranges: &Ranges) -> Result<(), QemuError> {
        self.append(&Line::Lacks(ranges.clone()))
    }

    /// Records that the guest was continued.
    pub fn run(&mut self) -> Result<(), QemuError> {
        self.append(&Line::Run)
    }

    /// Removes the note: the guest never runs here.
    pub fn remove(&self) {
        // A note that is left behind names a process that is gone.
        let _ = std::fs::remove_file(&self.path);
    }

    pub(super) fn append(&mut self, line: &Line) -> Result<(), QemuError> {
        let mut bytes = serde_json::to_vec(line).map_err(|error| failed(WRITE)(error.into()))?;
        bytes.push(b'\n');
        self.file.write_all(&bytes).and_then(|()| self.file.sync_data()).map_err(failed(WRITE))
    }
}

/// The path of a session's note.
pub(super) fn note_path(journals: &Path, session: SessionId) -> PathBuf {
    journals.join(format!("{session}{SUFFIX}"))
}

/// The lines of a note, if it is there.
pub(super) fn read_lines(path: &Path) -> Result<Option<Vec<Line>>, QemuError> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed(READ))?,
    };
    // A line without an end was torn during a write. Lines that this release does not know are from
    // a newer one.
    let whole = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
    Ok(Some(whole.filter_map(|line| serde_json::from_str(line).ok()).collect()))
}

/// Where the memory of a guest is that may lack pages, by the lines of its note.
pub(super) fn memory(lines: &[Line]) -> Ranges {
    let found = lines.iter().rev().find_map(|line| match line {
        Line::Lacks(ranges) => Some(ranges.clone()),
        _ => None,
    });
    found.unwrap_or_default()
}

/// The place of the guest, by the lines of its note.
pub(super) fn whereabouts(lines: &[Line]) -> Option<Whereabouts> {
    lines.iter().find_map(|line| match line {
        Line::Arriving(whereabouts) => Some(whereabouts.clone()),
        _ => None,
    })
}

const MAKE: &str = "make the note of where the guest is, beside its journal";
const READ: &str = "read the note of where the guest is, beside its journal";
pub(super) const WRITE: &str = "write the note of where the guest is, beside its journal";
pub(super) const LIST: &str = "list the directory of the journals";
const SYNC: &str = "sync the directory of the journals";
pub(super) const SESSIONS: &str = "read the journals of this guest";

/// The error of a file system action.
pub(super) fn failed(action: &'static str) -> impl Fn(io::Error) -> QemuError {
    move |source| QemuError::Local { action, source }
}
