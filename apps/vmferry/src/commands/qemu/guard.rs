//! The guardian of a QEMU guest that is being sent.
//!
//! If the vmferry that sends a QEMU guest is killed, QEMU goes on and its guest may stay paused. So
//! a second process waits until the sender exits and then takes over from the journal: before
//! COMMIT it resumes the guest here, after COMMIT it asks the destination.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use vmferry::VmError;
use vmferry::source::{Orders, Recovered, recover};
use vmferry_control::{Handler, MigrateRequest, Server, ServerError, TlsFiles};
use vmferry_handover::SessionKind;
use vmferry_handover::journal::{self, JournalError, Record};
use vmferry_qemu::{AbandonedQemu, ProcessIdentity, QemuError, Release, Settings, wait_until_gone};
use vmferry_transport::Ticket;
use vmferry_wire::SessionId;

use super::hook::{Call, Hook, Outcome};
use super::kept::{has_ended, report_kept};
use super::service::QemuService;
use crate::commands::fleet::witness::of_session;
use crate::commands::link::dialer;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// How long the kernel may take to release the journal and the socket of a process that just died.
const DEATH_TIMEOUT: Duration = Duration::from_secs(5);

/// How often to check whether the kernel has released them. There is no notification.
const POLL_PERIOD: Duration = Duration::from_millis(5);

/// How long to keep trying to resume a guest whose QEMU does not answer, such as one that an
/// operator stopped. Afterwards the next `vmferry send --qemu` resumes it, or `cont` in QEMU's
/// monitor.
const QEMU_TIMEOUT: Duration = Duration::from_secs(3600);

/// Pause between attempts. Each attempt also waits for QEMU's answer.
const RETRY_PERIOD: Duration = Duration::from_secs(1);

/// Everything that a guardian needs. It reads this from standard input.
#[derive(Debug, Serialize, Deserialize)]
pub struct GuardOrder {
    /// The guest's QMP socket.
    pub qmp: PathBuf,
    /// The QEMU process, if it is visible in this PID namespace.
    pub pid: Option<u32>,
    /// The session.
    pub session: SessionId,
    /// The directory of the session's journal.
    pub journals: PathBuf,
    /// The guest's control socket, which the guardian serves after it takes over.
    pub socket: PathBuf,
    /// The answer to `status`, without the migration.
    pub about: Value,
    /// The destination's address.
    pub to: String,
    /// Whether the session's number is the ticket of its channels.
    pub by_ticket: bool,
    /// This host's identity.
    pub tls: Option<TlsFiles>,
    /// The migration, for its channels and its bandwidth cap.
    pub request: MigrateRequest,
    /// The socket of the session's witness.
    pub witness: Option<PathBuf>,
    /// The settings of QEMU's migration before vmferry changed them.
    pub settings: Settings,
    /// The guest was paused before the migration and stays paused.
    pub paused: bool,
    /// Do not quit QEMU after the guest has moved.
    pub keep_source: bool,
    /// The hook and its `before` call.
    pub hook: Option<(Hook, Call)>,
    /// The process that runs `before`. It kills the hook and exits when the sender has gone.
    pub hook_runner: Option<ProcessIdentity>,
}

/// The sender's handle of its guardian.
pub struct Guardian {
    child: Child,
}

impl Guardian {
    /// Starts a guardian.
    pub fn start(order: &GuardOrder) -> Result<Self, Failure> {
        // The running executable, even if an upgrade has replaced the file.
        let mut child = Command::new("/proc/self/exe")
            .arg("guard")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // A signal from the terminal to the sender must not reach the guardian.
            .process_group(0)
            .spawn()?;
        let line =
            serde_json::to_string(order).map_err(|error| Failure::of(Code::Internal, error))?;
        if let Some(input) = &mut child.stdin {
            writeln!(input, "{line}")?;
        }
        Ok(Self { child })
    }

    /// Ends the guardian, which is not needed any more. It only waits while the sender lives, so it
    /// can be killed. A message would not reach a stopped process.
    pub fn dismiss(mut self) {
        // Both fail harmlessly if it has died.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Lets the guardian take over now.
    pub fn hand_over(mut self) {
        drop(self.child.stdin.take());
    }
}

/// `vmferry guard`.
pub fn run(output: &Output) -> Result<(), Failure> {
    // Only the end of the pipe on standard input means that the sender is gone.
    crate::signals::ignore()?;
    let mut input = BufReader::new(std::io::stdin());
    let mut line = String::new();
    input.read_line(&mut line)?;
    let order: GuardOrder =
        serde_json::from_str(&line).map_err(|error| Failure::of(Code::Usage, error))?;
    // Reads until the end of the pipe: the sender has exited, or hands over.
    input.read_to_string(&mut String::new())?;
    let undecided = Undecided::begin(&order, output)?;
    take_over(&order, undecided, output)
}

/// Until the outcome is decided, the guardian exits when QEMU does, because there is no guest left
/// to look after, unless the guest needs pages elsewhere, or has to hear that they are lost.
struct Undecided(Arc<Mutex<bool>>);

impl Undecided {
    fn begin(order: &GuardOrder, output: &Output) -> Result<Self, Failure> {
        let (pid, qmp, output) = (order.pid, order.qmp.clone(), output.clone());
        let (journals, session) = (order.journals.clone(), order.session);
        let undecided = Arc::new(Mutex::new(true));
        let watched = Arc::clone(&undecided);
        std::thread::Builder::new().name("qemu-end".into()).spawn(move || {
            wait_until_gone(pid, &qmp);
            let records = journal::read(&journals, session, journal::Side::Source);
            let records = records.unwrap_or_default();
            if journal::kind_of_source(&records) == SessionKind::PostCopy
                && journal::recover_source(&records).0.is_committed()
            {
                return;
            }
            // The lock is held until the exit, so that `end` can't intervene.
            let undecided = watched.lock();
            if *undecided {
                output.note("the guest's QEMU has ended: the guest does not run on this host");
                std::process::exit(Code::Internal.number().into());
            }
        })?;
        Ok(Self(undecided))
    }

    /// The outcome is decided. The remaining steps are done even if QEMU exits.
    fn end(self) {
        *self.0.lock() = false;
    }
}

/// Serves the guest's control socket. If that fails, only `vmferry resolve` is not available.
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
                // Nothing reports that the sender that has died has released the socket.
                std::thread::sleep(POLL_PERIOD);
            }
            Err(_) => return None,
        }
    }
}

fn take_over(order: &GuardOrder, undecided: Undecided, output: &Output) -> Result<(), Failure> {
    let deadline = Instant::now() + DEATH_TIMEOUT;
    let orders = Orders::new();
    let server = bind(order, &orders, deadline);
    let request = order.request.clone();
    let mut config = request
        .source_config(order.journals.clone())
        .map_err(|error| Failure::of(Code::Usage, error))?;
    config.session = order.session;
    config.witness = of_session(order.witness.as_deref(), &order.journals, order.session);
    let mut dialer = dialer(&order.to, order.tls.as_ref())?;
    dialer.ticket = order.by_ticket.then_some(Ticket(order.session.0));
    let mut qemu = AbandonedQemu::new(&order.qmp, Some(order.settings.clone()))
        .was_paused(order.paused)
        .left_in(order.pid, order.session, &order.journals);
    let mut asleep = Asleep::new(output);
    note_interrupted_post_copy(&qemu, (&order.journals, order.session), output);
    let recovered = loop {
        match recover(qemu, &dialer, config.clone(), &orders, &mut |_| {}) {
            Ok(Recovered::Stuck(again, error) | Recovered::Unread(again, error))
                if QemuError::is_timeout_of(&error) =>
            {
                asleep.wait(&error)?;
                qemu = again;
            }
            Ok(recovered) => break recovered,
            Err((again, JournalError::InUse { .. })) if Instant::now() < deadline => {
                qemu = again;
                // Nothing reports that the sender that has died has released the journal.
                std::thread::sleep(POLL_PERIOD);
            }
            Err((again, JournalError::Io { source, .. }))
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                // The sender died before it created the journal, so before it changed the guest.
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
                "the migration has ended; the guest stays here, paused as it was before"
            } else {
                "the migration has ended; the guest runs here"
            });
            after(order, Outcome::Kept, output);
        }
        Recovered::Given(qemu) => {
            output.note("the guest was handed over: it runs at the destination");
            after(order, Outcome::Moved, output);
            if !order.keep_source {
                let release = end(&qemu, &mut asleep)?;
                report_kept(&release, output);
            }
        }
        Recovered::Lost(qemu, error) => {
            output.note(vmferry::chain(&error));
            if !order.keep_source && !has_ended(&error) {
                report_kept(&end(&qemu, &mut asleep)?, output);
            }
        }
        Recovered::Unread(_, error) => return Err(unread(&error)),
        // A later session leads the guest.
        Recovered::Stuck(_, error) if QemuError::is_sent_again(&error) => {
            output.note(error.to_string());
        }
        Recovered::Stuck(_, error) => {
            let text =
                format!("the migration has ended, and the guest could not be resumed: {error}");
            return Err(Failure::new(Code::Internal, text));
        }
    }
    Ok(())
}

/// The failure if pages that the destination lacks can't be read.
pub fn unread(error: &VmError) -> Failure {
    let text = format!(
        "the guest runs at the destination and may lack pages, which can't be read here: {error}. \
         Keep this QEMU, and run `vmferry send` for it again"
    );
    Failure::new(Code::Internal, text)
}

/// Tells the operator if the guest has moved in this session and QEMU has been sending pages
/// itself, until the process that carried them died.
pub fn note_interrupted_post_copy(
    qemu: &AbandonedQemu,
    (journals, session): (&Path, SessionId),
    output: &Output,
) {
    let records = journal::read(journals, session, journal::Side::Source).unwrap_or_default();
    // A QEMU that does not answer is waited for later.
    if records.iter().any(Record::is_commit) && qemu.is_in_post_copy().unwrap_or(false) {
        output.event(&json!({ "event": "post-copy-interrupted", "session": session }), || {
            "the guest runs at the destination and needs pages of this QEMU, whose own post-copy \
             was interrupted, because the vmferry process that carried it has died: both QEMUs are \
             connected again as soon as the destination answers"
                .into()
        });
    }
}

/// Runs the hook's `after`. The sender may have run it already.
fn after(order: &GuardOrder, result: Outcome, output: &Output) {
    if let Some((hook, call)) = &order.hook {
        // Waits for the process that kills a `before` of the sender.
        let deadline = Instant::now() + DEATH_TIMEOUT;
        while order.hook_runner.as_ref().is_some_and(ProcessIdentity::lives)
            && Instant::now() < deadline
        {
            std::thread::sleep(POLL_PERIOD);
        }
        hook.run_after(&call.after(result), output);
    }
}

/// Quits a QEMU whose guest runs at the destination, as soon as it answers, and frees its memory.
fn end(qemu: &AbandonedQemu, asleep: &mut Asleep<'_>) -> Result<Release, Failure> {
    loop {
        match qemu.leave() {
            Err(error) if error.is_timeout() => asleep.wait(&error.into())?,
            other => return Ok(other?),
        }
    }
}

/// Waits for a QEMU that does not answer.
struct Asleep<'a> {
    /// When to give up. Set at the first timeout, because asking the destination may take hours.
    until: Option<Instant>,
    output: &'a Output,
}

impl<'a> Asleep<'a> {
    fn new(output: &'a Output) -> Self {
        Self { until: None, output }
    }

    /// Waits until the next attempt. Reports the error the first time.
    fn wait(&mut self, error: &VmError) -> Result<(), Failure> {
        let until = *self.until.get_or_insert_with(|| {
            self.output.note(format!("{error}. vmferry keeps trying"));
            Instant::now() + QEMU_TIMEOUT
        });
        if Instant::now() >= until {
            let text = format!(
                "gave up after {} minutes: {error}. `vmferry status --sessions` says which host \
                 has the guest: if this one, `cont` in QEMU's monitor resumes it; otherwise quit \
                 this QEMU",
                QEMU_TIMEOUT.as_secs() / 60
            );
            return Err(Failure::new(Code::Internal, text));
        }
        std::thread::sleep(RETRY_PERIOD);
        Ok(())
    }
}
