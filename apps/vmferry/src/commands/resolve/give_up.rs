//! `vmferry resolve --give-up`: a guest that lacks pages has lost one of its hosts.

mod arrived;
mod memory;
mod process;

use serde_json::json;
use vmferry_control::{ClientError, Directories, Request, call};
use vmferry_handover::journal::{
    self, FileJournal, Journal, JournalError, Record, SessionSummary, Side,
};

use super::{confirm, in_use, internal, is_meant};
use crate::args::ResolveOptions;
use crate::commands::directories;
use crate::commands::status::{began, guest_name, peer};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Gives up the guest on the host where it runs, or the memory on the host that it has left.
pub fn run(options: &ResolveOptions, output: &Output) -> Result<(), Failure> {
    let directory = directories()?;
    let sessions = journal::sessions(&directory.journals()).map_err(internal)?;
    let meant = sessions.iter().filter(|one| one.lacks_pages() && is_meant(one, &options.guest));
    let (serving, here): (Vec<_>, Vec<_>) = meant.partition(|one| one.side == Side::Source);
    let lives = |one: &&&SessionSummary| arrived::Vmm::of(&directory, one).is_some();
    let living: Vec<_> = here.iter().filter(lives).copied().collect();
    // A host can be both. Then the side whose memory is of use decides.
    match (&living[..], &serving[..], &here[..]) {
        ([session], ..) | ([], [], [session]) => {
            arrived::give_up(&directory, session, options, output)
        }
        ([], [session], _) => release(&directory, session, options, output),
        ([], [], []) => {
            let text = format!(
                "{} lacks no pages of another host here, and no other host needs pages of it from \
                 here, so there is nothing to give up: `vmferry status --sessions` shows what was \
                 promised",
                options.guest
            );
            Err(Failure::new(Code::WrongState, text))
        }
        _ => {
            let text = format!(
                "several guests named {} lack pages: give the number of one session, from \
                 `vmferry status --sessions`",
                options.guest
            );
            Err(Failure::new(Code::WrongState, text))
        }
    }
}

/// Tells the process that serves the guest's pages, or writes to the journal if that has died. Asks
/// for confirmation first.
fn release(
    directory: &Directories,
    session: &SessionSummary,
    options: &ResolveOptions,
    output: &Output,
) -> Result<(), Failure> {
    if options.dump.is_some() {
        let text = "--dump saves the memory of a guest that runs on this host, and this one has \
                    left it: what is here is in the paused QEMU or VMM that it has left";
        return Err(Failure::new(Code::WrongState, text));
    }
    let name = guest_name(session).unwrap_or(&options.guest).to_owned();
    let reminder = format!(
        "session {} of {name} with {}, begun {}: the guest has run there, and lacks pages that \
         only this host has. FIRST make sure that it will never run there again: power the other host \
         off, or end the guest's VMM there. Giving up releases the memory that is here. {name} is \
         lost then: what it had written to its disks stays, everything in its memory is gone, and \
         it can only be started again from its disks. It is never resumed here, because it has run \
         on since.",
        session.session,
        peer(session).unwrap_or("an unknown host"),
        began(session),
    );
    confirm(&name, &reminder, options.yes, output)?;
    match call(&directory.socket(&name), &Request::GiveUp, &mut |_| {}) {
        Ok(_) => {}
        Err(ClientError::NoGuest { .. }) => {
            let journals = directory.journals();
            let reopened = FileJournal::reopen(&journals, session.session, Side::Source);
            let (mut journal, _) = reopened.map_err(|error| match error {
                JournalError::InUse { .. } => in_use(session),
                error => internal(error),
            })?;
            journal.append(&Record::Given { by_operator: true }).map_err(internal)?;
        }
        Err(error) => return Err(error.into()),
    }
    let result = json!({ "ok": true, "given_up": true, "session": session.session });
    output.result(&result, || {
        format!(
            "{name}: given up, as you decided. If it is a QEMU guest and its QEMU still runs here, \
             quit that with `quit` in its monitor"
        )
    });
    Ok(())
}
