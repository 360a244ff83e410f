//! `vmferry resolve`: the operator decides a handover that is in doubt.

mod give_up;
mod moved;
mod plan;

use std::io::{BufRead, IsTerminal, Write};
use std::path::Path;

use serde_json::{Value, json};
use vmferry_control::{ClientError, Request, call};
use vmferry_handover::OperatorWord;
use vmferry_handover::journal::{
    self, FileJournal, Journal, JournalError, Record, SessionSummary, Side, Verdict,
    record_of_operator,
};

use super::directories;
use super::status::{began, guest_name, peer, promise};
use crate::args::ResolveOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// The sessions in doubt, and where the decision is recorded.
enum Doubt {
    /// In the guest's VMM or a QEMU's guardian, which keeps the guest paused and asks the
    /// destination.
    Process(Vec<SessionSummary>),
    /// In the journals: no process leads these sessions any more.
    Journals(Vec<SessionSummary>),
}

/// Gives the operator's decision to the guest's VMM, or writes it to the journals if that VMM has
/// died. Asks for confirmation first.
pub fn run(options: &ResolveOptions, output: &Output) -> Result<(), Failure> {
    if options.give_up {
        return give_up::run(options, output);
    }
    let word = if options.destination_owns {
        OperatorWord::DestinationOwns
    } else {
        OperatorWord::SourceResumes
    };
    let directory = directories()?;
    let journals = directory.journals();
    let sessions = journal::sessions(&journals).map_err(internal)?;
    if let Some(moved) = moved::meant(&journals, &sessions, &options.guest)? {
        return moved::run(&directory, &moved, word, options.yes, output);
    }
    let meant: Vec<SessionSummary> =
        sessions.into_iter().filter(|session| is_meant(session, &options.guest)).collect();
    // If a session's number was given, its guest's VMM must be asked as well.
    let name = match meant.iter().find(|one| one.session.to_string() == options.guest) {
        Some(session) => guest_name(session).unwrap_or(&options.guest).to_owned(),
        None => options.guest.clone(),
    };
    let socket = directory.socket(&name);
    let doubt = match call(&socket, &Request::Status, &mut |_| {}) {
        Ok(status) => {
            let (its, others): (Vec<_>, Vec<_>) =
                meant.into_iter().partition(|session| is_of(session, &status));
            if is_about_others(&options.guest, &status, &its, &others) {
                output.note(format!(
                    "Another guest named {name} runs here (UUID {}). It is not affected.",
                    status["uuid"].as_str().unwrap_or_default()
                ));
                without_vmm(&options.guest, others)?
            } else {
                with_vmm(&status, &name, its, word)?
            }
        }
        Err(ClientError::NoGuest { .. }) => without_vmm(&options.guest, meant)?,
        // A stopped VMM may continue and would not know the decision.
        Err(error) => return Err(error.into()),
    };
    let reminder = remind(&name, &doubt, word);
    confirm(&name, &reminder, options.yes, output)?;
    match doubt {
        Doubt::Process(sessions) => tell_process(&socket, &name, &sessions, word, output),
        Doubt::Journals(sessions) => tell_journals(&journals, &sessions, word, output),
    }
}

/// Whether a session belongs to this VMM's guest, and not to an earlier guest of the same name.
fn is_of(session: &SessionSummary, status: &Value) -> bool {
    let its = status["uuid"].as_str().and_then(|uuid| uuid.parse::<uuid::Uuid>().ok());
    match (its, session.guest()) {
        (Some(its), Some(guest)) => guest.uuid == its,
        _ => true,
    }
}

/// Whether the operator means an earlier guest of the same name: the session's number says so, or
/// the current guest is not in doubt and an earlier one is.
fn is_about_others(
    asked: &str,
    status: &Value,
    its: &[SessionSummary],
    others: &[SessionSummary],
) -> bool {
    let in_doubt = status["migration"]["in_doubt"] == true || its.iter().any(is_in_doubt);
    others.iter().any(|other| other.session.to_string() == asked)
        || (!in_doubt && others.iter().any(is_in_doubt))
}

/// The sessions to decide for a guest whose VMM answers.
fn with_vmm(
    status: &Value,
    name: &str,
    meant: Vec<SessionSummary>,
    word: OperatorWord,
) -> Result<Doubt, Failure> {
    let doubtful: Vec<_> = meant.into_iter().filter(is_in_doubt).collect();
    if status["migration"]["in_doubt"] == true {
        return Ok(Doubt::Process(doubtful.into_iter().filter(|one| one.led).collect()));
    }
    let refused = |text: String| Err(Failure::new(Code::WrongState, text));
    if !status["migration"].is_null() {
        return refused(format!(
            "{name} is being migrated and is not in doubt, so there is nothing to decide: `vmferry \
             cancel {name}` cancels the migration"
        ));
    }
    // The destination's answer let the guest resume here, but it could not be written to the
    // journal.
    match (doubtful.is_empty(), word) {
        (true, _) => refused(format!(
            "{name} is not in doubt, so there is nothing to decide: this host has it"
        )),
        (false, OperatorWord::SourceResumes) => Ok(Doubt::Journals(doubtful)),
        (false, OperatorWord::DestinationOwns) => refused(format!(
            "{name} runs here, whatever its journal says: if it runs on the other host as well, \
             end one of the two; if not, `vmferry resolve --source-resumes` records that it is here"
        )),
    }
}

/// The sessions to decide for a guest whose VMM has died.
fn without_vmm(asked: &str, meant: Vec<SessionSummary>) -> Result<Doubt, Failure> {
    let Some(last) = meant.last() else {
        let text = format!(
            "no guest or session is named {asked}: `vmferry status` and `vmferry status \
             --sessions` list them"
        );
        return Err(Failure::new(Code::UnknownGuest, text));
    };
    let state = format!("session {}: this host {}", last.session, promise(last));
    let doubtful: Vec<_> = meant.into_iter().filter(is_in_doubt).collect();
    if doubtful.is_empty() {
        let text = format!("{asked} is not in doubt, so there is nothing to decide; {state}");
        return Err(Failure::new(Code::WrongState, text));
    }
    // A decision is for one guest. Applied to two guests of one name, it could lose both.
    let uuid = |session: &SessionSummary| session.guest().map(|guest| guest.uuid);
    if doubtful.iter().any(|session| uuid(session) != uuid(&doubtful[0])) {
        let numbers: Vec<String> = doubtful.iter().map(|one| one.session.to_string()).collect();
        let text = format!(
            "several guests named {asked} are in doubt: give the number of one session instead: {}",
            numbers.join(", ")
        );
        return Err(Failure::new(Code::WrongState, text));
    }
    if let Some(led) = doubtful.iter().find(|session| session.led) {
        return Err(in_use(led));
    }
    Ok(Doubt::Journals(doubtful))
}

fn in_use(session: &SessionSummary) -> Failure {
    let text = format!(
        "a process still leads session {} and has no control socket: only it can decide. If it is \
         stuck, end it first (`fuser` on the journal names it)",
        session.session
    );
    Failure::new(Code::Busy, text)
}

/// What the operator must do first, and what is at risk.
fn remind(name: &str, doubt: &Doubt, word: OperatorWord) -> String {
    let (Doubt::Process(sessions) | Doubt::Journals(sessions)) = doubt;
    let mut text = String::new();
    for session in sessions {
        text.push_str(&format!(
            "session {} of {name} with {}, begun {}: this host's journal has COMMIT and no \
             result\n",
            session.session,
            peer(session).unwrap_or("an unknown host"),
            began(session),
        ));
    }
    text.push_str(&match word {
        OperatorWord::SourceResumes => format!(
            "FIRST power the other host off, fence it, or end the VMM of {name} there. `vmferry \
             status --sessions` on that host shows what it promised: if it says `has the guest`, \
             the guest has run there and must not be resumed here. If the guest still runs there, \
             two guests write to its shared disks and destroy them."
        ),
        OperatorWord::DestinationOwns => format!(
            "FIRST make sure that the other host has {name}: `vmferry status --sessions` there \
             says `has the guest`. The guest on this host is given up: if it does not run there, \
             its memory is lost."
        ),
    });
    text
}

/// Asks for confirmation on a terminal. Elsewhere `--yes` is required.
fn confirm(name: &str, reminder: &str, confirmed: bool, output: &Output) -> Result<(), Failure> {
    output.note(reminder);
    if confirmed {
        return Ok(());
    }
    if output.is_json() || !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        let text = format!("nothing was decided. {reminder} Add --yes when that is done");
        return Err(Failure::new(Code::Usage, text));
    }
    let mut errors = std::io::stderr();
    write!(errors, "Is that done? Type the guest's name ({name}) to go on: ")?;
    errors.flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    if answer.trim() == name {
        return Ok(());
    }
    Err(Failure::new(Code::Cancelled, "nothing was decided"))
}

fn tell_process(
    socket: &Path,
    name: &str,
    sessions: &[SessionSummary],
    word: OperatorWord,
    output: &Output,
) -> Result<(), Failure> {
    let mut value = call(socket, &Request::Resolve { word }, &mut |_| {})?;
    value["sessions"] = numbers(sessions);
    output.result(&value, || match word {
        OperatorWord::DestinationOwns => format!("{name}: given up here, as you decided"),
        OperatorWord::SourceResumes => format!("{name}: runs here, as you decided"),
    });
    Ok(())
}

fn tell_journals(
    journals: &Path,
    sessions: &[SessionSummary],
    word: OperatorWord,
    output: &Output,
) -> Result<(), Failure> {
    let serves = sessions
        .iter()
        .any(|session| record_of_operator(&session.records, word) == Record::Serving);
    for session in sessions {
        let reopened = FileJournal::reopen(journals, session.session, Side::Source);
        let (mut journal, records) = reopened.map_err(|error| match error {
            JournalError::InUse { .. } => in_use(session),
            error => internal(error),
        })?;
        // Another process may have decided while the operator was asked.
        if records != session.records {
            let text = format!("session {} has changed meanwhile: check it again", session.session);
            return Err(Failure::new(Code::WrongState, text));
        }
        journal.append(&record_of_operator(&records, word)).map_err(internal)?;
    }
    let result = json!({ "ok": true, "sessions": numbers(sessions), "vmm": "gone" });
    output.result(&result, || {
        let numbers: Vec<String> = sessions.iter().map(|one| one.session.to_string()).collect();
        format!(
            "recorded in the journal of {}. No vmferry process on this host waits for this guest. \
             If it is a QEMU guest and its QEMU still runs, the guest is paused: {}",
            numbers.join(", "),
            match word {
                OperatorWord::DestinationOwns if serves => {
                    "leave it so, because the other host may still need its memory"
                }
                OperatorWord::DestinationOwns => "quit it with `quit` in its monitor",
                OperatorWord::SourceResumes => "resume it with `cont` in its monitor",
            }
        )
    });
    Ok(())
}

fn numbers(sessions: &[SessionSummary]) -> Value {
    sessions.iter().map(|session| json!(session.session)).collect()
}

fn internal(error: JournalError) -> Failure {
    Failure::of(Code::Internal, error)
}

fn is_in_doubt(session: &SessionSummary) -> bool {
    session.verdict == Verdict::InDoubt
}

/// Whether `asked` is the session's number, the guest's name, or the path of its control socket.
fn is_meant(session: &SessionSummary, asked: &str) -> bool {
    let stem = Path::new(asked).file_stem().and_then(|stem| stem.to_str());
    let name = if asked.contains('/') { stem } else { Some(asked) };
    session.session.to_string() == asked || (name.is_some() && guest_name(session) == name)
}
