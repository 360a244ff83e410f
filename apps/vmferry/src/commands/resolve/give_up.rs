//! `vmferry resolve --give-up`: a guest that lacks pages has lost its host.

use serde_json::json;
use vmferry_control::{ClientError, Request, call};
use vmferry_handover::journal::{
    self, FileJournal, Journal, JournalError, Record, SessionSummary, Side,
};

use super::{confirm, in_use, internal, is_meant};
use crate::args::ResolveOptions;
use crate::commands::directories;
use crate::commands::status::{began, guest_name, peer};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Tells the process that serves the guest's pages, or writes to the journal if that has died. Asks
/// for confirmation first.
pub fn run(options: &ResolveOptions, output: &Output) -> Result<(), Failure> {
    let directory = directories()?;
    let journals = directory.journals();
    let sessions = journal::sessions(&journals).map_err(internal)?;
    let serves = |one: &&SessionSummary| one.side == Side::Source && one.lacks_pages();
    let meant = sessions.iter().filter(|one| is_meant(one, &options.guest));
    let serving: Vec<&SessionSummary> = meant.filter(serves).collect();
    let [session] = serving[..] else {
        let text = match serving.len() {
            0 => format!(
                "no other host needs pages of {} from here, so there is nothing to give up: \
                 `vmferry status --sessions` shows what was promised",
                options.guest
            ),
            _ => format!(
                "other hosts need pages of several guests named {}: give the number of one \
                 session, from `vmferry status --sessions`",
                options.guest
            ),
        };
        return Err(Failure::new(Code::WrongState, text));
    };
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
