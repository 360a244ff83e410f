//! A guest that came to a receiver before this one, and lives on in its QEMU.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;
use vmferry::destination::Witness;
use vmferry_handover::journal::{self, Record, Side, Since, recovered_word};
use vmferry_qemu::{Arrived, Finished, Qmp};
use vmferry_sandbox::Files;
use vmferry_transport::Listener;
use vmferry_wire::{GuestIdentity, SessionId, SessionWord};

use super::hook::{self, Call, Outcome, Phase};
use super::waiting::{Over, RETRY_PERIOD, START_TIMEOUT, Waiting, is_of_another_user, say_end};
use crate::args::ReceiveOptions;
use crate::commands::directories;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// For how long a source in doubt is answered where no other guest can be taken: it asks once a
/// second.
const ANSWER_TIME: Duration = Duration::from_secs(60);

/// What was found of the receiver before this one.
pub struct Found {
    /// What it has left.
    pub left: Left,
    /// What the hook must be told: these guests never run here.
    pub kept: Vec<Call>,
}

/// What the receiver before this one has left.
pub enum Left {
    /// Nothing that matters.
    Nothing,
    /// A guest that is this host's.
    Guest(Arrived),
    /// A QEMU whose guest never runs here. It was ended, or at least told to end.
    EndedQemu(u32),
}

/// Finds what the receiver before this one has left. A QEMU whose guest never runs here is ended.
///
/// `qmp` is the socket of a QEMU that somebody else has started: only the one that is there now
/// counts.
pub fn find(receiver: &str, qmp: Option<&Path>, output: &Output) -> Result<Found, Failure> {
    let journals = directories()?.journals();
    let mut all = Arrived::find(&journals, receiver)?;
    if let Some(qmp) = qmp
        && !all.is_empty()
    {
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
            SessionWord::Owns => left = Left::Guest(one),
            // Into one that still waits the next guest can come.
            SessionWord::Aborted if qmp.is_some() && one.waits()? => one.forget(),
            SessionWord::Aborted => {
                let event = json!({ "event": "ended-qemu", "session": session, "pid": pid });
                output.event(&event, || {
                    format!(
                        "QEMU process {pid} is ended: its guest, which came by session {session}, \
                         never ran here and never will"
                    )
                });
                match one.end() {
                    // The source, which may be in doubt, is answered in any case.
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
                    "another vmferry is receiving into QEMU process {pid}, by session {session}: \
                     let it finish, or end it"
                );
                return Err(Failure::new(Code::WrongState, text));
            }
            SessionWord::Unknown => {
                let text = format!(
                    "QEMU process {pid} has a guest that came by session {session}, and the \
                     session's journal does not say whose the guest is: look at the source with \
                     `vmferry status --sessions`; where the guest runs there, end this QEMU, and \
                     otherwise continue the guest with `cont` by QMP at {}",
                    one.monitor().display()
                );
                return Err(Failure::new(Code::WrongState, text));
            }
        }
    }
    Ok(Found { left, kept })
}

/// What a hook is told of a session when it is decided where its guest is.
fn after(journals: &Path, session: SessionId, result: Outcome) -> Option<Call> {
    let records = journal::read(journals, session, Side::Destination).ok()?;
    let guest = records.into_iter().find_map(|record| match record {
        Record::Open { guest, .. } => Some(guest),
        _ => None,
    })?;
    Some(Call {
        phase: Phase::After,
        side: hook::Side::Destination,
        guest,
        session: Some(session.to_string()),
        peer: None,
        result: Some(result),
    })
}

/// Whether the guest that came by a session is this host's still.
fn is_here(journals: &Path, session: SessionId, guest: &GuestIdentity) -> bool {
    let sessions = journal::sessions_of(journals, guest);
    sessions.is_ok_and(|all| journal::since_arrival(&all, session) == Since::Nothing)
}

/// Does what is left to do for a guest that is this host's, and answers for it until its QEMU ends.
pub fn answer_for(
    (mut arrived, kept): (Arrived, Vec<Call>),
    listener: Listener,
    options: &ReceiveOptions,
    output: &Output,
) -> Result<(), Failure> {
    let (pid, qmp) = (arrived.pid(), arrived.monitor().to_owned());
    let mut files = Files::default();
    // Whether its process is stopped.
    files.read.push(format!("/proc/{pid}/stat").into());
    let waiting = Waiting::begin(&listener, options, files, is_of_another_user(pid), output)?;
    waiting.watch(Some(pid), &qmp)?;
    waiting.tell_kept(kept, output)?;
    // A source in doubt hears at once that the guest is here.
    let witness = Witness::listen(listener, &waiting.config)?;
    let Some((guest, finished)) = finish(&mut arrived, &waiting, output)? else {
        return Ok(());
    };
    let how = match finished {
        Finished::RunsAlready => "runs here",
        Finished::Continued => "was not running yet, and runs here now",
        Finished::StandsStill => {
            "is paused, not by this migration, and stays so until somebody continues it by QMP"
        }
    };
    let event = json!({
        "event": "found", "guest": guest, "session": arrived.session(), "qmp": qmp, "pid": pid,
        "continued": finished == Finished::Continued, "running": finished != Finished::StandsStill,
    });
    output.event(&event, || {
        format!(
            "{guest} came before this process was started, is in QEMU process {pid}, QMP at {}, \
             and {how}; this host's word about it is given until its QEMU ends, and no other guest \
             is taken before",
            qmp.display()
        )
    });
    // The receiver before this one may have been killed before it was told, or afterwards.
    let (journals, session) = (directories()?.journals(), arrived.session());
    if finished != Finished::StandsStill || is_here(&journals, session, &guest) {
        waiting.run_after(after(&journals, session, Outcome::Moved), output);
    }
    waiting.await_end(&qmp, Some(pid), output);
    drop(witness);
    Ok(())
}

/// Answers for the sessions of a QEMU that was ended, until a source that is in doubt has asked.
pub fn answer_without_qemu(
    (pid, qmp, kept): (u32, &Path, Vec<Call>),
    listener: Listener,
    options: &ReceiveOptions,
    output: &Output,
) -> Result<(), Failure> {
    let waiting = Waiting::begin(&listener, options, Files::default(), false, output)?;
    waiting.tell_kept(kept, output)?;
    let witness = Witness::listen(listener, &waiting.config)?;
    // A signal, or nothing.
    let _ = waiting.is_over.recv_timeout(ANSWER_TIME);
    drop(witness);
    let text = format!(
        "QEMU process {pid} was told to end, since its guest never runs here: start another QEMU \
         with `-incoming defer` and the QMP socket {}, then this command again",
        qmp.display()
    );
    Err(Failure::new(Code::WrongState, text))
}

/// Finishes it, again and again while its QEMU does not answer; none if that has ended, or a signal
/// has come.
fn finish(
    arrived: &mut Arrived,
    waiting: &Waiting,
    output: &Output,
) -> Result<Option<(GuestIdentity, Finished)>, Failure> {
    let journals = directories()?.journals();
    let until = Instant::now() + START_TIMEOUT;
    let mut told = false;
    loop {
        let error = match arrived.finish(&journals) {
            Ok(finished) => return Ok(Some(finished)),
            Err(error) => error,
        };
        match waiting.is_over.recv_timeout(RETRY_PERIOD) {
            Ok(Over::QemuEnded) => {
                say_end(output, "its QEMU has ended");
                return Ok(None);
            }
            Ok(Over::Told) => return Err(error.into()),
            Err(_) if !error.is_timeout() || Instant::now() >= until => return Err(error.into()),
            Err(_) => {}
        }
        if !std::mem::replace(&mut told, true) {
            let reason = vmferry::chain(&error);
            output.event(&json!({ "event": "not-started", "reason": reason }), || {
                format!(
                    "{reason}. The guest is this host's, and vmferry goes on trying to start it"
                )
            });
        }
    }
}
