//! Hooks: a program that runs before a guest changes hosts and afterwards, for example to keep an
//! HA manager from restarting the guest at the source.
//!
//! * *before*: the guest runs at the source, and nothing was promised about it. If the program
//!   fails or takes too long, the migration is cancelled and the guest stays.
//! * *after*: it is decided which host has the guest. The program's exit status has no effect.
//!
//! Neither runs while the guest is paused. `before` is run by a [separate process](HookRunner).

mod runner;

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;
use vmferry_wire::GuestIdentity;

pub use self::runner::{HookRunner, serve};
use crate::args::HookOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// How often to check whether the program has exited. The blocking `wait` has no timeout.
const POLL_PERIOD: Duration = Duration::from_millis(5);

/// Upper bound for `before` at the destination: the source waits 30 s for the answer to its offer
/// ([`vmferry::Timeouts::accept`]), and guest memory is prepared after the hook.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(20);

/// When the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Before the guest changes hosts.
    Before,
    /// When it is decided which host has the guest.
    After,
}

/// Which host this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// The host that the guest leaves.
    Source,
    /// The host that the guest goes to.
    Destination,
}

/// The outcome of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The guest is at the destination.
    Moved,
    /// The guest is at the source.
    Kept,
}

/// The arguments of one run of the hook.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Call {
    /// Before or after.
    pub phase: Phase,
    /// This host's side.
    pub side: Side,
    /// The guest, as the source names it.
    pub guest: GuestIdentity,
    /// The session's number, if known.
    pub session: Option<String>,
    /// The other host, if known.
    pub peer: Option<String>,
    /// The outcome, for `after`.
    pub result: Option<Outcome>,
}

impl Call {
    /// The `after` call that follows this `before` call.
    pub fn after(&self, result: Outcome) -> Self {
        Self { phase: Phase::After, result: Some(result), ..self.clone() }
    }
}

/// A hook's program and how long it may take.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hook {
    program: PathBuf,
    timeout: Duration,
}

/// Why a hook counts as failed.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// The program could not be started, or waited for.
    #[error("the hook {program} could not be run: check that it exists and is executable")]
    Run {
        /// The program.
        program: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The program failed.
    #[error("the hook {program} failed ({status}): see its output")]
    Failed {
        /// The program.
        program: PathBuf,
        /// Its exit status.
        status: ExitStatus,
    },
    /// The program took too long and was killed.
    #[error("the hook {program} did not finish within {} s and was killed", after.as_secs())]
    TimedOut {
        /// The program.
        program: PathBuf,
        /// The time limit.
        after: Duration,
    },
    /// The process that runs the hook reports a failure, or can't be reached.
    #[error("{0}")]
    Runner(String),
}

/// Refuses `--hook` for guests of the built-in VMM.
pub fn must_be_of_a_qemu(options: &HookOptions) -> Result<(), Failure> {
    let text = "--hook is for guests of QEMU: use it with --qemu, or with --exec";
    options.hook.as_ref().map_or(Ok(()), |_| Err(Failure::new(Code::Usage, text)))
}

impl Hook {
    /// The hook that the options name, if any.
    pub fn of(options: &HookOptions) -> Result<Option<Self>, Failure> {
        let absolute = |program: &PathBuf| -> Result<Self, Failure> {
            Ok(Self { program: std::path::absolute(program)?, timeout: options.hook_timeout })
        };
        options.hook.as_ref().map(absolute).transpose()
    }

    /// Runs the program and waits for it. It inherits this process's standard error.
    ///
    /// # Errors
    /// If it fails or takes too long.
    pub fn run(&self, call: &Call) -> Result<(), HookError> {
        self.run_while(call, || true)
    }

    /// The same, but kills the program when `is_wanted` returns false.
    fn run_while(&self, call: &Call, is_wanted: impl Fn() -> bool) -> Result<(), HookError> {
        let program = || self.program.clone();
        let failed = |source| HookError::Run { program: program(), source };
        let after = self.timeout_of(call);
        let mut child = self.command(call).spawn().map_err(failed)?;
        match wait(&mut child, after, is_wanted).map_err(failed)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(HookError::Failed { program: program(), status }),
            None => {
                end(&mut child);
                Err(HookError::TimedOut { program: program(), after })
            }
        }
    }

    fn timeout_of(&self, call: &Call) -> Duration {
        match (call.phase, call.side) {
            (Phase::Before, Side::Destination) => self.timeout.min(ARRIVAL_TIMEOUT),
            _ => self.timeout,
        }
    }

    /// Runs `after`. A failure is reported and has no other effect.
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
            // Its own group: signals from the terminal don't reach it, and a timeout kills all of
            // its processes.
            .process_group(0);
        command
    }
}

/// Reports the failure of a hook that has no effect on the migration.
fn tell_failure(error: &HookError, output: &Output) {
    let reason = vmferry::chain(error);
    output.event(&json!({ "event": "hook-failed", "reason": reason }), || {
        format!("{reason}. This does not affect the guest")
    });
}

/// A value's name in JSON.
fn word(value: &impl Serialize) -> String {
    json!(value).as_str().unwrap_or_default().to_owned()
}

/// Waits for the program to exit; `None` if it takes too long or is not wanted any more.
fn wait(
    child: &mut Child,
    timeout: Duration,
    is_wanted: impl Fn() -> bool,
) -> std::io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + timeout;
    loop {
        match child.try_wait()? {
            None if Instant::now() < deadline && is_wanted() => std::thread::sleep(POLL_PERIOD),
            ended => return Ok(ended),
        }
    }
}

/// Kills the program and its process group.
fn end(child: &mut Child) {
    let group = rustix::process::Pid::from_raw(child.id().cast_signed());
    if let Some(group) = group {
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    let _ = child.wait();
}

#[cfg(test)]
mod tests;
