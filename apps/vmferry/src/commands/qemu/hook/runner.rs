//! The process that runs a hook.
//!
//! A receiver is [restricted](crate::restrict) and can't start programs, so this process, which is
//! begun before, runs the one program for it. A sender has one too, so that a `before` that still
//! runs when the sender is killed ends before its guardian runs `after`: who asks for a hook holds
//! the other end of a connection, and when that is closed the program is ended.

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use serde_json::json;
use vmferry_qemu::ProcessIdentity;

use super::{Call, Hook, HookError, Outcome, Phase, Side, tell_failure};
use crate::args::HookRunnerOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// What the process is asked.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Request {
    /// To run the hook. The answer is why it failed, or null.
    Run(Call),
    /// To remember that a session is open: what becomes of its guest is in a journal, and its
    /// `after` is the next receiver's. There is no answer.
    Opened,
}

/// The process that runs a hook, as the one sees it that asks for it.
pub struct HookRunner {
    stream: UnixStream,
    /// Held while a question is answered.
    asking: Mutex<()>,
    child: Mutex<Child>,
    process: ProcessIdentity,
}

impl HookRunner {
    /// Begins it; of a receiver, before that is restricted.
    pub fn spawn(hook: &Hook) -> Result<Self, Failure> {
        let (ours, theirs) = UnixStream::pair()?;
        let child = Command::new("/proc/self/exe")
            .arg("run-hook")
            .arg("--timeout-ms")
            .arg(hook.timeout.as_millis().to_string())
            .arg("--")
            .arg(&hook.program)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            // It may outlast who reads this process's output.
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
            HookError::There(format!("the process that runs the hook can't be asked: {error}"))
        };
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(&self.stream, "{}", json!(Request::Run(call.clone()))).map_err(lost)?;
        let mut line = String::new();
        BufReader::new(&self.stream).read_line(&mut line).map_err(lost)?;
        match serde_json::from_str(&line) {
            Ok(None::<String>) => Ok(()),
            Ok(Some(reason)) => Err(HookError::There(reason)),
            Err(_) => Err(lost(std::io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// See [`Hook::run_after`].
    pub fn run_after(&self, call: &Call, output: &Output) {
        if let Err(error) = self.run(call) {
            tell_failure(&error, output);
        }
    }

    /// A session is open, with a journal.
    pub fn opened(&self) {
        // One that is gone has nothing to remember.
        let _ = writeln!(&self.stream, "{}", json!(Request::Opened));
    }

    /// Ends a `before` that runs, whose [`run`](Self::run) fails then, and lets no other begin.
    pub fn stop(&self) {
        // One that is gone is not connected.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Waits for the end of the process, which was [stopped](Self::stop).
    pub fn wait(&self) {
        // One that was waited for has ended.
        let _ = self.child.lock().unwrap_or_else(PoisonError::into_inner).wait();
    }
}

/// `vmferry run-hook`: what is asked for, until the one who asks has gone.
pub fn serve(options: &HookRunnerOptions, output: &Output) -> Result<(), Failure> {
    crate::signals::ignore()?;
    let timeout = Duration::from_millis(options.timeout_ms);
    let hook = Hook { program: options.program.clone(), timeout };
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let mut lines = BufReader::new(stream.try_clone()?);
    let mut unanswered = None;
    loop {
        let mut line = String::new();
        // A connection that is broken has ended too.
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
        // What `after` says changes nothing, so that it may go on alone.
        let ran = hook.run_while(&call, || !is_before || !is_gone(&stream));
        unanswered = (is_before && call.side == Side::Destination).then_some(call);
        let reason = ran.err().map(|error| vmferry::chain(&error));
        if writeln!(&stream, "{}", json!(reason)).is_err() {
            break;
        }
    }
    // No session was opened: nothing of the guest is here.
    if let Some(call) = unanswered {
        hook.run_after(&call.after(Outcome::Kept), output);
    }
    Ok(())
}

/// Whether the other end is closed: nothing is said while an answer is awaited.
fn is_gone(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}
