//! The guardian of a QEMU guest that is being sent.
//!
//! A QEMU lives on when the vmferry that migrates it is killed, and its guest may stand still then. So a
//! second process waits beside the first for as long as that one lives, and takes over from
//! the journal: before COMMIT the guest runs on here, after it the destination is asked.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use vmferry::source::{Orders, Recovered, recover};
use vmferry::{SourceConfig, VmError};
use vmferry_control::{Handler, Server, ServerError, TlsFiles};
use vmferry_handover::journal::JournalError;
use vmferry_qemu::{AbandonedQemu, ProcessIdentity, QemuError, Release, Settings, wait_until_gone};
use vmferry_wire::SessionId;

use super::hook::{Call, Hook, Outcome};
use super::kept::tell_kept;
use super::service::QemuService;
use crate::commands::link::dialer;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// How long the kernel may take to let go of the journal and the socket of a process that has just died.
const DEATH_TIMEOUT: Duration = Duration::from_secs(5);

/// How often is looked whether it has. Nobody tells.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// For how long a guest that is to run here is waited for, if its QEMU does not answer: as long as whoever has stopped it
/// may well be away. The next `vmferry send --qemu` does the same, or whoever continues the guest by its monitor.
const QEMU_TIMEOUT: Duration = Duration::from_secs(3600);

/// How often it is tried. Each attempt waits for the answer itself.
const RETRY_PERIOD: Duration = Duration::from_secs(1);

/// All that a guardian must know; it comes by its standard input.
#[derive(Debug, Serialize, Deserialize)]
pub struct GuardOrder {
    /// The guest's QMP socket.
    pub qmp: PathBuf,
    /// The QEMU process, if it is seen from here.
    pub pid: Option<u32>,
    /// The session.
    pub session: SessionId,
    /// Where the session's journal is.
    pub journals: PathBuf,
    /// The guest's control socket, when it is this process's to answer on.
    pub socket: PathBuf,
    /// What `status` says of the guest.
    pub about: Value,
    /// The destination's address.
    pub to: String,
    /// This host's identity.
    pub tls: Option<TlsFiles>,
    /// QEMU's settings before.
    pub settings: Settings,
    /// Somebody else had paused the guest before, and it stays so.
    pub paused: bool,
    /// Leave QEMU alone once its guest is the destination's.
    pub keep_source: bool,
    /// Who is told where the guest is, and of what.
    pub hook: Option<(Hook, Call)>,
    /// The process that runs `before`, which it ends when the sender has gone.
    pub hook_runner: Option<ProcessIdentity>,
}

/// A guardian at work, as the process sees it that it guards.
pub struct Guardian {
    child: Child,
}

impl Guardian {
    /// Starts one.
    pub fn start(order: &GuardOrder) -> Result<Self, Failure> {
        // This very program, even where another release has just been put in its place.
        let mut child = Command::new("/proc/self/exe")
            .arg("guard")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // What ends the sender from its terminal must not end the guardian with it.
            .process_group(0)
            .spawn()?;
        let line =
            serde_json::to_string(order).map_err(|error| Failure::of(Code::Internal, error))?;
        if let Some(input) = &mut child.stdin {
            writeln!(input, "{line}")?;
        }
        Ok(Self { child })
    }

    /// The guest is in good hands. Whatever it was doing, as long as this process lives that was to wait; and one that is
    /// stopped could be told nothing.
    pub fn dismiss(mut self) {
        // One that has died needs no end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Leaves it to take over, now.
    pub fn hand_over(mut self) {
        drop(self.child.stdin.take());
    }
}

/// `vmferry guard`.
pub fn run(output: &Output) -> Result<(), Failure> {
    // The sender's fate is told by its end of this pipe alone.
    crate::signals::ignore()?;
    let mut input = BufReader::new(std::io::stdin());
    let mut line = String::new();
    input.read_line(&mut line)?;
    let order: GuardOrder =
        serde_json::from_str(&line).map_err(|error| Failure::of(Code::Usage, error))?;
    // Nothing more is written: it ends with the sender, or when that hands over.
    input.read_to_string(&mut String::new())?;
    let undecided = Undecided::begin(&order, output)?;
    take_over(&order, undecided, output)
}

/// While it is not decided where the guest is, this process ends when the QEMU does: there is no
/// guest left to look after, in doubt or not.
struct Undecided(Arc<Mutex<bool>>);

impl Undecided {
    fn begin(order: &GuardOrder, output: &Output) -> Result<Self, Failure> {
        let (pid, qmp, output) = (order.pid, order.qmp.clone(), output.clone());
        let undecided = Arc::new(Mutex::new(true));
        let watched = Arc::clone(&undecided);
        std::thread::Builder::new().name("qemu-end".into()).spawn(move || {
            wait_until_gone(pid, &qmp);
            // Held to the end: nobody decides any more.
            let undecided = watched.lock().unwrap_or_else(PoisonError::into_inner);
            if *undecided {
                output.note(
                    "the QEMU that the guest was in has ended: nothing of it runs on this host",
                );
                std::process::exit(Code::Internal.number().into());
            }
        })?;
        Ok(Self(undecided))
    }

    /// It is decided. What is left to do outlasts the QEMU.
    fn end(self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// Answers for the guest. Without that there is no `vmferry resolve`, and everything else goes on.
fn bind(order: &GuardOrder, orders: &Orders, deadline: Instant) -> Option<Server> {
    let service = Arc::new(QemuService {
        about: order.about.clone(),
        orders: orders.clone(),
        throttle: 0,
        gate: None,
    });
    loop {
        match Server::bind(&order.socket, Arc::clone(&service) as Arc<dyn Handler>) {
            Ok(server) => return Some(server),
            Err(ServerError::InUse { .. }) if Instant::now() < deadline => {
                std::thread::sleep(LOOK_PERIOD);
            }
            Err(_) => return None,
        }
    }
}

fn take_over(order: &GuardOrder, undecided: Undecided, output: &Output) -> Result<(), Failure> {
    let deadline = Instant::now() + DEATH_TIMEOUT;
    let orders = Orders::new();
    let server = bind(order, &orders, deadline);
    let mut config = SourceConfig::new(order.journals.clone());
    config.session = order.session;
    let dialer = dialer(&order.to, order.tls.as_ref())?;
    let mut qemu = AbandonedQemu::new(&order.qmp, Some(order.settings.clone()))
        .was_paused(order.paused)
        .left_in(order.pid, order.session, &order.journals);
    let mut asleep = Asleep::new(output);
    let recovered = loop {
        match recover(qemu, &dialer, config.clone(), &orders, &mut |_| {}) {
            Ok(Recovered::Stuck(again, error)) if QemuError::is_timeout_of(&error) => {
                asleep.wait(&error)?;
                qemu = again;
            }
            Ok(recovered) => break recovered,
            Err((again, JournalError::InUse { .. })) if Instant::now() < deadline => {
                qemu = again;
                std::thread::sleep(LOOK_PERIOD);
            }
            Err((again, JournalError::Io { source, .. }))
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                // It died before it promised anything, and before it touched the guest.
                again.tidy()?;
                break Recovered::Kept(again);
            }
            Err((_, error)) => return Err(Failure::of(Code::Internal, error)),
        }
    };
    drop(server);
    undecided.end();
    match recovered {
        Recovered::Kept(_) => {
            output.note(if order.paused {
                "vmferry has given the guest up; it stays here, paused as it was"
            } else {
                "vmferry has given the guest up; it runs on here"
            });
            after(order, Outcome::Kept, output);
        }
        Recovered::Given(qemu) => {
            output.note("the guest was handed over: it runs at the destination");
            after(order, Outcome::Moved, output);
            if !order.keep_source {
                let release = end(&qemu, &mut asleep)?;
                tell_kept(&release, output);
            }
        }
        // A later session has it in hand.
        Recovered::Stuck(_, error) if QemuError::is_sent_again(&error) => {
            output.note(error.to_string());
        }
        Recovered::Stuck(_, error) => {
            let text =
                format!("vmferry has given the guest up, and it could not be resumed: {error}");
            return Err(Failure::new(Code::Internal, text));
        }
    }
    Ok(())
}

/// Tells the hook where the guest is. Nobody knows whether it was told before.
fn after(order: &GuardOrder, result: Outcome, output: &Output) {
    if let Some((hook, call)) = &order.hook {
        // It ends the hook that the sender has left.
        let deadline = Instant::now() + DEATH_TIMEOUT;
        while order.hook_runner.as_ref().is_some_and(ProcessIdentity::lives)
            && Instant::now() < deadline
        {
            std::thread::sleep(LOOK_PERIOD);
        }
        hook.run_after(&call.after(result), output);
    }
}

/// Ends a QEMU whose guest runs elsewhere, as soon as it can be told, and gives its memory back.
fn end(qemu: &AbandonedQemu, asleep: &mut Asleep<'_>) -> Result<Release, Failure> {
    loop {
        match qemu.leave() {
            Err(error) if error.is_timeout() => asleep.wait(&error.into())?,
            other => return Ok(other?),
        }
    }
}

/// Waiting for a QEMU that does not answer.
struct Asleep<'a> {
    /// Since the first time that it did not: the destination may have been asked for hours before.
    until: Option<Instant>,
    output: &'a Output,
}

impl<'a> Asleep<'a> {
    fn new(output: &'a Output) -> Self {
        Self { until: None, output }
    }

    /// Waits until the next attempt, and says once why.
    fn wait(&mut self, error: &VmError) -> Result<(), Failure> {
        let until = *self.until.get_or_insert_with(|| {
            self.output.note(format!("{error}. vmferry goes on trying beside it"));
            Instant::now() + QEMU_TIMEOUT
        });
        if Instant::now() >= until {
            let text = format!(
                "given up after {} minutes: {error}. `vmferry status --sessions` says whose the guest is: if it is this \
                 host's, `cont` in QEMU's monitor continues it; if not, end this QEMU",
                QEMU_TIMEOUT.as_secs() / 60
            );
            return Err(Failure::new(Code::Internal, text));
        }
        std::thread::sleep(RETRY_PERIOD);
        Ok(())
    }
}
