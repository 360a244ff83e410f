//! Whether a file has changed since it was looked at.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A file as it was when it was looked at: which one, how long, and when it was last written or changed
/// otherwise. Two that are equal are of the same content, for files that are replaced or edited by people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    /// The file at `path` now, or the one that it points to; none if it can't be looked at. Costs one system call.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        let metadata = std::fs::metadata(path).ok()?;
        Some(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}
