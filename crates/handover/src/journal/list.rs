//! Journals of any kind of records in a directory.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::file::{parse_name_for, path_for, read_file};
use super::{JournalError, JournalRecord, Side, lock};
use crate::SessionId;

/// Longer than it takes to write a record.
const MOMENT: Duration = Duration::from_millis(50);

/// A session's journal.
#[derive(Debug)]
pub struct SessionRecords<R> {
    /// The session.
    pub session: SessionId,
    /// Its records, or why they can't be read.
    pub records: Result<Vec<R>, JournalError>,
    /// Whether a process leads the session now.
    pub led: bool,
}

/// The journals of such records that one side has written, the one that was changed last at the
/// end.
///
/// # Errors
/// The directory can't be read. A missing directory has no journals.
pub fn record_files<R: JournalRecord>(
    directory: &Path,
    side: Side,
) -> Result<Vec<SessionRecords<R>>, JournalError> {
    let read = |session| {
        let path = path_for::<R>(directory, session, side);
        // Checked first: a process that ends in between has written its last record.
        let led = is_led(&path);
        let records = read_file(&path, side).map(|(records, _)| records);
        SessionRecords { session, records, led }
    };
    Ok(recorded_sessions::<R>(directory, side)?.into_iter().map(read).collect())
}

/// The sessions with a journal of such records that one side has written, the one that was changed
/// last at the end. Reads no journal.
///
/// # Errors
/// The directory can't be read. A missing directory has no journals.
pub fn recorded_sessions<R: JournalRecord>(
    directory: &Path,
    side: Side,
) -> Result<Vec<SessionId>, JournalError> {
    let failed = |source| JournalError::Io { action: "list", path: directory.to_owned(), source };
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_str().and_then(parse_name_for::<R>);
        let Some((session, _)) = name.filter(|(_, of)| *of == side) else { continue };
        let changed = entry.metadata().and_then(|metadata| metadata.modified()).ok();
        found.push((changed, session));
    }
    found.sort_unstable();
    Ok(found.into_iter().map(|(_, session)| session).collect())
}

/// The records of a session that another process may lead; `None` without a journal. The last one
/// may not be synced yet: no word may be given from it.
///
/// # Errors
/// The journal can't be read.
pub fn records_of<R: JournalRecord>(
    directory: &Path,
    session: SessionId,
    side: Side,
) -> Result<Option<Vec<R>>, JournalError> {
    match read_file(&path_for::<R>(directory, session, side), side) {
        Ok((records, _)) => Ok(Some(records)),
        Err(JournalError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Whether a process leads the session, and not only writes one record: a daemon that is asked for
/// a word locks the journal for a moment.
fn is_led(path: &Path) -> bool {
    lock::is_locked(path) && {
        std::thread::sleep(MOMENT);
        lock::is_locked(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::RecordFile;
    use crate::{FinishEntry, FinishRecord, FinishWord};

    #[test]
    fn journals_of_a_finish_are_listed_apart_from_handovers() {
        let directory = tempfile::tempdir().unwrap();
        let (path, session) = (directory.path(), SessionId([5; 16]));
        let sent = FinishEntry { record: FinishRecord::Sent, at: 7 };
        let word = FinishRecord::Answered { word: FinishWord::Runs, by_operator: false };
        let word = FinishEntry { record: word, at: 9 };
        let mut journal = RecordFile::create(path, session, Side::Source).unwrap();
        journal.write(&sent).unwrap();
        journal.write(&word).unwrap();
        drop(journal);
        let found = record_files::<FinishEntry>(path, Side::Source).unwrap();
        assert_eq!((found.len(), found[0].session, found[0].led), (1, session, false));
        assert_eq!(*found[0].records.as_ref().unwrap(), [sent, word]);
        assert!(record_files::<FinishEntry>(path, Side::Destination).unwrap().is_empty());
        assert!(crate::journal::sessions(path).unwrap().is_empty());
        assert!(record_files::<FinishEntry>(&path.join("none"), Side::Source).unwrap().is_empty());
    }
}
