//! Hooks: a program that is told before a guest changes hosts and afterwards, such as to keep an HA
//! manager from starting the guest again at the source.
//!
//! * *before*: the guest runs at the source, and no promise about it was made. Where the program
//!   fails or takes too long, the migration ends and the guest stays.
//! * *after*: it is decided where the guest is. What the program says changes nothing.
//!
//! Neither runs while the guest is paused. A receiver is [restricted](crate::restrict) and can't
//! start programs, so a process that is begun before does it, which runs this one program and reads
//! from nobody but the receiver.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;
use vmferry_wire::GuestIdentity;

use crate::args::{HookOptions, HookRunnerOptions};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// How often is looked whether the program has ended. A child wakes nobody who also waits for a
/// time.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// When the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Before the guest changes hosts.
    Before,
    /// When it is decided where it is.
    After,
}

/// Which host this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// The one that the guest leaves.
    Source,
    /// The one that it goes to.
    Destination,
}

/// Where the guest is afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// At the destination.
    Moved,
    /// At the source.
    Kept,
}

/// What the program is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Call {
    /// When.
    pub phase: Phase,
    /// Where.
    pub side: Side,
    /// The guest, by the name that the source gives it.
    pub guest: GuestIdentity,
    /// The session, if it has a number here.
    pub session: Option<String>,
    /// The other host, as far as it is known.
    pub peer: Option<String>,
    /// Afterwards.
    pub result: Option<Outcome>,
}

/// A program and how long it may take.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hook {
    program: PathBuf,
    timeout: Duration,
}

/// Why a hook counts as failed.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// It could not be started, or waited for.
    #[error("the hook {program} could not be run: check that it is there and executable")]
    Run {
        /// The program.
        program: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// It has said no.
    #[error("the hook {program} failed ({status}): what it has printed says why")]
    Failed {
        /// The program.
        program: PathBuf,
        /// How it ended.
        status: ExitStatus,
    },
    /// It took too long, and was ended.
    #[error("the hook {program} has not ended in {} s, and was ended", after.as_secs())]
    TimedOut {
        /// The program.
        program: PathBuf,
        /// For how long it was waited for.
        after: Duration,
    },
    /// The process that runs it for a receiver says so.
    #[error("{0}")]
    There(String),
}

/// Guests of other VMMs have none.
pub fn must_be_of_a_qemu(options: &HookOptions) -> Result<(), Failure> {
    let text = "--hook is for guests of QEMU: use it with --qemu, or with --exec";
    options.hook.as_ref().map_or(Ok(()), |_| Err(Failure::new(Code::Usage, text)))
}

impl Hook {
    /// What the options ask for.
    pub fn of(options: &HookOptions) -> Result<Option<Self>, Failure> {
        let absolute = |program: &PathBuf| -> Result<Self, Failure> {
            Ok(Self { program: std::path::absolute(program)?, timeout: options.hook_timeout })
        };
        options.hook.as_ref().map(absolute).transpose()
    }

    /// Runs the program to its end. What it prints as errors comes where this process prints its
    /// own.
    ///
    /// # Errors
    /// If it does not end well, or in time.
    pub fn run(&self, call: &Call) -> Result<(), HookError> {
        let failed = |source| HookError::Run { program: self.program.clone(), source };
        let mut child = self.command(call).spawn().map_err(failed)?;
        match wait(&mut child, self.timeout).map_err(failed)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(HookError::Failed { program: self.program.clone(), status }),
            None => {
                end(&mut child);
                Err(HookError::TimedOut { program: self.program.clone(), after: self.timeout })
            }
        }
    }

    /// The same where what it says changes nothing any more: that it failed is told.
    pub fn run_after(&self, call: &Call, output: &Output) {
        if let Err(error) = self.run(call) {
            tell_failure(&error, output);
        }
    }

    fn command(&self, call: &Call) -> Command {
        let mut command = Command::new(&self.program);
        let phase = word(&call.phase);
        command
            .arg(&phase)
            .env("VMFERRY_HOOK", &phase)
            .env("VMFERRY_SIDE", word(&call.side))
            .env("VMFERRY_GUEST", &call.guest.name)
            .env("VMFERRY_UUID", call.guest.uuid.to_string())
            .env("VMFERRY_SESSION", call.session.as_deref().unwrap_or_default())
            .env("VMFERRY_PEER", call.peer.as_deref().unwrap_or_default())
            .env("VMFERRY_RESULT", call.result.as_ref().map(word).unwrap_or_default())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            // What ends vmferry from its terminal must not end it midway, and all of it is ended if
            // it takes too long.
            .process_group(0);
        command
    }
}

/// Says that a hook has failed which could change nothing.
fn tell_failure(error: &HookError, output: &Output) {
    let reason = vmferry::chain(error);
    output.event(&json!({ "event": "hook-failed", "reason": reason }), || {
        format!("{reason}. The guest is where it is all the same")
    });
}

/// A word of the command line's JSON.
fn word(value: &impl Serialize) -> String {
    json!(value).as_str().unwrap_or_default().to_owned()
}

fn wait(child: &mut Child, timeout: Duration) -> std::io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + timeout;
    loop {
        match child.try_wait()? {
            None if Instant::now() < deadline => std::thread::sleep(LOOK_PERIOD),
            ended => return Ok(ended),
        }
    }
}

/// Ends the program and all that it has started.
fn end(child: &mut Child) {
    let group = rustix::process::Pid::from_raw(child.id().cast_signed());
    if let Some(group) = group {
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    let _ = child.wait();
}

/// The process that runs a receiver's hook. It ends when this does.
pub struct HookRunner(Mutex<UnixStream>);

impl HookRunner {
    /// Begins it, before the receiver is restricted.
    pub fn spawn(hook: &Hook) -> Result<Self, Failure> {
        let (ours, theirs) = UnixStream::pair()?;
        Command::new(std::env::current_exe()?)
            .arg("run-hook")
            .arg("--timeout-ms")
            .arg(hook.timeout.as_millis().to_string())
            .arg("--")
            .arg(&hook.program)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .process_group(0)
            .spawn()?;
        Ok(Self(Mutex::new(ours)))
    }

    /// See [`Hook::run`].
    ///
    /// # Errors
    /// As there.
    pub fn run(&self, call: &Call) -> Result<(), HookError> {
        let lost = |error: std::io::Error| {
            HookError::There(format!("the process that runs the hook can't be asked: {error}"))
        };
        let stream = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        writeln!(&*stream, "{}", json!(call)).map_err(lost)?;
        let mut line = String::new();
        BufReader::new(&*stream).read_line(&mut line).map_err(lost)?;
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
}

/// `vmferry run-hook`: what a receiver asks for, until it has gone.
pub fn serve(options: &HookRunnerOptions) -> Result<(), Failure> {
    crate::signals::ignore()?;
    let timeout = Duration::from_millis(options.timeout_ms);
    let hook = Hook { program: options.program.clone(), timeout };
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    for line in BufReader::new(stream.try_clone()?).lines() {
        let call: Call =
            serde_json::from_str(&line?).map_err(|error| Failure::of(Code::Internal, error))?;
        let reason = hook.run(&call).err().map(|error| vmferry::chain(&error));
        writeln!(&stream, "{}", json!(reason))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
