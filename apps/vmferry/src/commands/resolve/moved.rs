//! A guest that libvirt moves or has moved: its journals are those of the daemons.
//!
//! The word is written to the journal before libvirt is told anything. At the source, libvirt may
//! wait for it: on a connection that the daemon has, or the keeper of a dead daemon. Otherwise, and
//! at the destination, `virsh` resumes or destroys the guest.

mod remind;

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;
use vmferry_control::{Directories, Request, call};
use vmferry_handover::journal::{JournalError, RecordFile, SessionSummary, Side};
use vmferry_handover::{DomainSeen, FinishEntry, FinishWord, OperatorWord};
use vmferry_proxy::answer_held;

use self::remind::remind;
use super::plan::{Evidence, Plan, Then, at_destination, at_source};
use super::{confirm, internal, is_in_doubt, is_meant};
use crate::commands::daemon::domains::{self, DomainLook};
use crate::commands::daemon::keeper_socket;
use crate::commands::finishes::{Finish, FinishState, Finishes, advice, says};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// How long libvirt may take to do by itself what it was told on its connection, and the daemon to
/// write its journal.
const PATIENCE: Duration = Duration::from_secs(30);

/// For how long a daemon that is asked for the word may lock a journal.
const MOMENT: Duration = Duration::from_secs(2);

/// How often they are asked meanwhile.
const ASK_PERIOD: Duration = Duration::from_millis(200);

/// The session that the operator means, if it is one of libvirt's: the one with this number, or the
/// guest's last one that is not decided, or else its last one. `None` if a guest of that name is in
/// doubt that libvirt does not manage.
pub fn meant(
    journals: &Path,
    others: &[SessionSummary],
    guest: &str,
) -> Result<Option<Finish>, Failure> {
    if others.iter().any(|other| is_meant(other, guest) && is_in_doubt(other)) {
        return Ok(None);
    }
    let found = Finishes::read(journals)?;
    let its: Vec<&Finish> = found.named(guest).collect();
    let chosen = its.iter().rfind(|one| one.is_undecided()).or(its.last());
    Ok(chosen.map(|finish| (*finish).clone()))
}

/// Decides it.
pub fn run(
    places: &Directories,
    finish: &Finish,
    word: OperatorWord,
    confirmed: bool,
    output: &Output,
) -> Result<(), Failure> {
    let look = match (finish.state, finish.led) {
        // It is refused in any case, and libvirt may hang.
        (FinishState::Destination(_), true) => DomainLook::not_asked(),
        _ => DomainLook::at(finish.guest.uuid),
    };
    let plan = plan(finish, word, &look)?;
    let name = &finish.guest.name;
    confirm(name, &remind(finish, word, &look), confirmed, output)?;
    let by = match (finish.led, plan.journals) {
        (true, true) => {
            tell_daemon(places, finish, word)?;
            "daemon"
        }
        // It has the word already.
        (true, false) => "daemon",
        (false, _) => {
            write_word(places, finish, word, plan)?;
            "command"
        }
    };
    let done = carry_out(finish, plan)?;
    let result = json!({
        "ok": true, "session": finish.session, "side": finish.state.side(), "word": word,
        "journaled_by": plan.journals.then_some(by), "libvirt": done,
    });
    output.result(&result, || {
        let journal = if plan.journals { "recorded in" } else { "as recorded in" };
        format!("{name}: {journal} the journal of session {}; {done}", finish.session)
    });
    Ok(())
}

/// What will be done.
fn plan(finish: &Finish, word: OperatorWord, look: &DomainLook) -> Result<Plan, Failure> {
    let refuse = |reason: &str| {
        let text = format!(
            "refused: {reason}. Session {} of {}: this host {}",
            finish.session,
            finish.guest.name,
            says(finish, Some(look))
        );
        Err(Failure::new(Code::WrongState, text))
    };
    if look.is_split() {
        return refuse(&advice(finish, Some(look)).unwrap_or_default());
    }
    let (uuid, waits) = (finish.guest.uuid, look.seen == DomainSeen::Waits);
    let mut evidence =
        Evidence { seen: look.seen, has_job: false, is_loaded: false, led: finish.led };
    let planned = match finish.state {
        FinishState::Source(state) => at_source(state, word, evidence),
        FinishState::Destination(state) => {
            evidence.has_job = waits && domains::has_job(uuid);
            evidence.is_loaded = waits && domains::is_loaded(uuid);
            at_destination(state, word, evidence)
        }
    };
    planned.or_else(refuse)
}

/// The daemon leads the session, writes the word and tells libvirt.
fn tell_daemon(places: &Directories, finish: &Finish, word: OperatorWord) -> Result<(), Failure> {
    let name = &finish.guest.name;
    let session = finish.session.to_string();
    // `vmferry send --libvirt` may have the guest's name.
    for name in [name.clone(), format!("{name}.daemon")] {
        let socket = places.socket(&name);
        let Ok(status) = call(&socket, &Request::Status, &mut |_| {}) else { continue };
        if status["migration"]["session"] == session.as_str() {
            call(&socket, &Request::Resolve { word }, &mut |_| {})?;
            return await_word(places, finish);
        }
    }
    let text = format!(
        "a process leads session {session}, and no daemon answers for {name}: if the daemon is \
         stuck, end it first (`fuser` on the journal names it)"
    );
    Err(Failure::new(Code::Busy, text))
}

/// Waits until the word that the daemon was told is in the journal.
fn await_word(places: &Directories, finish: &Finish) -> Result<(), Failure> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = Finishes::read(&places.journals())?;
        let side = finish.state.side();
        let is_it = |one: &&Finish| one.session == finish.session && one.state.side() == side;
        if found.all.iter().find(is_it).is_none_or(|now| !now.is_undecided()) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let text = format!(
                "the daemon has not written the word about {} to its journal yet: see its log. It \
                 goes on trying",
                finish.guest.name
            );
            return Err(Failure::new(Code::Busy, text));
        }
        // Nothing reports it.
        std::thread::sleep(ASK_PERIOD);
    }
}

/// Writes the word, and answers a libvirt that waits for it while no daemon runs.
fn write_word(
    places: &Directories,
    finish: &Finish,
    word: OperatorWord,
    plan: Plan,
) -> Result<(), Failure> {
    let (session, side) = (finish.session, finish.state.side());
    let deadline = Instant::now() + MOMENT;
    let reopened = loop {
        match RecordFile::<FinishEntry>::reopen(&places.journals(), session, side) {
            // A daemon that is asked locks the journal for a moment.
            Err(JournalError::InUse { .. }) if Instant::now() < deadline => {
                std::thread::sleep(ASK_PERIOD);
            }
            reopened => break reopened,
        }
    };
    let (mut journal, entries) = reopened.map_err(|error| match error {
        JournalError::InUse { .. } => {
            let text = format!(
                "a daemon has just begun to lead session {session}: look at it again with \
                 `vmferry status --sessions`"
            );
            Failure::new(Code::Busy, text)
        }
        error => internal(error),
    })?;
    // Another process may have decided while the operator was asked.
    if entries != finish.entries {
        let text = format!("session {session} has changed meanwhile: check it again");
        return Err(Failure::new(Code::WrongState, text));
    }
    if plan.journals {
        let record = match finish.state {
            FinishState::Source(state) => state.operator(word).map(|step| step.journal),
            FinishState::Destination(state) => state.operator(word).map(|step| step.journal),
        };
        if let Some(record) = record.map_err(|error| Failure::of(Code::WrongState, error))? {
            journal.write(&FinishEntry::now(record)).map_err(internal)?;
        }
    }
    if side == Side::Source {
        let word = match word {
            OperatorWord::DestinationOwns => FinishWord::Runs,
            OperatorWord::SourceResumes => FinishWord::DoesNotRun,
        };
        let answered = answer_held(&keeper_socket(places), session, &finish.guest, word);
        answered.map_err(|error| {
            let context = "the word is in the journal, and libvirt could not be told: start the \
                           daemon, which tells it";
            Failure::of(Code::Internal, anyhow::Error::new(error).context(context))
        })?;
    }
    Ok(())
}

/// Lets libvirt do what the word says. Returns what was done, for people.
fn carry_out(finish: &Finish, plan: Plan) -> Result<&'static str, Failure> {
    let uuid = finish.guest.uuid;
    let deadline = Instant::now() + PATIENCE;
    // The source's libvirt acts by itself if it has got the word on its connection. One that was
    // restarted has no job.
    let look = loop {
        let look = DomainLook::at(uuid);
        let acts = look.seen == DomainSeen::Waits
            && finish.state.side() == Side::Source
            && domains::has_job(uuid);
        if plan.then == Then::Nothing || !acts || Instant::now() >= deadline {
            break look;
        }
        std::thread::sleep(ASK_PERIOD);
    };
    let told = match (plan.then, look.seen) {
        (Then::Nothing, _) => return Ok("nothing was to be done in libvirt"),
        (Then::Resume, DomainSeen::Runs) => return Ok("libvirt has resumed the guest here"),
        (Then::Destroy, DomainSeen::Gone) => {
            return Ok("libvirt has removed the paused guest here");
        }
        (Then::Resume, _) => domains::resume(uuid).map(|()| "the guest was resumed here"),
        (Then::Destroy, _) => domains::destroy(uuid).map(|()| "the paused guest was removed here"),
    };
    told.map_err(|problem| {
        let text = format!(
            "the word about {} is in the journal, and libvirt could not be told: {problem}. Give \
             the same command again once libvirt serves",
            finish.guest.name
        );
        Failure::new(Code::Internal, text)
    })
}
