//! A process that sends a guest, `vmferry send`, as an operator would start it. It outlives the
//! agent.
//!
//! It prints into a file that is locked as long as it lives: the lock belongs to the open file,
//! which is its standard output. So the next agent knows whether it lives, also if an agent was
//! killed while it started it.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::Value;
use uuid::Uuid;
use vmferry_fleet::MigrationProgress;
use vmferry_handover::SessionId;

use crate::exit::Failure;

/// The file of a process.
#[derive(Debug)]
pub struct Sender {
    path: PathBuf,
    /// The bytes that were read as whole lines.
    read: u64,
    /// What it has said.
    pub said: Said,
    /// It was told to end.
    pub cancelled: bool,
}

/// What a process has said so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    /// Its session.
    pub session: Option<SessionId>,
    /// Its progress.
    pub progress: Option<MigrationProgress>,
    /// Its last word.
    pub end: Option<End>,
}

/// The last word of a process.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// The guest has moved.
    Moved {
        /// The time that it was paused, in milliseconds.
        downtime_ms: Option<f64>,
        /// Why QEMU's own migration was carried; `None` if it was not.
        carried: Option<String>,
    },
    /// It has not.
    Failed {
        /// Such as `cancelled`.
        code: String,
        /// Why.
        message: String,
    },
}

impl Sender {
    /// The process of a migration, which is started by `command` unless an earlier agent has done
    /// that. `directory` is the same for all agents of this host. `ended` is called when a process
    /// has ended that this agent has started.
    pub fn begin(
        directory: &Path,
        migration: Uuid,
        command: impl FnOnce() -> Result<Command, Failure>,
        ended: impl FnOnce() + Send + 'static,
    ) -> Result<Self, Failure> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let path = directory.join(format!("{migration}.out"));
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create(true).mode(0o600).open(&path)?;
        let sender = Self { path, read: 0, said: Said::default(), cancelled: false };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // It lives.
            Err(Errno::WOULDBLOCK) => return Ok(sender),
            locked => locked.map_err(io::Error::from)?,
        }
        if file.metadata()?.len() == 0 {
            start(command()?, file, ended)?;
        }
        Ok(sender)
    }

    /// The process that an earlier agent has started; `None` if there was none.
    pub fn find(directory: &Path, migration: Uuid) -> Option<Self> {
        let path = directory.join(format!("{migration}.out"));
        let sender = Self { path, read: 0, said: Said::default(), cancelled: false };
        let has_content = std::fs::metadata(&sender.path).is_ok_and(|about| about.len() > 0);
        (has_content || sender.lives()).then_some(sender)
    }

    /// Whether the process lives.
    pub fn lives(&self) -> bool {
        let Ok(file) = File::open(&self.path) else { return false };
        flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
    }

    /// Reads what it has said since the last call. Returns whether it has ended.
    pub fn listen(&mut self) -> io::Result<bool> {
        // Asked first: what a process has printed before its end is in the file.
        let lives = self.lives();
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.read))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if line.ends_with(b"\n") {
                self.read += line.len() as u64;
                if let Ok(value) = serde_json::from_slice::<Value>(line) {
                    self.said.hear(&value);
                }
            }
        }
        Ok(!lives)
    }

    /// Removes the file of a process that has ended.
    pub fn forget(&self) {
        // A file that stays belongs to a migration that is over.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Said {
    fn hear(&mut self, line: &Value) {
        if let Some(session) = line["run"].as_str().and_then(|text| text.parse().ok()) {
            self.session = Some(session);
        }
        match line["event"].as_str() {
            Some("progress") => {
                self.progress = Some(MigrationProgress {
                    phase: line["phase"].as_str().unwrap_or_default().to_owned(),
                    sent_bytes: line["sent_bytes"].as_u64().unwrap_or_default(),
                    eta_ms: line["forecast"]["eta_ms"].as_f64(),
                    in_doubt: line["in_doubt"] == true,
                });
            }
            Some(_) => {}
            None if line["ok"] == false => {
                let text = |name: &str| line["error"][name].as_str().unwrap_or_default().to_owned();
                self.end = Some(End::Failed { code: text("code"), message: text("message") });
            }
            None => {
                let downtime_ms = line["downtime_ms"].as_f64();
                let carried = line["qemu"]["not_attached"].as_str().map(str::to_owned);
                self.end = Some(End::Moved { downtime_ms, carried });
            }
        }
    }
}

fn start(
    mut command: Command,
    output: File,
    ended: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let mut child = command.stdin(Stdio::null()).stdout(output).spawn()?;
    // That it has ended is decided by the lock.
    let waits = move || {
        let _ = child.wait();
        ended();
    };
    std::thread::Builder::new().name("sender".into()).spawn(waits).map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn shell(script: &str) -> impl FnOnce() -> Result<Command, Failure> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        || Ok(command)
    }

    fn ended(sender: &mut Sender) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !sender.listen().unwrap() {
            assert!(Instant::now() < deadline, "it lives for ever");
            // The end of a lock causes no wake-up.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn process_is_started_once_whatever_happens_to_agents() {
        let directory = tempfile::tempdir().unwrap();
        let (path, id) = (directory.path().join("moves"), Uuid::from_bytes([1; 16]));
        let pipe = directory.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let script = format!(
            "echo '{{\"event\":\"started\",\"run\":\"{}\"}}'; cat {pipe:?} >/dev/null; \
             echo '{{\"downtime_ms\":7.5}}'",
            SessionId([3; 16])
        );
        let mut first = Sender::begin(&path, id, shell(&script), || {}).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while first.said.session.is_none() {
            assert!(!first.listen().unwrap() && Instant::now() < deadline, "{first:?}");
            // A file causes no wake-up.
            std::thread::sleep(Duration::from_millis(5));
        }
        // The next agent.
        let mut second = Sender::begin(&path, id, shell("echo '{\"ok\":false}'"), || {}).unwrap();
        assert!(second.lives());
        std::fs::write(&pipe, "").unwrap();
        ended(&mut second);
        let moved = End::Moved { downtime_ms: Some(7.5), carried: None };
        assert_eq!(
            (second.said.session, second.said.end.clone()),
            (first.said.session, Some(moved))
        );
        // And one that begins after the end.
        let mut third = Sender::find(&path, id).unwrap();
        assert!(third.listen().unwrap());
        assert_eq!(third.said, second.said);
        third.forget();
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
        assert!(Sender::find(&path, id).is_none());
    }

    #[test]
    fn file_of_an_agent_that_was_killed_before_it_started_anything_is_used() {
        let directory = tempfile::tempdir().unwrap();
        let id = Uuid::from_bytes([2; 16]);
        std::fs::write(directory.path().join(format!("{id}.out")), "").unwrap();
        let failed = r#"{"ok":false,"error":{"code":"cancelled","message":"no"}}"#;
        let script = format!("echo '{failed}'");
        let mut sender = Sender::begin(directory.path(), id, shell(&script), || {}).unwrap();
        ended(&mut sender);
        let end = End::Failed { code: "cancelled".into(), message: "no".into() };
        assert_eq!(sender.said.end, Some(end));
    }

    #[test]
    fn process_that_was_killed_has_no_last_word() {
        let directory = tempfile::tempdir().unwrap();
        let id = Uuid::from_bytes([3; 16]);
        let mut sender = Sender::begin(directory.path(), id, shell("kill -9 $$"), || {}).unwrap();
        ended(&mut sender);
        assert_eq!(sender.said, Said::default());
    }
}
