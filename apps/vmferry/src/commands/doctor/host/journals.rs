//! Checks of the journals: their directory, its disk, and the sessions in them.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use vmferry::chain;
use vmferry_control::Directories;
use vmferry_handover::journal::{self, Verdict};

use crate::commands::doctor::{Findings, Level};

/// File systems in memory, which do not survive a reboot.
const TMPFS: i64 = 0x0102_1994;
const RAMFS: i64 = 0x8584_58f6;

/// Less free space than this is an error. A journal has a few hundred bytes.
const LITTLE_DISK: u64 = 16 << 20;

/// A slower sync is a warning: each switchover syncs twice, so the downtime grows noticeably.
const SLOW_SYNC: Duration = Duration::from_millis(50);

/// Whether journals survive a reboot; `None` if they have no directory.
pub fn journals_on_disk() -> Option<bool> {
    let directories = Directories::of_this_user().ok()?;
    is_on_disk(&existing(&directories.journals()))
}

fn is_on_disk(path: &Path) -> Option<bool> {
    let found = rustix::fs::statfs(path).ok()?;
    Some(![TMPFS, RAMFS].contains(&found.f_type))
}

/// The path itself, or its nearest ancestor that exists.
fn existing(path: &Path) -> std::path::PathBuf {
    path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/")).to_owned()
}

/// Checks the directory of the journals, its disk, and the sessions in it.
pub fn look(findings: &mut Findings) {
    let directories = match Directories::of_this_user() {
        Ok(directories) => directories,
        Err(error) => {
            findings.bad(
                "journals",
                Level::Error,
                "the directories of this user",
                chain(&error),
                "correct it, or set VMFERRY_STATE_DIR and VMFERRY_RUNTIME_DIR to others",
            );
            return;
        }
    };
    let journals = directories.journals();
    let (object, there) = (journals.display(), existing(&journals));
    if is_on_disk(&there) == Some(false) {
        findings.bad(
            "journals",
            Level::Warning,
            object,
            "is in memory (tmpfs): a reboot erases what this host promised, and a guest stays in \
             doubt",
            "set VMFERRY_STATE_DIR to a directory on a disk, or unset it and VMFERRY_RUNTIME_DIR",
        );
    } else if there == journals {
        findings.ok("journals", object, "is on a disk, and only this user has access");
    } else {
        findings.ok("journals", object, "will be created on a disk when it is needed");
    }
    if let Ok(found) = rustix::fs::statfs(&there) {
        let free = found.f_bavail.saturating_mul(u64::try_from(found.f_bsize).unwrap_or(0));
        if free < LITTLE_DISK {
            findings.bad(
                "journal-space",
                Level::Error,
                there.display(),
                format!(
                    "has {} left: without space for a journal no guest can be sent or received",
                    ByteSize(free)
                ),
                "free some space, or set VMFERRY_STATE_DIR to another directory",
            );
        }
    }
    if there == journals {
        look_at_sync(&journals, findings);
        look_at_sessions(&directories, findings);
    }
}

/// Measures how long a record takes to reach the disk.
fn look_at_sync(journals: &Path, findings: &mut Findings) {
    let sync = || -> std::io::Result<Duration> {
        let mut file = tempfile::tempfile_in(journals)?;
        let mut slowest = Duration::ZERO;
        for _ in 0..3 {
            let begun = Instant::now();
            file.write_all(&[b'x'; 200])?;
            file.sync_data()?;
            slowest = slowest.max(begun.elapsed());
        }
        Ok(slowest)
    };
    let object = journals.display();
    match sync() {
        Ok(took) if took < SLOW_SYNC => {
            let ms = took.as_secs_f64() * 1e3;
            findings.ok("journal-sync", object, format!("a record is on disk after {ms:.1} ms"));
        }
        Ok(took) => findings.bad(
            "journal-sync",
            Level::Warning,
            object,
            format!(
                "a record takes {} ms to reach the disk, twice in each switchover",
                took.as_millis()
            ),
            "put journals on a faster disk: a symbolic link named `journal`, or VMFERRY_STATE_DIR",
        ),
        Err(error) => findings.bad(
            "journal-sync",
            Level::Error,
            object,
            format!("no journal can be written there: {error}"),
            "check whether its disk is mounted read-only, full, or failing",
        ),
    }
}

fn look_at_sessions(directories: &Directories, findings: &mut Findings) {
    let journals = directories.journals();
    match journal::sessions(&journals) {
        Ok(sessions) => {
            for one in sessions.iter().filter(|one| one.verdict == Verdict::InDoubt) {
                findings.bad(
                    "session",
                    Level::Warning,
                    one.session,
                    "is in doubt: its guest is paused, or was lost with its VMM",
                    "look at the other host with `vmferry status --sessions`, then `vmferry \
                     resolve`",
                );
            }
        }
        Err(error) => findings.bad(
            "session",
            Level::Error,
            journals.display(),
            chain(&error),
            "peers get no answer about sessions that can't be read: see the operations guide",
        ),
    }
    for older in directories.older() {
        findings.bad(
            "older-journals",
            Level::Warning,
            older.display(),
            "has journals that an earlier release left there; this release does not read them",
            format!("see `VMFERRY_STATE_DIR={} vmferry status --sessions`", older.display()),
        );
    }
}
