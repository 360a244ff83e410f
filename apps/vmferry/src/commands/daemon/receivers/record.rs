//! What is written down about a receiver, so that the next daemon knows it: a file beside its
//! socket.
//!
//! Receivers can write to this directory after they have restricted themselves. So a record names a
//! template and a guest, and has no command.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use vmferry_handover::SessionId;
use vmferry_proxy::is_plain_name;
use vmferry_qemu::ProcessIdentity;

use super::messages::Order;

/// The ending of a record's name.
const SUFFIX: &str = ".json";

/// The most records that are read. Each is of a process of this host.
const MAX_RECORDS: usize = 4096;

/// The most bytes of a record.
const MAX_BYTES: u64 = 16 << 10;

/// A receiver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// What it was started for.
    pub order: Order,
    /// Its process.
    pub process: ProcessIdentity,
}

/// The socket of a receiver.
pub fn socket(directory: &Path, session: SessionId) -> PathBuf {
    directory.join(format!("{session}.socket"))
}

fn path(directory: &Path, session: SessionId) -> PathBuf {
    directory.join(format!("{session}{SUFFIX}"))
}

impl Record {
    /// Writes it in place of an earlier one.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        let path = path(directory, self.order.session);
        remove_file(&path)?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        file.write_all(&serde_json::to_vec(self)?)
    }

    /// All records. Files that are none are removed.
    ///
    /// # Errors
    /// The directory can't be read.
    pub fn all(directory: &Path) -> io::Result<Vec<Self>> {
        let mut records = Vec::new();
        for entry in std::fs::read_dir(directory)?.take(MAX_RECORDS) {
            let path = entry?.path();
            if path.extension().is_none_or(|ending| ending != &SUFFIX[1..]) {
                continue;
            }
            match Self::read(&path) {
                Ok(record) => records.push(record),
                Err(_) => remove_file(&path)?,
            }
        }
        Ok(records)
    }

    fn read(path: &Path) -> io::Result<Self> {
        // It may be replaced at any time, by a link or a pipe, too.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let flags = flags.bits().cast_signed();
        let file = File::options().read(true).custom_flags(flags).open(path)?;
        let mut text = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut text)?;
        let record: Self = serde_json::from_slice(&text)?;
        let order = &record.order;
        let names_file = path.file_stem().is_some_and(|stem| *stem == *order.session.to_string());
        match names_file && is_plain_name(&order.template) && is_plain_name(&order.guest.name) {
            true => Ok(record),
            false => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Forgets a receiver that has ended, and its socket.
pub fn remove(directory: &Path, session: SessionId) {
    // What stays is looked at again by the next daemon.
    let _ = remove_file(&path(directory, session));
    let _ = remove_file(&socket(directory, session));
}

fn remove_file(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use vmferry_wire::GuestIdentity;

    use super::*;

    fn record(number: u8) -> Record {
        let guest = GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() };
        let session = SessionId([number; 16]);
        let order = Order { template: "small".into(), guest, session, source: None };
        Record { order, process: ProcessIdentity::of(std::process::id()).unwrap() }
    }

    #[test]
    fn records_are_found_again_and_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let mut one = record(1);
        one.write(directory.path()).unwrap();
        one.process.pid = 1;
        one.write(directory.path()).unwrap();
        std::fs::write(directory.path().join("other"), "").unwrap();
        assert_eq!(Record::all(directory.path()).unwrap(), [one.clone()]);
        remove(directory.path(), one.order.session);
        assert!(Record::all(directory.path()).unwrap().is_empty());
    }

    #[test]
    fn files_that_are_no_records_are_removed_and_never_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        record(1).write(directory.path()).unwrap();
        std::fs::rename(at(&format!("{}.json", SessionId([1; 16]))), at("moved.json")).unwrap();
        std::fs::write(at("text.json"), "text").unwrap();
        let pipe = at("pipe.json");
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", at("link.json")).unwrap();
        assert!(Record::all(directory.path()).unwrap().is_empty());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
