//! Guests in QEMUs whose receiver has ended.
//!
//! A QEMU outlives the vmferry that received its guest. So the receiver leaves a note next to the
//! session's journal: which process the QEMU is, where its monitor is, and which receiver it
//! belongs to. The next process of that receiver finds the note. Only the journal decides what is
//! done with the guest: the note promises nothing.

mod left;
mod note;

use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use vmferry_handover::journal::{self, LaterSession};
use vmferry_wire::{GuestIdentity, SessionId};

pub use self::left::LeftQemu;
use self::note::{
    LIST, Line, SESSIONS, SUFFIX, WRITE, failed, memory, note_path, read_lines, whereabouts,
};
pub(crate) use self::note::{Note, Whereabouts};
use crate::error::QemuError;
use crate::guest;
use crate::identity::ProcessIdentity;
use crate::process::{END_TIMEOUT, has_ended_within, pidfd};
use crate::qmp::{KeptConnection, Qmp};
use crate::ram::Ranges;

/// A guest whose QEMU is running, and whose receiver has ended.
#[derive(Debug)]
pub struct Arrived {
    session: SessionId,
    receiver: String,
    process: ProcessIdentity,
    /// The process, for one that will not see it in `/proc` any more.
    handle: Option<OwnedFd>,
    monitor: PathBuf,
    connection: Option<KeptConnection>,
    /// The client's end of this connection, if QEMU has kept it.
    kept: Option<OwnedFd>,
    stays_paused: bool,
    was_run: bool,
    /// Where its memory is, if it may lack pages.
    memory: Ranges,
    path: PathBuf,
}

/// The state of a guest after [`finish`](Arrived::finish).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finished {
    /// It was already running.
    RunsAlready,
    /// It was continued.
    Continued,
    /// It is paused, and vmferry must not continue it.
    StandsStill,
}

impl Arrived {
    /// The guests of this receiver whose QEMUs are running, in the order in which they arrived.
    /// Removes this receiver's notes of QEMUs that have ended. Notes of other receivers, and of
    /// QEMUs in other PID namespaces, are left alone.
    ///
    /// # Errors
    /// If a file can't be read.
    pub fn find(journals: &Path, receiver: &str) -> Result<Vec<Self>, QemuError> {
        let mut found = Vec::new();
        for one in Self::all(journals)? {
            if one.receiver != receiver {
                continue;
            }
            // Taken first: then it is of the process that lives.
            let handle = pidfd(one.pid()).ok();
            if !one.process.lives() {
                let _ = std::fs::remove_file(&one.path);
            } else {
                let order = journal::order_of(journals, one.session)
                    .map_err(|error| failed(SESSIONS)(io::Error::other(error)))?;
                found.push((order, Self { handle, ..one.taking_connection() }));
            }
        }
        found.sort_by_key(|(order, _)| *order);
        Ok(found.into_iter().map(|(_, one)| one).collect())
    }

    /// The guest that arrived in this session, while its QEMU runs and can be seen.
    ///
    /// # Errors
    /// If the note can't be read.
    pub fn of(journals: &Path, session: SessionId) -> Result<Option<Self>, QemuError> {
        let found = Self::read(&note_path(journals, session))?;
        Ok(found.filter(|one| one.process.can_be_seen() && one.process.lives()))
    }

    /// The guests in the running QEMU with this QMP socket, by their notes. This needs no answer of
    /// QEMU.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub fn at(journals: &Path, monitor: &Path) -> Result<Vec<Self>, QemuError> {
        let monitor = std::path::absolute(monitor).map_err(failed(LIST))?;
        let mut all = Self::all(journals)?;
        all.retain(|one| one.monitor == monitor && one.process.lives());
        Ok(all)
    }

    /// All guests whose processes can be seen.
    fn all(journals: &Path) -> Result<Vec<Self>, QemuError> {
        let entries = match std::fs::read_dir(journals) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(failed(LIST))?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry.map_err(failed(LIST))?.path();
            found.extend(Self::read(&path)?.filter(|one| one.process.can_be_seen()));
        }
        Ok(found)
    }

    /// Reads a file, if it is a note that names the guest's process.
    fn read(path: &Path) -> Result<Option<Self>, QemuError> {
        let name = path.file_name().and_then(|name| name.to_str());
        let Some(session) = name.and_then(|name| name.strip_suffix(SUFFIX)?.parse().ok()) else {
            return Ok(None);
        };
        let lines = read_lines(path)?.unwrap_or_default();
        let Some(Whereabouts { receiver, process: Some(process), monitor, connection }) =
            whereabouts(&lines)
        else {
            return Ok(None);
        };
        Ok(Some(Self {
            session,
            receiver,
            process,
            handle: None,
            monitor,
            connection,
            kept: None,
            stays_paused: lines.contains(&Line::StaysPaused),
            was_run: lines.contains(&Line::Run),
            memory: memory(&lines),
            path: path.to_owned(),
        }))
    }

    /// Whether nothing is left of the guest of this session, which arrived here: its note is gone,
    /// or its QEMU has ended.
    ///
    /// # Errors
    /// If the note can't be read.
    pub fn has_ended(journals: &Path, session: SessionId) -> Result<bool, QemuError> {
        let Some(lines) = read_lines(&note_path(journals, session))? else { return Ok(true) };
        let process = whereabouts(&lines).and_then(|whereabouts| whereabouts.process);
        Ok(process.is_some_and(|process| process.can_be_seen() && !process.lives()))
    }

    /// Whether the guest of this session may be in this process. The note is removed when nothing
    /// of the guest is left.
    ///
    /// # Errors
    /// If the note can't be read.
    pub fn may_be_in(
        journals: &Path,
        session: SessionId,
        pid: Option<u32>,
    ) -> Result<bool, QemuError> {
        let Some(pid) = pid else { return Ok(true) };
        let Some(lines) = read_lines(&note_path(journals, session))? else { return Ok(false) };
        let process = whereabouts(&lines).and_then(|whereabouts| whereabouts.process);
        let is_other = |process: ProcessIdentity| {
            process.can_be_seen() && (process.pid != pid || !process.lives())
        };
        Ok(!process.is_some_and(is_other))
    }

    /// The session by which it arrived.
    #[must_use]
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// The QEMU process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// The QMP socket.
    #[must_use]
    pub fn monitor(&self) -> &Path {
        &self.monitor
    }

    /// Whether it was paused at the source, not by vmferry, and stays paused.
    #[must_use]
    pub fn stays_paused(&self) -> bool {
        self.stays_paused
    }

    /// Size of its memory in bytes, if it may lack pages.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory.iter().map(|(_, range)| range.end - range.start).sum()
    }

    /// Whether QEMU fetches the missing pages of this guest, which lacks some by the session's
    /// journal, itself: it was carried.
    #[must_use]
    pub fn fetches_by_itself(&self) -> bool {
        self.memory.is_empty()
    }

    /// Whether a QEMU that fetches by itself has every page. One that does not answer may be
    /// waiting for some.
    #[must_use]
    pub fn has_fetched_by_itself(&self) -> bool {
        // Another QEMU is not asked: it would not answer while it waits for a page.
        let Some(Ok(mut qmp)) = self.fetches_by_itself().then(|| self.connect()) else {
            return false;
        };
        let migration = qmp.execute("query-migrate", json!({}));
        migration.is_ok_and(|migration| migration["status"] == "completed")
    }

    /// Completes the arrival of a guest that belongs to this host by the session's journal:
    /// continues it, unless it has run here before or was paused at the source.
    ///
    /// # Errors
    /// QMP errors, another QEMU behind the socket, and journal errors.
    pub fn finish(&mut self, journals: &Path) -> Result<(GuestIdentity, Finished), QemuError> {
        let mut qmp = self.connect()?;
        let identity = guest::identity(&mut qmp)?;
        let status = qmp.execute("query-status", json!({}))?;
        let finished = if status["running"] == true {
            Finished::RunsAlready
        } else if self.was_run || self.stays_paused || status["status"] != "paused" {
            // Another client has paused it since, or it is the remainder of a migration to another
            // host.
            Finished::StandsStill
        } else if self.was_sent_on(journals, &identity)? {
            Finished::StandsStill
        } else {
            qmp.run_arrived()?;
            Finished::Continued
        };
        if finished != Finished::StandsStill && !self.was_run {
            self.was_run = true;
            let file = OpenOptions::new().append(true).open(&self.path).map_err(failed(WRITE))?;
            Note { path: self.path.clone(), file }.run()?;
        }
        Ok((identity, finished))
    }

    /// Whether a later session has the guest, so that this session's journal no longer counts.
    fn was_sent_on(&self, journals: &Path, guest: &GuestIdentity) -> Result<bool, QemuError> {
        let sessions = journal::sessions_of(journals, guest)
            .map_err(|error| failed(SESSIONS)(io::Error::other(error)))?;
        Ok(journal::later_session_after_arrival(&sessions, self.session) != LaterSession::None)
    }

    /// Whether QEMU still waits for a guest, so that nothing was loaded into it.
    ///
    /// # Errors
    /// As [`end`](Self::end).
    pub fn waits(&self) -> Result<bool, QemuError> {
        Ok(self.connect()?.execute("query-status", json!({}))?["status"] == "inmigrate")
    }

    /// Quits the QEMU, whose guest never runs here, and waits until it has ended.
    ///
    /// # Errors
    /// QMP errors, another QEMU behind the socket, and that it does not end in 30 s because it
    /// waits for its disks. The note is kept then.
    pub fn end(self) -> Result<(), QemuError> {
        let pid = self.pid();
        let mut qmp = self.connect()?;
        let process = pidfd(pid);
        qmp.quit()?;
        let action = "wait for the end";
        match process.and_then(|process| has_ended_within(&process, END_TIMEOUT)) {
            Ok(true) => {}
            Ok(false) => return Err(QemuError::NotEnded { pid, after: END_TIMEOUT }),
            Err(source) => return Err(QemuError::Process { action, pid, source }),
        }
        self.forget();
        Ok(())
    }

    /// Removes the note: the QEMU has no guest.
    pub fn forget(self) {
        let _ = std::fs::remove_file(&self.path);
    }

    /// Takes the connection that QEMU has kept, if it has kept one: no other client can connect. A
    /// process that restricts itself can't do that later.
    fn taking_connection(mut self) -> Self {
        let pid = self.process.pid;
        self.kept = self.connection.as_ref().and_then(|connection| connection.fetch(pid));
        self
    }

    /// Every page has arrived, and other clients may connect to QEMU again.
    pub fn free_monitor(&mut self) {
        // A QEMU that does not answer keeps it, and is still reached by it.
        if self.kept.is_some() && self.connect().is_ok_and(|mut qmp| qmp.end_keeping().is_ok()) {
            self.kept = None;
        }
    }

    /// Whether the process still runs. One that was found is not looked for in `/proc`: with
    /// systemd's `ProtectProc=invisible` (hidepid), a sandboxed process sees only itself there.
    fn lives(&self) -> bool {
        let Some(handle) = &self.handle else { return self.process.lives() };
        has_ended_within(handle, Duration::ZERO).is_ok_and(|has_ended| !has_ended)
    }

    fn connect(&self) -> Result<Qmp, QemuError> {
        if let (Some(kept), Some(connection)) = (&self.kept, &self.connection) {
            let action = "duplicate the connection to QEMU";
            let end = kept.try_clone().map_err(failed(action))?;
            return Ok(connection.resume(end, &self.monitor, self.process.pid));
        }
        let qmp = Qmp::connect(&self.monitor)?;
        let wanted = self.process.pid;
        match qmp.pid() {
            Some(found) if found == wanted => Ok(qmp),
            Some(found) => Err(QemuError::Another { found, wanted }),
            // A sandboxed process can only see that the QEMU of the note is still running.
            None if self.lives() => Ok(qmp),
            None => Err(QemuError::Unseen { path: self.monitor.clone() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const SESSION: SessionId = SessionId([7; 16]);

    fn in_process(process: ProcessIdentity) -> Whereabouts {
        let (receiver, monitor) = ("exec".into(), "/nowhere/qmp".into());
        Whereabouts { receiver, process: Some(process), monitor, connection: None }
    }

    #[test]
    fn note_is_found_while_its_process_lives() {
        let directory = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = ProcessIdentity::of(child.id()).unwrap();
        let mut note = Note::leave(directory.path(), SESSION, in_process(process.clone())).unwrap();
        let find = |receiver: &str| Arrived::find(directory.path(), receiver).unwrap();
        assert!(find("another").is_empty());
        let [found] = &find("exec")[..] else { panic!("one guest") };
        assert_eq!((found.session(), found.pid()), (SESSION, child.id()));
        assert!(!found.was_run && !found.stays_paused);
        note.append(&Line::StaysPaused).unwrap();
        note.run().unwrap();
        // A torn line, and a line of a newer release.
        note.file.write_all(b"\"later\"\n\"ru").unwrap();
        assert!(find("exec")[0].was_run && find("exec")[0].stays_paused);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(find("exec").is_empty());
        assert!(!note.path.exists(), "no process needs it any more");
    }

    #[test]
    fn notes_of_others_are_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let dead = ProcessIdentity::of(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let ours = ProcessIdentity::of(std::process::id()).unwrap();
        let elsewhere = dead.namespace.map(|inode| inode + 1);
        let leave = |number: u8, receiver: &str, process: &ProcessIdentity| {
            let process = process.clone();
            let whereabouts = Whereabouts { receiver: receiver.into(), ..in_process(process) };
            Note::leave(directory.path(), SessionId([number; 16]), whereabouts).unwrap().path
        };
        let others = leave(1, "another", &dead);
        let dead_there = ProcessIdentity { namespace: elsewhere, ..dead.clone() };
        let hidden = leave(2, "exec", &dead_there);
        // Here the PID names another process.
        let also_hidden = leave(3, "exec", &ProcessIdentity { namespace: elsewhere, ..ours });
        // Of an earlier boot, and of a release that recorded no namespace.
        let before = leave(4, "exec", &ProcessIdentity { boot: "before".into(), ..dead_there });
        let older = leave(5, "exec", &ProcessIdentity { namespace: None, ..dead });
        assert!(Arrived::find(directory.path(), "exec").unwrap().is_empty());
        for (path, is_left) in
            [(others, true), (hidden, true), (also_hidden, true), (before, false), (older, false)]
        {
            assert_eq!(path.exists(), is_left, "{}", path.display());
        }
    }

    #[test]
    fn note_names_the_process_of_a_guest() {
        let directory = tempfile::tempdir().unwrap();
        let own = std::process::id();
        let may_be_in = |pid| Arrived::may_be_in(directory.path(), SESSION, pid).unwrap();
        assert!(!may_be_in(Some(own)), "nothing is left of it");
        assert!(may_be_in(None), "no process is seen");
        let ours = ProcessIdentity::of(own).unwrap();
        let before = ProcessIdentity { started: ours.started - 1, ..ours.clone() };
        let elsewhere = ours.namespace.map(|inode| inode + 1);
        let elsewhere = ProcessIdentity { namespace: elsewhere, ..ours.clone() };
        for (process, is_in) in [
            (Some(ours), true),
            (Some(ProcessIdentity::of(1).unwrap()), false),
            (Some(before), false),
            (Some(elsewhere), true),
            (None, true),
        ] {
            let monitor = "/nowhere/qmp".into();
            let receiver = "exec".into();
            let whereabouts = Whereabouts { receiver, process, monitor, connection: None };
            let note = Note::leave(directory.path(), SESSION, whereabouts).unwrap();
            assert_eq!(may_be_in(Some(own)), is_in);
            note.remove();
        }
    }

    #[test]
    fn note_does_not_match_a_process_that_reuses_the_pid() {
        let ours = ProcessIdentity::of(std::process::id()).unwrap();
        assert!(ours.lives());
        let older = ProcessIdentity { started: ours.started - 1, ..ours.clone() };
        assert!(!older.lives());
        assert!(!ProcessIdentity { boot: "another".into(), ..ours }.lives());
    }
}
