//! Hooks: a program that is told before a guest changes hosts and afterwards, such as to keep an HA
//! manager from starting the guest again at the source.
//!
//! * *before*: the guest runs at the source, and no promise about it was made. Where the program
//!   fails or takes too long, the migration ends and the guest stays.
//! * *after*: it is decided where the guest is. What the program says changes nothing.
//!
//! Neither runs while the guest is paused. `before` is run by a [process of its own](HookRunner).

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

/// How often is looked whether the program has ended. A child wakes nobody who also waits for a
/// time.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// How long `before` may take at the destination, at most: a source waits for the answer to its
/// announcement for 30 s ([`vmferry::Timeouts::accept`]), and the memory is made after the hook.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(20);

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

impl Call {
    /// The call that follows this one when it is decided where the guest is.
    pub fn after(&self, result: Outcome) -> Self {
        Self { phase: Phase::After, result: Some(result), ..self.clone() }
    }
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
    /// The process that runs it says so.
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
        self.run_while(call, || true)
    }

    /// The same; the program is ended when it is not wanted any more.
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

/// Waits for the end of the program; none if it takes too long, or is not wanted any more.
fn wait(
    child: &mut Child,
    timeout: Duration,
    is_wanted: impl Fn() -> bool,
) -> std::io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + timeout;
    loop {
        match child.try_wait()? {
            None if Instant::now() < deadline && is_wanted() => std::thread::sleep(LOOK_PERIOD),
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

#[cfg(test)]
mod tests;
