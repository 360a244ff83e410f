//! Journals of any kind of records in a directory.

use std::io;
use std::path::Path;

use super::file::{parse_name_for, path_for, read_file};
use super::{JournalError, JournalRecord, Side};
use crate::SessionId;

/// A session's journal.
#[derive(Debug)]
pub struct SessionRecords<R> {
    /// The session.
    pub session: SessionId,
    /// Its records, or why they can't be read.
    pub records: Result<Vec<R>, JournalError>,
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
        let records = read_file(&path_for::<R>(directory, session, side), side);
        let records = records.map(|(records, _)| records);
        found.push((changed, SessionRecords { session, records }));
    }
    found.sort_by_key(|(changed, one)| (*changed, one.session));
    Ok(found.into_iter().map(|(_, one)| one).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::RecordFile;
    use crate::{FinishRecord, FinishWord};

    #[test]
    fn journals_of_a_finish_are_listed_apart_from_handovers() {
        let directory = tempfile::tempdir().unwrap();
        let (path, session) = (directory.path(), SessionId([5; 16]));
        let word = FinishRecord::Answered { word: FinishWord::Runs, by_operator: false };
        let mut journal = RecordFile::create(path, session, Side::Source).unwrap();
        journal.write(&FinishRecord::Sent).unwrap();
        journal.write(&word).unwrap();
        drop(journal);
        let found = record_files::<FinishRecord>(path, Side::Source).unwrap();
        assert_eq!((found.len(), found[0].session), (1, session));
        assert_eq!(*found[0].records.as_ref().unwrap(), [FinishRecord::Sent, word]);
        assert!(record_files::<FinishRecord>(path, Side::Destination).unwrap().is_empty());
        assert!(crate::journal::sessions(path).unwrap().is_empty());
        assert!(record_files::<FinishRecord>(&path.join("none"), Side::Source).unwrap().is_empty());
    }
}
