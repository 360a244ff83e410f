//! What this host's journals say about sessions that it received, reported to their witness: a
//! source in doubt that can't reach this host learns it there.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};
use vmferry::witness::{Register, Witness, WitnessRequest};
use vmferry_handover::journal::{
    Record, Side, recorded_sessions, records_of, recovered_word, witness_of,
};
use vmferry_handover::{SessionId, SessionWord};

use crate::exit::{Code, Failure};

/// The reports of one agent.
pub struct Reports {
    journals: PathBuf,
    witness: Arc<dyn Witness>,
    /// What was reported last of sessions that may still change.
    reported: HashMap<SessionId, SessionWord>,
    /// Sessions about which nothing is left to report.
    done: HashSet<SessionId>,
}

impl Reports {
    /// No reports yet.
    pub fn new(journals: PathBuf, witness: Arc<dyn Witness>) -> Self {
        Self { journals, witness, reported: HashMap::new(), done: HashSet::new() }
    }

    /// Reports what is new, and tells of it with `tell`. Returns the first problem. A journal that
    /// can't be read does not keep the others from being reported.
    pub fn turn(&mut self, tell: &mut dyn FnMut(Value, &str)) -> Result<(), Failure> {
        let sessions = recorded_sessions::<Record>(&self.journals, Side::Destination)
            .map_err(|error| Failure::of(Code::Internal, error))?;
        // Journals that were removed are not remembered.
        let there: HashSet<_> = sessions.iter().copied().collect();
        self.done.retain(|session| there.contains(session));
        self.reported.retain(|session, _| there.contains(session));
        let mut problem = None;
        for session in sessions {
            if self.done.contains(&session) {
                continue;
            }
            match self.report(session, tell) {
                // The next question would wait as long.
                Err(failure) if failure.code == Code::Connect => return Err(failure),
                Err(failure) => drop(problem.get_or_insert(failure)),
                Ok(()) => {}
            }
        }
        problem.map_or(Ok(()), Err)
    }

    fn report(
        &mut self,
        session: SessionId,
        tell: &mut dyn FnMut(Value, &str),
    ) -> Result<(), Failure> {
        let unreadable = |error| Failure::of(Code::Internal, error);
        let records = records_of::<Record>(&self.journals, session, Side::Destination);
        let records = records.map_err(unreadable)?.unwrap_or_default();
        if records.is_empty() {
            // Its receiver has just made the file.
            return Ok(());
        }
        if witness_of(&records) != Some(&self.witness.id()) {
            self.done.insert(session);
            return Ok(());
        }
        let word = recovered_word(&self.journals, session).map_err(unreadable)?;
        if matches!(word, SessionWord::Unknown | SessionWord::Pending)
            || self.reported.get(&session) == Some(&word)
        {
            return Ok(());
        }
        let asked = self.witness.ask(session, Some(WitnessRequest::Report(word)));
        let register =
            asked.map_err(|error| Failure::new(Code::Connect, vmferry::chain(error.as_ref())))?;
        self.reported.insert(session, word);
        // A register that is not there any more was that of a session that ended long ago.
        if register.is_final() || register == Register::Unopened {
            self.done.insert(session);
            self.reported.remove(&session);
        }
        if register == Register::Unopened {
            return Ok(());
        }
        let agrees = agrees(register, word);
        let event = json!({
            "event": if agrees { "reported" } else { "report-refused" },
            "session": session, "word": word, "register": register,
        });
        let says = in_words(word);
        let text = match agrees {
            true => format!("session {session}: reported that {says}"),
            false => format!(
                "session {session}: this host's journal says that {says}, and etcd disagrees \
                 ({register:?}). Was its data changed or restored? `vmferry status --sessions` on \
                 both hosts says which one has the guest"
            ),
        };
        tell(event, &text);
        Ok(())
    }
}

/// A word for people.
fn in_words(word: SessionWord) -> &'static str {
    match word {
        SessionWord::Aborted => "the guest never runs here",
        SessionWord::Owns => "the guest is here",
        SessionWord::Fetching => "the guest is here and lacks pages",
        SessionWord::Ended => "the guest has ended here while it lacked pages",
        SessionWord::Unknown | SessionWord::Pending => "nothing is decided here",
    }
}

/// Whether the register is one that a host with this word may find.
fn agrees(register: Register, word: SessionWord) -> bool {
    match word {
        SessionWord::Aborted => {
            matches!(register, Register::Aborted | Register::TakenBack | Register::Freed)
        }
        SessionWord::Owns => register == Register::Owns,
        SessionWord::Fetching => register == Register::Fetching,
        SessionWord::Ended => register == Register::Ended,
        SessionWord::Unknown | SessionWord::Pending => true,
    }
}
