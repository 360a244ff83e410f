//! The process that runs a hook.
//!
//! A receiver is [restricted](crate::restrict) and can't start programs, so this process, which is
//! started earlier, runs the hook for it. A sender uses one too: if the sender is killed, this
//! process kills a running `before`, so that the guardian can run `after`. The parent holds the
//! other end of a socket; when it closes, the hook is killed.

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use serde_json::json;
use vmferry_qemu::ProcessIdentity;

use super::{Call, Hook, HookError, Outcome, Phase, Side, tell_failure};
use crate::args::HookRunnerOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// A request to the process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Request {
    /// Run the hook. The answer is the reason of a failure, or null.
    Run(Call),
    /// A session is open. Its outcome is in a journal from now on, so the next receiver runs its
    /// `after`. There is no answer.
    Opened,
}

/// The parent's handle of the process that runs a hook.
pub struct HookRunner {
    stream: UnixStream,
    /// Held while a request is answered.
    asking: Mutex<()>,
    child: Mutex<Child>,
    process: ProcessIdentity,
}

impl HookRunner {
    /// Starts the process. A receiver does this before it restricts itself.
    pub fn spawn(hook: &Hook) -> Result<Self, Failure> {
        let (ours, theirs) = UnixStream::pair()?;
        let child = Command::new("/proc/self/exe")
            .arg("run-hook")
            .arg("--timeout-ms")
            .arg(hook.timeout.as_millis().to_string())
            .arg("--")
            .arg(&hook.program)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            // It may outlive the reader of this process's output.
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()?;
        let process = ProcessIdentity::of(child.id())?;
        Ok(Self { stream: ours, asking: Mutex::new(()), child: Mutex::new(child), process })
    }

    /// The process.
    pub fn process(&self) -> &ProcessIdentity {
        &self.process
    }

    /// See [`Hook::run`].
    ///
    /// # Errors
    /// As there.
    pub fn run(&self, call: &Call) -> Result<(), HookError> {
        let lost = |error: std::io::Error| {
            HookError::Runner(format!("the process that runs the hook can't be reached: {error}"))
        };
        let _asking = self.asking.lock();
        writeln!(&self.stream, "{}", json!(Request::Run(call.clone()))).map_err(lost)?;
        let mut line = String::new();
        BufReader::new(&self.stream).read_line(&mut line).map_err(lost)?;
        match serde_json::from_str(&line) {
            Ok(None::<String>) => Ok(()),
            Ok(Some(reason)) => Err(HookError::Runner(reason)),
            Err(_) => Err(lost(std::io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// See [`Hook::run_after`].
    pub fn run_after(&self, call: &Call, output: &Output) {
        if let Err(error) = self.run(call) {
            tell_failure(&error, output);
        }
    }

    /// Reports that a session is open and has a journal.
    pub fn opened(&self) {
        // If the process is gone, no `after` is pending.
        let _ = writeln!(&self.stream, "{}", json!(Request::Opened));
    }

    /// Kills a running `before`, so that its [`run`](Self::run) fails. No other can start.
    pub fn stop(&self) {
        // Fails harmlessly if the process is gone.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Waits for the process to exit after [`stop`](Self::stop).
    pub fn wait(&self) {
        // Fails harmlessly if it was waited for before.
        let _ = self.child.lock().wait();
    }
}

/// `vmferry run-hook`: serves requests until the parent has gone.
pub fn serve(options: &HookRunnerOptions, output: &Output) -> Result<(), Failure> {
    crate::signals::ignore()?;
    let timeout = Duration::from_millis(options.timeout_ms);
    let hook = Hook { program: options.program.clone(), timeout };
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let mut lines = BufReader::new(stream.try_clone()?);
    let mut unanswered = None;
    loop {
        let mut line = String::new();
        // A read error means that the parent has gone, too.
        if lines.read_line(&mut line).unwrap_or(0) == 0 {
            break;
        }
        let request =
            serde_json::from_str(&line).map_err(|error| Failure::of(Code::Internal, error))?;
        let Request::Run(call) = request else {
            unanswered = None;
            continue;
        };
        let is_before = call.phase == Phase::Before;
        // `after` may continue without the parent, because its result has no effect.
        let ran = hook.run_while(&call, || !is_before || !is_gone(&stream));
        unanswered = (is_before && call.side == Side::Destination).then_some(call);
        let reason = ran.err().map(|error| vmferry::chain(&error));
        if writeln!(&stream, "{}", json!(reason)).is_err() {
            break;
        }
    }
    // No session was opened, so the guest stayed at the source.
    if let Some(call) = unanswered {
        hook.run_after(&call.after(Outcome::Kept), output);
    }
    Ok(())
}

/// Whether the parent closed its end. It sends nothing while it waits for an answer, so a readable
/// socket means the end.
fn is_gone(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}
