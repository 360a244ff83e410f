//! `vmferry resolve`: the operator's way out of doubt.

use std::io::{BufRead, IsTerminal, Write};
use std::path::Path;

use serde_json::{Value, json};
use vmferry_control::{ClientError, Request, call};
use vmferry_handover::OperatorWord;
use vmferry_handover::journal::{
    self, FileJournal, Journal, JournalError, Record, SessionSummary, Side, Verdict,
};

use super::directories;
use super::status::{began, guest_name, peer, promise};
use crate::args::ResolveOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Who is to be told.
enum Doubt {
    /// The guest's VMM, or the guardian of a QEMU: it stands still and asks.
    Process(Vec<SessionSummary>),
    /// The journals alone: nobody leads these sessions any more.
    Journals(Vec<SessionSummary>),
}

/// Tells the guest's VMM, which is paused and asking; or, where that VMM has died, the journal. Not before the
/// operator has read what is at stake.
pub fn run(options: &ResolveOptions, output: &Output) -> Result<(), Failure> {
    let word = if options.destination_owns {
        OperatorWord::DestinationOwns
    } else {
        OperatorWord::SourceResumes
    };
    let directory = directories()?;
    let journals = directory.journals();
    let sessions = journal::sessions(&journals).map_err(internal)?;
    let meant: Vec<SessionSummary> =
        sessions.into_iter().filter(|session| is_meant(session, &options.guest)).collect();
    // A session's number stands for its guest, whose VMM must be asked as well.
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
                    "Another guest called {name} runs here (UUID {}): this is not about that one.",
                    status["uuid"].as_str().unwrap_or_default()
                ));
                without_vmm(&options.guest, others)?
            } else {
                with_vmm(&status, &name, its, word)?
            }
        }
        Err(ClientError::NoGuest { .. }) => without_vmm(&options.guest, meant)?,
        // One that is stopped may go on, and would know nothing of what was decided behind its back.
        Err(error) => return Err(error.into()),
    };
    let reminder = remind(&name, &doubt, word);
    confirm(&name, &reminder, options.yes, output)?;
    match doubt {
        Doubt::Process(sessions) => tell_process(&socket, &name, &sessions, word, output),
        Doubt::Journals(sessions) => tell_journals(&journals, &sessions, word, output),
    }
}

/// Whether a session is of the guest that this VMM has, and not of one that had the same name before.
fn is_of(session: &SessionSummary, status: &Value) -> bool {
    let its = status["uuid"].as_str().and_then(|uuid| uuid.parse::<uuid::Uuid>().ok());
    match (its, session.guest()) {
        (Some(its), Some(guest)) => guest.uuid == its,
        _ => true,
    }
}

/// Whether what is asked is about guests that had the name before: by the number of such a session, or since there
/// is nothing to decide about the guest that has the name now.
fn is_about_others(
    asked: &str,
    status: &Value,
    its: &[SessionSummary],
    others: &[SessionSummary],
) -> bool {
    let stands_still = status["migration"]["in_doubt"] == true || its.iter().any(is_in_doubt);
    others.iter().any(|other| other.session.to_string() == asked)
        || (!stands_still && others.iter().any(is_in_doubt))
}

/// What there is to decide about a guest whose VMM answers.
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
            "{name} is being migrated and is not in doubt, so there is nothing to decide: `vmferry cancel {name}` \
             ends the migration"
        ));
    }
    // The guest went on here by the destination's word, which could not be written down.
    match (doubtful.is_empty(), word) {
        (true, _) => {
            refused(format!("{name} is not in doubt, so there is nothing to decide: it is here"))
        }
        (false, OperatorWord::SourceResumes) => Ok(Doubt::Journals(doubtful)),
        (false, OperatorWord::DestinationOwns) => refused(format!(
            "{name} runs here, whatever its journal says: if it runs on the other host as well, end one of the two; \
             if not, `vmferry resolve --source-resumes` notes that it is here"
        )),
    }
}

/// What there is to decide where no VMM answers for the guest.
fn without_vmm(asked: &str, meant: Vec<SessionSummary>) -> Result<Doubt, Failure> {
    let Some(last) = meant.last() else {
        let text = format!(
            "no guest and no session is called {asked}: `vmferry status` and `vmferry status --sessions` list them"
        );
        return Err(Failure::new(Code::UnknownGuest, text));
    };
    let told = format!("session {}: this host {}", last.session, promise(last));
    let doubtful: Vec<_> = meant.into_iter().filter(is_in_doubt).collect();
    if doubtful.is_empty() {
        let text = format!("{asked} is not in doubt, so there is nothing to decide; {told}");
        return Err(Failure::new(Code::WrongState, text));
    }
    // A word is for one guest: where another of the same name has gone on, both might be lost by it.
    let uuid = |session: &SessionSummary| session.guest().map(|guest| guest.uuid);
    if doubtful.iter().any(|session| uuid(session) != uuid(&doubtful[0])) {
        let numbers: Vec<String> = doubtful.iter().map(|one| one.session.to_string()).collect();
        let text = format!(
            "several guests called {asked} are in doubt: say which one by the number of its session, of {}",
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
        "a process still leads session {}, and has no control socket: it is for it to decide; end it first if it is \
         stuck (`fuser` on the journal names it)",
        session.session
    );
    Failure::new(Code::Busy, text)
}

/// What the operator must have done, and what is at stake.
fn remind(name: &str, doubt: &Doubt, word: OperatorWord) -> String {
    let (Doubt::Process(sessions) | Doubt::Journals(sessions)) = doubt;
    let mut text = String::new();
    for session in sessions {
        text.push_str(&format!(
            "session {} of {name} with {}, begun {}: COMMIT is in the journal here, and no word of what came of it\n",
            session.session,
            peer(session).unwrap_or("an unknown host"),
            began(session),
        ));
    }
    text.push_str(&match word {
        OperatorWord::SourceResumes => format!(
            "Power the other host off, fence it, or end the VMM of {name} there FIRST. `vmferry status --sessions` \
             there says what it promised: with `has the guest` it has run on from here, and must not be resumed \
             here. If it runs there still and has disks that both hosts reach, two guests write to them and destroy \
             them."
        ),
        OperatorWord::DestinationOwns => format!(
            "Make sure FIRST that the other host has {name}: `vmferry status --sessions` there says `has the guest`. \
             The guest here is given up: if it does not run there, its memory is lost with it."
        ),
    });
    text
}

/// Asks on a terminal; elsewhere the order must have said it.
fn confirm(name: &str, reminder: &str, said: bool, output: &Output) -> Result<(), Failure> {
    output.note(reminder);
    if said {
        return Ok(());
    }
    if output.is_json() || !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        let text = format!("nothing is decided. {reminder} Say --yes when that is done");
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
    Err(Failure::new(Code::Cancelled, "nothing is decided"))
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
        OperatorWord::DestinationOwns => format!("{name}: given up here, as you said"),
        OperatorWord::SourceResumes => format!("{name}: runs here, as you said"),
    });
    Ok(())
}

fn tell_journals(
    journals: &Path,
    sessions: &[SessionSummary],
    word: OperatorWord,
    output: &Output,
) -> Result<(), Failure> {
    let record = match word {
        OperatorWord::DestinationOwns => Record::Given { by_operator: true },
        OperatorWord::SourceResumes => Record::Kept { by_operator: true },
    };
    for session in sessions {
        let reopened = FileJournal::reopen(journals, session.session, Side::Source);
        let (mut journal, records) = reopened.map_err(|error| match error {
            JournalError::InUse { .. } => in_use(session),
            error => internal(error),
        })?;
        // While the operator was asked somebody else may have decided.
        if records != session.records {
            let text = format!("session {} has gone on meanwhile: look again", session.session);
            return Err(Failure::new(Code::WrongState, text));
        }
        journal.append(&record).map_err(internal)?;
    }
    let result = json!({ "ok": true, "sessions": numbers(sessions), "vmm": "gone" });
    output.result(&result, || {
        let numbers: Vec<String> = sessions.iter().map(|one| one.session.to_string()).collect();
        format!(
            "noted in the journal of {}. Nothing of vmferry waits for this guest here. If it is a QEMU's and \
             that QEMU still lives, it stands still: {}",
            numbers.join(", "),
            match word {
                OperatorWord::DestinationOwns => "end it by its monitor (`quit`)",
                OperatorWord::SourceResumes => "continue it by its monitor (`cont`)",
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

/// By the session's number, the guest's name, or the path of its control socket, which ends in its name.
fn is_meant(session: &SessionSummary, asked: &str) -> bool {
    let stem = Path::new(asked).file_stem().and_then(|stem| stem.to_str());
    let name = if asked.contains('/') { stem } else { Some(asked) };
    session.session.to_string() == asked || (name.is_some() && guest_name(session) == name)
}
