//! `vmferry resolve`: the operator's way out of doubt.

use serde_json::json;
use vmferry::handover::OperatorWord;
use vmferry::journal::{self, FileJournal, Journal, Record, SessionSummary, Side, Verdict};
use vmferry_microvm::control::{ClientError, Request, call};

use super::directory;
use crate::args::ResolveOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Tells the guest's VMM, which is paused and asking; or, where that VMM has died, the journal.
pub fn run(options: &ResolveOptions, output: &Output) -> Result<(), Failure> {
    let word = if options.destination_owns {
        OperatorWord::DestinationOwns
    } else {
        OperatorWord::SourceResumes
    };
    let directory = directory()?;
    match call(&directory.socket(&options.guest), &Request::Resolve { word }, &mut |_| {}) {
        Ok(value) => {
            output.result(&value, || match word {
                OperatorWord::DestinationOwns => {
                    format!("{}: given up here, as you said", options.guest)
                }
                OperatorWord::SourceResumes => format!("{}: runs here, as you said", options.guest),
            });
            return Ok(());
        }
        Err(ClientError::NoGuest { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let sessions = journal::sessions(&directory.journals())
        .map_err(|error| Failure::of(Code::Internal, error))?;
    let doubtful: Vec<SessionSummary> = sessions
        .into_iter()
        .filter(|session| session.verdict == Verdict::InDoubt && is_meant(session, &options.guest))
        .collect();
    if doubtful.is_empty() {
        let text = format!(
            "no guest and no session in doubt is called {}: `vmferry status` lists them",
            options.guest
        );
        return Err(Failure::new(Code::UnknownGuest, text));
    }
    for session in &doubtful {
        let record = match word {
            OperatorWord::DestinationOwns => Record::Given { by_operator: true },
            OperatorWord::SourceResumes => Record::Kept { by_operator: true },
        };
        let (mut journal, _) =
            FileJournal::reopen(&directory.journals(), session.session, Side::Source)
                .map_err(|error| Failure::of(Code::Internal, error))?;
        journal.append(&record).map_err(|error| Failure::of(Code::Internal, error))?;
    }
    let numbers: Vec<String> = doubtful.iter().map(|one| one.session.to_string()).collect();
    output.result(&json!({ "ok": true, "sessions": numbers, "vmm": "gone" }), || {
        format!(
            "noted in the journal of {}. Nothing of vmferry runs for this guest here. If it is a QEMU's and \
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

fn is_meant(session: &SessionSummary, name: &str) -> bool {
    session.session.to_string() == name
        || session
            .records
            .iter()
            .any(|record| matches!(record, Record::Open { guest, .. } if guest.name == name))
}
