//! What this host has promised about a guest's Finish, in a journal.
//!
//! The step functions of [`vmferry_handover`] decide; a ledger writes their records before it says
//! what to do. The model in `testing/model` explores all that can happen between the hosts.
//!
//! After a failed write the record may or may not be on disk. The ledger then does nothing until
//! the journal can be written again, and goes on from what it says ([`Ledger::mend`]).

use std::path::Path;
use std::time::{Duration, Instant};

use vmferry_handover::journal::{JournalError, RecordFile, Side as JournalSide};
use vmferry_handover::{
    DestinationFinish, FinishAnswer, FinishEntry, FinishError, FinishRecord, FinishStep,
    GuestIdentity, OperatorWord, SessionId, SourceAction, SourceFinish,
};
use vmferry_libvirt_rpc::Guest;

/// The first wait after a failed write, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Why a step was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The record may or may not be on disk, so nothing was done.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The step is against the rules.
    #[error(transparent)]
    Finish(#[from] FinishError),
    /// The journal could not be written, and it is too early for the next attempt.
    #[error("the journal of the session could not be written, and will be tried again")]
    TooEarly,
    /// The journal has no record, or not the first one.
    #[error(
        "the journal of session {session} does not say which guest it is about: it was cut or \
         replaced. Look at both hosts with `virsh domstate --reason`"
    )]
    NoBeginning {
        /// The session.
        session: SessionId,
    },
}

/// The state of one side.
pub(super) trait Recovered: Copy {
    const SIDE: JournalSide;
    fn of(records: &[FinishRecord]) -> Result<Option<Self>, FinishError>;
}

impl Recovered for SourceFinish {
    const SIDE: JournalSide = JournalSide::Source;
    fn of(records: &[FinishRecord]) -> Result<Option<Self>, FinishError> {
        Self::recover(records)
    }
}

impl Recovered for DestinationFinish {
    const SIDE: JournalSide = JournalSide::Destination;
    fn of(records: &[FinishRecord]) -> Result<Option<Self>, FinishError> {
        Self::recover(records)
    }
}

/// A session's state with its journal.
#[derive(Debug)]
pub(crate) struct Ledger<S> {
    state: S,
    file: RecordFile<FinishEntry>,
    /// When a journal that could not be written is tried again.
    next_attempt: Option<Instant>,
    pause: Duration,
}

impl<S: Recovered> Ledger<S> {
    /// Begins the session's journal.
    pub(super) fn open(
        directory: &Path,
        session: SessionId,
        state: S,
        guest: &Guest,
        (peer, peer_names): (&str, &[String]),
    ) -> Result<Self, JournalError> {
        let mut file = RecordFile::create(directory, session, S::SIDE)?;
        file.write(&FinishEntry::now(FinishRecord::Open {
            guest: GuestIdentity { uuid: guest.uuid, name: guest.name.clone() },
            peer: peer.to_owned(),
            peer_names: peer_names.to_vec(),
        }))?;
        Ok(Self { state, file, next_attempt: None, pause: FIRST_PAUSE })
    }

    /// Leads a session that nobody leads. Returns its records, too; `None` if it has none.
    pub(super) fn reopen(
        directory: &Path,
        session: SessionId,
    ) -> Result<Option<(Self, Vec<FinishRecord>)>, LedgerError> {
        let (file, entries) = RecordFile::<FinishEntry>::reopen(directory, session, S::SIDE)?;
        let records: Vec<FinishRecord> = entries.into_iter().map(|entry| entry.record).collect();
        let ledger = S::of(&records)?.map(|state| Self {
            state,
            file,
            next_attempt: None,
            pause: FIRST_PAUSE,
        });
        Ok(ledger.map(|ledger| (ledger, records)))
    }

    /// Removes the journal.
    pub(super) fn remove(self) -> Result<(), JournalError> {
        self.file.remove()
    }

    /// Whether the last write has succeeded.
    pub fn is_sound(&self) -> bool {
        self.next_attempt.is_none()
    }

    /// The state that the journal has.
    pub fn state(&self) -> S {
        self.state
    }

    /// Makes a journal whose write has failed usable again, if it is time to try. The state is what
    /// is on disk then.
    ///
    /// # Errors
    /// [`LedgerError::TooEarly`], or it failed again.
    pub fn mend(&mut self) -> Result<(), LedgerError> {
        let Some(due) = self.next_attempt else { return Ok(()) };
        if Instant::now() < due {
            return Err(LedgerError::TooEarly);
        }
        let entries = self.file.renew(S::SIDE).inspect_err(|_| self.failed())?;
        let records: Vec<FinishRecord> = entries.into_iter().map(|entry| entry.record).collect();
        self.state = S::of(&records)?.ok_or(FinishError::Records)?;
        self.next_attempt = None;
        Ok(())
    }

    /// Writes the step's record. On return the action may be done.
    pub(super) fn take<A>(&mut self, step: FinishStep<S, A>) -> Result<A, LedgerError> {
        if let Some(record) = step.journal {
            let written = self.file.write(&FinishEntry::now(record));
            written.inspect_err(|_| self.failed())?;
            self.pause = FIRST_PAUSE;
        }
        self.state = step.state;
        Ok(step.action)
    }

    fn failed(&mut self) {
        self.next_attempt = Some(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

/// The source's side of a session.
pub(crate) type SourceLedger = Ledger<SourceFinish>;

impl SourceLedger {
    pub fn begin(
        directory: &Path,
        session: SessionId,
        guest: &Guest,
        peer: &str,
    ) -> Result<Self, JournalError> {
        Self::open(directory, session, SourceFinish::NotSent, guest, (peer, &[]))
    }

    /// The Finish may be sent on return.
    pub fn send(&mut self) -> Result<(), LedgerError> {
        self.mend()?;
        let step = self.state.send()?;
        self.take(step)?;
        Ok(())
    }

    /// What to do after this answer.
    pub fn hear(&mut self, answer: FinishAnswer) -> Result<SourceAction, LedgerError> {
        self.mend()?;
        let step = self.state.hear(answer)?;
        self.take(step)
    }

    /// What to do after an operator's decision.
    pub fn operator(&mut self, word: OperatorWord) -> Result<SourceAction, LedgerError> {
        self.mend()?;
        let step = self.state.operator(word)?;
        self.take(step)
    }

    /// What to do after the link was lost, or a restart.
    pub fn resumed(&self) -> SourceAction {
        self.state.resumed()
    }
}

/// A session of a source that an earlier daemon has left.
pub(crate) struct LeftDeparture {
    pub ledger: SourceLedger,
    pub guest: GuestIdentity,
    pub peer: String,
}

impl LeftDeparture {
    /// Leads a session that an earlier daemon has left.
    ///
    /// # Errors
    /// Nothing is known about the session, which may be better soon.
    pub fn open(directory: &Path, session: SessionId) -> Result<Self, LedgerError> {
        let no_beginning = || LedgerError::NoBeginning { session };
        let reopened = SourceLedger::reopen(directory, session)?;
        let (ledger, records) = reopened.ok_or_else(no_beginning)?;
        let open = records.into_iter().find_map(|record| match record {
            FinishRecord::Open { guest, peer, .. } => Some((guest, peer)),
            _ => None,
        });
        let (guest, peer) = open.ok_or_else(no_beginning)?;
        Ok(Self { ledger, guest, peer })
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;
    use vmferry_handover::FinishWord;

    use super::*;

    const SESSION: SessionId = SessionId([4; 16]);

    /// The directory can't be written while its path is a file.
    #[test]
    fn journal_that_failed_is_tried_again_later_and_goes_on_from_the_disk() {
        let place = tempfile::tempdir().unwrap();
        let (directory, away) = (place.path().join("journals"), place.path().join("away"));
        let guest = Guest { name: "web".into(), uuid: Uuid::nil() };
        let mut ledger = SourceLedger::begin(&directory, SESSION, &guest, "host-b").unwrap();
        ledger.send().unwrap();
        std::fs::rename(&directory, &away).unwrap();
        std::fs::write(&directory, "").unwrap();
        let answer = FinishAnswer::Word(FinishWord::Runs);
        let failed = ledger.hear(answer);
        assert!(matches!(failed, Err(LedgerError::Journal(_))), "{failed:?}");
        let early = ledger.hear(answer);
        assert!(matches!(early, Err(LedgerError::TooEarly)), "{early:?}");
        ledger.next_attempt = Some(Instant::now());
        let again = ledger.hear(answer);
        assert!(matches!(again, Err(LedgerError::Journal(_))), "{again:?}");
        assert_eq!((ledger.state(), ledger.pause), (SourceFinish::Sent, FIRST_PAUSE * 4));

        std::fs::remove_file(&directory).unwrap();
        std::fs::rename(&away, &directory).unwrap();
        ledger.next_attempt = Some(Instant::now());
        assert_eq!(ledger.hear(answer).unwrap(), SourceAction::Reply(FinishWord::Runs));
        assert_eq!(ledger.pause, FIRST_PAUSE);
        drop(ledger);
        let left = LeftDeparture::open(&directory, SESSION).unwrap();
        assert_eq!(left.ledger.state(), SourceFinish::Answered(FinishWord::Runs));
        assert_eq!((left.guest.name.as_str(), left.peer.as_str()), ("web", "host-b"));
    }
}
