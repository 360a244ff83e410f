//! The demo's two processes: this same program, observed through its `--json` events.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;

use crate::commands::await_child;
use crate::exit::{Code, Failure};

/// How long a child may take until its next event, or until it exits. The demo does not wait on a
/// child while it migrates.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running `vmferry`, killed when dropped.
pub struct Child {
    process: std::process::Child,
    events: BufReader<ChildStdout>,
    what: String,
}

impl Child {
    /// Starts `vmferry --json ARGUMENTS` with its own runtime directory, as if on a separate host.
    pub fn start(arguments: &[impl AsRef<OsStr>], directory: &Path) -> Result<Self, Failure> {
        let what = arguments.first().map(|word| word.as_ref().to_string_lossy().into_owned());
        let mut process = Command::new(std::env::current_exe()?)
            .arg("--json")
            .args(arguments)
            .env("VMFERRY_RUNTIME_DIR", directory)
            .env_remove("VMFERRY_STATE_DIR")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let Some(stdout) = process.stdout.take() else {
            return Err(Failure::new(Code::Internal, "a child has no output"));
        };
        Ok(Self { process, events: BufReader::new(stdout), what: what.unwrap_or_default() })
    }

    /// Waits for the event with this name and skips others. A failure of the child is returned.
    pub fn event(&mut self, name: &str) -> Result<Value, Failure> {
        let mut line = String::new();
        loop {
            line.clear();
            self.await_line(name)?;
            if self.events.read_line(&mut line)? == 0 {
                let text = format!("`vmferry {}` ended before its event `{name}`", self.what);
                return Err(Failure::new(Code::Internal, text));
            }
            let event: Value =
                serde_json::from_str(&line).map_err(|error| Failure::of(Code::Internal, error))?;
            if event["event"] == name {
                return Ok(event);
            }
            if event["ok"] == false {
                let message = event["error"]["message"].as_str().unwrap_or("it failed");
                let text = format!("`vmferry {}`: {message}", self.what);
                return Err(Failure::new(Code::Internal, text));
            }
        }
    }

    /// Waits until there is a line to read.
    fn await_line(&self, name: &str) -> Result<(), Failure> {
        if !self.events.buffer().is_empty() {
            return Ok(());
        }
        let mut polled = [PollFd::new(self.events.get_ref(), PollFlags::IN)];
        let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        if poll(&mut polled, Some(&timeout)).map_err(std::io::Error::from)? > 0 {
            return Ok(());
        }
        let waited = PATIENCE.as_secs();
        let text = format!("`vmferry {}` did not report `{name}` within {waited} s", self.what);
        Err(Failure::new(Code::Internal, text))
    }

    /// Waits for the child to exit successfully.
    pub fn wait(&mut self) -> Result<(), Failure> {
        let Some(status) = await_child(&mut self.process, PATIENCE)? else {
            let waited = PATIENCE.as_secs();
            let text = format!("`vmferry {}` did not end within {waited} s", self.what);
            return Err(Failure::new(Code::Internal, text));
        };
        if status.success() {
            Ok(())
        } else {
            let text = format!("`vmferry {}` ended with {status}", self.what);
            Err(Failure::new(Code::Internal, text))
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Both fail harmlessly if the child has exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
