//! Guests that an earlier receiver received and that are still in their QEMUs.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::json;
use vmferry::MigrateError;
use vmferry::destination::{
    Notice, Owned, Received, Responder, fetch_for_left, record_crashed, record_fetched,
};
use vmferry_handover::journal::{
    self, JournalError, LaterSession, Record, SessionSummary, Side, recovered_word,
};
use vmferry_qemu::{Arrived, Finished, Qmp};
use vmferry_sandbox::Files;
use vmferry_transport::Listener;
use vmferry_wire::{GuestIdentity, SessionId, SessionWord};

use super::fetching::Guest;
use super::hook::{self, Call, Outcome, Phase};
use super::waiting::{Over, RETRY_PERIOD, START_TIMEOUT, Waiting, is_of_another_user, report_end};
use crate::args::ReceiveOptions;
use crate::commands::directories;
use crate::commands::reception::tell;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// How long a receiver that can't take another guest keeps answering a source in doubt, which asks
/// once a second.
const ANSWER_TIME: Duration = Duration::from_secs(60);

/// The remains of an earlier receiver.
pub struct Found {
    /// The QEMU that it left.
    pub left: Left,
    /// Hook calls that are due, for guests that never run here.
    pub kept: Vec<Call>,
}

/// The QEMU that an earlier receiver left.
pub enum Left {
    /// None, or one that can receive the next guest.
    Nothing,
    /// A guest that this host owns.
    Guest(Arrived),
    /// A guest that this host owns, and that lacks pages.
    Lacking(Arrived),
    /// A QEMU whose guest never runs here. It was told to quit, and may have exited.
    EndedQemu(u32),
}

/// Finds the QEMU that an earlier receiver left. A QEMU whose guest never runs here is ended.
///
/// `qmp` is the socket of a QEMU that was started by another process. Only the QEMU that has the
/// socket now is considered.
pub fn find(receiver: &str, qmp: Option<&Path>, output: &Output) -> Result<Found, Failure> {
    let journals = directories()?.journals();
    let found = Arrived::find(&journals, receiver)?;
    // While a guest waits for pages its QEMU may not answer, and other guests must not delay it.
    let (mut lacking, mut all): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|one| lacks_pages(&journals, one.session()));
    if let Some(one) = lacking.pop() {
        // It may have got its last page just before its receiver died.
        let left = if one.has_fetched_by_itself() {
            record_fetched(&journals, one.session())
                .map_err(|error| Failure::of(Code::Internal, error))?;
            Left::Guest(one)
        } else {
            Left::Lacking(one)
        };
        return Ok(Found { left, kept: Vec::new() });
    }
    // QEMU may be waiting for a page too, so this comes before it is asked for anything.
    for one in &all {
        if recovered_word(&journals, one.session()).is_ok_and(|word| word == SessionWord::Owns)
            && let Err(error) = one.end_registration()
        {
            // Not fatal: a source in doubt must be answered in any case.
            let (pid, reason) = (one.pid(), vmferry::chain(&error));
            let event = json!({ "event": "still-registered", "pid": pid, "reason": reason });
            output.event(&event, || {
                format!(
                    "QEMU process {pid} has all its pages, but threads of its guest may wait: \
                     {reason}"
                )
            });
        }
    }
    if let Some(qmp) = qmp
        && !all.is_empty()
    {
        // A receiver that was killed may have had its QEMU keep the connection.
        all.iter_mut().for_each(Arrived::free_monitor);
        let pid = Qmp::connect(qmp).map_err(vmferry_qemu::QemuError::from)?.pid();
        all.retain(|one| Some(one.pid()) == pid);
    }
    let (mut left, mut kept) = (Left::Nothing, Vec::new());
    for one in all {
        let (session, pid) = (one.session(), one.pid());
        let word = recovered_word(&journals, session)
            .map_err(|error| Failure::of(Code::Internal, error))?;
        if word == SessionWord::Aborted {
            kept.extend(after(&journals, session, Outcome::Kept));
        }
        match word {
            SessionWord::Owns | SessionWord::Fetching | SessionWord::Ended => {
                left = Left::Guest(one);
            }
            // A QEMU that still waits can receive the next guest.
            SessionWord::Aborted if qmp.is_some() && one.waits()? => one.forget(),
            SessionWord::Aborted => {
                let event = json!({ "event": "ended-qemu", "session": session, "pid": pid });
                output.event(&event, || {
                    format!(
                        "quitting QEMU process {pid}: its guest, received in session {session}, \
                         never ran here and never will"
                    )
                });
                match one.end() {
                    // Not fatal: a source in doubt must be answered in any case.
                    Err(error) if error.is_timeout() => {
                        let reason = vmferry::chain(&error);
                        let event = json!({ "event": "not-ended", "reason": reason });
                        output.event(&event, || reason.clone());
                    }
                    ended => ended?,
                }
                if !matches!(left, Left::Guest(_)) {
                    left = Left::EndedQemu(pid);
                }
            }
            SessionWord::Pending => {
                let text = format!(
                    "another vmferry is receiving into QEMU process {pid}, in session {session}: \
                     let it finish, or stop it"
                );
                return Err(Failure::new(Code::WrongState, text));
            }
            SessionWord::Unknown => {
                let text = format!(
                    "QEMU process {pid} has a guest that was received in session {session}, and \
                     the session's journal does not say which host has the guest: check the source \
                     with `vmferry status --sessions`. If the guest runs there, quit this QEMU; \
                     otherwise resume the guest with `cont` by QMP at {}",
                    one.monitor().display()
                );
                return Err(Failure::new(Code::WrongState, text));
            }
        }
    }
    Ok(Found { left, kept })
}

/// Writes ENDED for guests that crashed here before they had all their pages, while no receiver was
/// there to see it. Their sources learn it from the next answer. A journal that can't be read or
/// written must not keep other guests from arriving.
pub fn note_crashed(journals: &Path, output: &Output) {
    let found = journal::record_files::<Record>(journals, Side::Destination).unwrap_or_default();
    for one in found {
        let (Ok(records), session) = (one.records, one.session) else { continue };
        let summary = SessionSummary::new(session, Side::Destination, records, one.led);
        let is_left = summary.lacks_pages() && !summary.led;
        if !is_left || !Arrived::has_ended(journals, session).unwrap_or(false) {
            continue;
        }
        let guest = summary.guest();
        let name = guest.map_or_else(|| "a guest".to_owned(), ToString::to_string);
        let crashed =
            format!("{name}, received in session {session}, has crashed while it lacked pages");
        match record_crashed(journals, session) {
            Ok(()) => {
                let event = json!({ "event": "guest-crashed", "session": session, "guest": guest });
                output.event(&event, || format!("{crashed}: its source learns that when it asks"));
            }
            // Another receiver has just taken it over.
            Err(JournalError::InUse { .. }) => {}
            Err(error) => {
                let reason = vmferry::chain(&error);
                let event =
                    json!({ "event": "crash-not-noted", "session": session, "reason": reason });
                output.event(&event, || {
                    format!("{crashed}, and its journal can't be written: {reason}")
                });
            }
        }
    }
}

/// Whether the guest of a session runs here and lacks pages, by its journal.
pub fn lacks_pages(journals: &Path, session: SessionId) -> bool {
    let records = journal::read(journals, session, Side::Destination).unwrap_or_default();
    journal::recover_destination(&records).is_some_and(|(state, _)| state.is_fetching())
}

/// The guest of a session that arrived, by its journal.
fn guest_of(journals: &Path, session: SessionId) -> Option<GuestIdentity> {
    let records = journal::read(journals, session, Side::Destination).ok()?;
    records.into_iter().find_map(|record| match record {
        Record::Open { guest, .. } => Some(guest),
        _ => None,
    })
}

/// The hook call for a session whose outcome is decided.
fn after(journals: &Path, session: SessionId, result: Outcome) -> Option<Call> {
    Some(Call {
        phase: Phase::After,
        side: hook::Side::Destination,
        guest: guest_of(journals, session)?,
        session: Some(session.to_string()),
        peer: None,
        result: Some(result),
    })
}

/// Whether this host still owns the guest that it received in a session.
fn is_here(journals: &Path, session: SessionId, guest: &GuestIdentity) -> bool {
    let sessions = journal::sessions_of(journals, guest);
    sessions
        .is_ok_and(|all| journal::later_session_after_arrival(&all, session) == LaterSession::None)
}

/// Completes the handover of a guest that this host owns, and answers for it until its QEMU ends.
pub fn answer_for(
    mut arrived: Arrived,
    kept: Vec<Call>,
    listener: Listener,
    options: &ReceiveOptions,
    output: &Output,
) -> Result<(), Failure> {
    let (pid, qmp) = (arrived.pid(), arrived.monitor().to_owned());
    let mut files = Files::default();
    // Shows whether QEMU's process is stopped.
    files.read.push(format!("/proc/{pid}/stat").into());
    let waiting = Waiting::begin(&listener, options, files, is_of_another_user(pid), output)?;
    waiting.watch(Some(pid), &qmp)?;
    waiting.run_kept(kept, output)?;
    // From here on, a source in doubt learns that this host has the guest.
    let responder = Responder::listen(listener, &waiting.config)?;
    let Some(finished) = finish(&mut arrived, &waiting, output)? else { return Ok(()) };
    let found = Completed { pid, qmp, session: arrived.session(), finished };
    found.report(&waiting, output)?;
    waiting.await_end(&found.qmp, Some(pid), output);
    drop(responder);
    Ok(())
}

/// Fetches the missing pages of a guest that this host owns, completes its handover, and answers
/// for it until its QEMU ends.
pub fn fetch_for(
    arrived: Arrived,
    kept: Vec<Call>,
    listener: Listener,
    options: &ReceiveOptions,
    output: &Output,
) -> Result<(), Failure> {
    let (pid, qmp, session) = (arrived.pid(), arrived.monitor().to_owned(), arrived.session());
    let places = directories()?;
    let memory_bytes = arrived.memory_bytes();
    // Without the first record of the journal, no name is known.
    let mut guest = guest_of(&places.journals(), session).map(|identity| Guest {
        identity,
        pid: Some(pid),
        qmp: qmp.clone(),
        release: "QEMU".into(),
        memory_bytes,
        is_paused: arrived.stays_paused(),
    });
    // Before the restrictions, which forbid to look into other processes.
    let left = arrived.take_over(&places.journals())?;
    let mut files = super::receive::files(left.place());
    // Shows whether QEMU's process is stopped.
    files.read.push(format!("/proc/{pid}/stat").into());
    let waiting = Waiting::begin(&listener, options, files, is_of_another_user(pid), output)?;
    waiting.watch(Some(pid), &qmp)?;
    waiting.run_kept(kept, output)?;
    let event = json!({ "event": "taking-over", "session": session, "qmp": qmp, "pid": pid });
    output.event(&event, || {
        format!(
            "the guest in QEMU process {pid}, QMP at {}, was started by an earlier vmferry, and \
             lacks pages: they are fetched as soon as its source asks",
            qmp.display()
        )
    });
    let mut watch = |notice: &Notice| tell(notice, output);
    let shown = Arc::new(Mutex::new(None));
    let (showing, of) = (Arc::clone(&shown), output.clone());
    let left = left.watched_by(Box::new(move |fetch| {
        *showing.lock() = guest.take().and_then(|guest| guest.show(&places, fetch, &of));
    }));
    let received = fetch_for_left(listener, left, session, &waiting.config, &mut watch);
    // The guest's name is free for the next migration.
    *shown.lock() = None;
    let owned = match received {
        Received::Owns(owned) => *owned,
        Received::Nothing { error, .. } => return Err(error.into()),
    };
    let Owned { vm: mut left, responder, crash, .. } = owned;
    if let Some(error @ MigrateError::CrashedLacking) = crash {
        return Err(error.into());
    }
    match left.finish() {
        Ok(finished) => {
            drop(left);
            let found = Completed { pid, qmp: qmp.clone(), session, finished };
            found.report(&waiting, output)?;
        }
        // Then its end is reported.
        Err(_) if !Path::new(&format!("/proc/{pid}")).exists() => {}
        Err(error) => return Err(error.into()),
    }
    waiting.await_end(&qmp, Some(pid), output);
    drop(responder);
    Ok(())
}

/// A guest whose arrival was completed.
struct Completed {
    pid: u32,
    qmp: PathBuf,
    session: SessionId,
    finished: (GuestIdentity, Finished),
}

impl Completed {
    /// Reports it, and runs the hook.
    fn report(&self, waiting: &Waiting, output: &Output) -> Result<(), Failure> {
        let Self { pid, qmp, session, finished: (guest, finished) } = self;
        let how = match finished {
            Finished::RunsAlready => "runs here",
            Finished::Continued => "was not running yet, and runs here now",
            Finished::StandsStill => {
                "was not paused by this migration and stays paused until it is resumed by QMP"
            }
        };
        let event = json!({
            "event": "found", "guest": guest, "session": session, "qmp": qmp, "pid": pid,
            "continued": *finished == Finished::Continued,
            "running": *finished != Finished::StandsStill,
        });
        output.event(&event, || {
        format!(
            "{guest} was received by an earlier vmferry, is in QEMU process {pid}, QMP at {}, and \
             {how}. vmferry answers its source and takes no other guest until its QEMU ends",
            qmp.display()
        )
    });
        // The hook runs even if the earlier receiver has run it: hooks must be repeatable.
        let journals = directories()?.journals();
        if *finished != Finished::StandsStill || is_here(&journals, *session, guest) {
            waiting.run_after(after(&journals, *session, Outcome::Moved), output);
        }
        Ok(())
    }
}

/// Answers for the sessions of a QEMU that was ended, long enough for a source in doubt to ask.
pub fn answer_without_qemu(
    pid: u32,
    qmp: &Path,
    kept: Vec<Call>,
    listener: Listener,
    options: &ReceiveOptions,
    output: &Output,
) -> Result<(), Failure> {
    let waiting = Waiting::begin(&listener, options, Files::default(), false, output)?;
    waiting.run_kept(kept, output)?;
    let responder = Responder::listen(listener, &waiting.config)?;
    // Returns early on a signal.
    let _ = waiting.is_over.recv_timeout(ANSWER_TIME);
    drop(responder);
    let text = format!(
        "QEMU process {pid} was told to quit, because its guest never runs here: start another \
         QEMU with `-incoming defer` and the QMP socket {}, then run this command again",
        qmp.display()
    );
    Err(Failure::new(Code::WrongState, text))
}

/// Completes the handover, and retries while QEMU does not answer. `None` if QEMU has ended.
fn finish(
    arrived: &mut Arrived,
    waiting: &Waiting,
    output: &Output,
) -> Result<Option<(GuestIdentity, Finished)>, Failure> {
    let journals = directories()?.journals();
    let until = Instant::now() + START_TIMEOUT;
    let mut reported = false;
    loop {
        let error = match arrived.finish(&journals) {
            Ok(finished) => {
                arrived.free_monitor();
                return Ok(Some(finished));
            }
            Err(error) => error,
        };
        match waiting.is_over.recv_timeout(RETRY_PERIOD) {
            Ok(Over::QemuEnded) => {
                report_end(output, "its QEMU has ended");
                return Ok(None);
            }
            Ok(Over::Signaled) => return Err(error.into()),
            Err(_) if !error.is_timeout() || Instant::now() >= until => return Err(error.into()),
            Err(_) => {}
        }
        if !std::mem::replace(&mut reported, true) {
            let reason = vmferry::chain(&error);
            output.event(&json!({ "event": "not-started", "reason": reason }), || {
                format!("{reason}. This host has the guest, and vmferry keeps trying to start it")
            });
        }
    }
}
