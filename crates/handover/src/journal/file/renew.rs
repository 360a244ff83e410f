//! A journal that can be written again after a failure.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use super::{RecordFile, read_file, sync_directory};
use crate::journal::lock::lock;
use crate::journal::{JournalError, JournalRecord, Side};

impl<R: JournalRecord> RecordFile<R> {
    /// Replaces the file by a synced copy of its whole records, after a failed [`write`], and
    /// returns them. The record that failed may be among them. The journal accepts records again.
    ///
    /// After a failed sync the kernel may report the same pages as clean. So it is not enough to
    /// sync the file once more: the records are written to another file.
    ///
    /// # Errors
    /// The journal is as it was before: it can't be read, or its directory can't be written.
    ///
    /// [`write`]: Self::write
    pub fn renew(&mut self, side: Side) -> Result<Vec<R>, JournalError> {
        if !self.is_in_place() {
            return Err(JournalError::Removed { path: self.path.clone() });
        }
        let (records, whole_bytes) = read_file(&self.path, side)?;
        let copy = self.path.with_extension("journal.new");
        let copied = self.copy_to(&copy, whole_bytes);
        if copied.is_err() {
            // It may not have been made.
            let _ = std::fs::remove_file(&copy);
        }
        copied?;
        self.poisoned = false;
        Ok(records)
    }

    fn copy_to(&mut self, copy: &Path, whole_bytes: usize) -> Result<(), JournalError> {
        let at = |action| {
            let path = copy.to_owned();
            move |source| JournalError::Io { action, path, source }
        };
        let mut bytes = std::fs::read(&self.path).map_err(at("read"))?;
        bytes.truncate(whole_bytes);
        match std::fs::remove_file(copy) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(at("replace")(error));
            }
            _ => {}
        }
        let made = OpenOptions::new().append(true).create_new(true).open(copy);
        let mut file = made.map_err(at("make"))?;
        // From the first moment on, nobody else may lead the session.
        lock(&file, copy)?;
        file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(at("write"))?;
        std::fs::rename(copy, &self.path).map_err(at("rename"))?;
        self.file = file;
        sync_directory(self.path.parent().unwrap_or(Path::new(".")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::record_files;
    use crate::{FinishEntry, FinishRecord, SessionId};

    const SESSION: SessionId = SessionId([7; 16]);

    fn entry(record: FinishRecord) -> FinishEntry {
        FinishEntry { record, at: 3 }
    }

    #[test]
    fn renewed_journal_has_its_whole_records_and_accepts_more() {
        let directory = tempfile::tempdir().unwrap();
        let mut journal = RecordFile::create(directory.path(), SESSION, Side::Source).unwrap();
        journal.write(&entry(FinishRecord::Sent)).unwrap();
        // The end of a record that failed.
        let mut torn = OpenOptions::new().append(true).open(journal.path()).unwrap();
        torn.write_all(b"0123 {\"rec").unwrap();
        // Every write to this descriptor fails.
        let broken = std::fs::File::open(journal.path()).unwrap();
        let good = std::mem::replace(&mut journal.file, broken);
        drop(good);
        assert!(journal.write(&entry(FinishRecord::Sent)).is_err());
        let poisoned = journal.write(&entry(FinishRecord::Sent));
        assert!(matches!(poisoned, Err(JournalError::Poisoned { .. })));

        assert_eq!(journal.renew(Side::Source).unwrap(), [entry(FinishRecord::Sent)]);
        let word = FinishRecord::Answered { word: crate::FinishWord::Runs, by_operator: false };
        journal.write(&entry(word.clone())).unwrap();
        let found = record_files::<FinishEntry>(directory.path(), Side::Source).unwrap();
        assert_eq!(found.len(), 1, "no copy is left");
        assert!(found[0].led, "another process could lead the session");
        assert_eq!(*found[0].records.as_ref().unwrap(), [entry(FinishRecord::Sent), entry(word)]);
        let second = RecordFile::<FinishEntry>::reopen(directory.path(), SESSION, Side::Source);
        assert!(matches!(second, Err(JournalError::InUse { .. })));
    }

    #[test]
    fn removed_journal_is_not_renewed() {
        let directory = tempfile::tempdir().unwrap();
        let created = RecordFile::<FinishEntry>::create(directory.path(), SESSION, Side::Source);
        let mut journal = created.unwrap();
        std::fs::remove_file(journal.path()).unwrap();
        assert!(matches!(journal.renew(Side::Source), Err(JournalError::Removed { .. })));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
