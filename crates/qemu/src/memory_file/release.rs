//! Releases the pages of a source's memory files, once its guest runs elsewhere and its QEMU has
//! ended.

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::fs::FallocateFlags;
use serde::Serialize;

use super::{Backends, Mapper, Sharing, Use, kind_of, lease, mappers};
use crate::error::QemuError;
use crate::located::Located;
use crate::process::{self, END_TIMEOUT};
use crate::qmp::Qmp;
use crate::view::View;

/// Unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// The memory files of a QEMU that is about to end.
pub struct Leaving {
    process: OwnedFd,
    files: Vec<MemoryFile>,
}

struct MemoryFile {
    path: String,
    /// Device and inode, as `/proc` prints them.
    id: (u64, u64),
    file: File,
    /// The range of the block's bytes in the file.
    range: Range<u64>,
}

/// What was released.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Release {
    /// Bytes of memory that were freed.
    pub freed_bytes: u64,
    /// Files that were left unchanged.
    pub kept: Vec<KeptFile>,
}

/// A file that was not emptied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeptFile {
    /// Its path, as QEMU has it.
    pub path: String,
    /// Why it was not emptied.
    pub why: String,
}

impl Release {
    /// Releases the files of a QEMU that was told to quit. Releases nothing if it has no files, or
    /// if they could not be found before.
    #[must_use]
    pub fn by(leaving: Result<Option<Leaving>, QemuError>) -> Self {
        match leaving {
            Ok(leaving) => leaving.map(Leaving::give_back).unwrap_or_default(),
            Err(error) => {
                let (path, why) = ("its memory".to_owned(), vmferry::chain(&error));
                Self { freed_bytes: 0, kept: vec![KeptFile { path, why }] }
            }
        }
    }
}

impl Leaving {
    /// Finds the memory files of a QEMU and tells it to quit. QEMU is told even if the files can't
    /// be found, but not if it does not answer: a later attempt can then still find them.
    ///
    /// # Errors
    /// QMP errors.
    pub fn quit(
        qmp: &mut Qmp,
        view: &mut dyn View,
    ) -> Result<Result<Option<Self>, QemuError>, QemuError> {
        let leaving = match Self::of(qmp, view) {
            Err(error) if error.is_timeout() => return Err(error),
            found => found,
        };
        qmp.quit()?;
        Ok(leaving)
    }

    /// Opens the memory files of a QEMU while it still has them; `None` if it reports no named
    /// shared file. Files that are not RAM are left out, and so are files without a name: these
    /// disappear with the process.
    ///
    /// # Errors
    /// QMP errors, or if the process is not accessible.
    fn of(qmp: &mut Qmp, view: &mut dyn View) -> Result<Option<Self>, QemuError> {
        if !Backends::read(qmp)?.have_shared_files(qmp)? {
            return Ok(None);
        }
        let located = Located::find(qmp, view)?;
        let pid = located.pid;
        let process = process::pidfd(pid).map_err(|source| QemuError::Process {
            action: "wait for the end",
            pid,
            source,
        })?;
        let mut files = Vec::new();
        for (block, mapping) in located.blocks {
            let Some(mapping) = mapping.filter(|mapping| mapping.writable) else { continue };
            if located.backends.use_of(&block.name) != Use::Ram {
                continue;
            }
            let file = view.open_file(pid, &mapping)?;
            if file.metadata().is_ok_and(|metadata| metadata.nlink() == 0) {
                continue;
            }
            let bytes = mapping.range.end - mapping.range.start;
            let range = mapping.offset..mapping.offset.saturating_add(bytes);
            files.push(MemoryFile { path: mapping.path, id: mapping.file, file, range });
        }
        Ok(Some(Self { process, files }))
    }

    /// Waits until the QEMU has ended, and empties the files that no other process has.
    #[must_use]
    pub fn give_back(self) -> Release {
        let mut release = Release::default();
        let ended = process::has_ended_within(&self.process, END_TIMEOUT);
        for file in self.files {
            let emptied = match &ended {
                Ok(true) => file.empty(),
                Ok(false) => Err(format!("its QEMU has not ended in {} s", END_TIMEOUT.as_secs())),
                Err(error) => Err(format!("the end of its QEMU can't be waited for: {error}")),
            };
            match emptied {
                Ok(bytes) => release.freed_bytes += bytes,
                Err(why) => release.kept.push(KeptFile { path: file.path, why }),
            }
        }
        release
    }
}

impl MemoryFile {
    /// Releases its pages if that is allowed. Returns the number of bytes, or why it is not
    /// allowed.
    fn empty(&self) -> Result<u64, String> {
        let text = |error: std::io::Error| error.to_string();
        if kind_of(&self.file).map_err(text)?.is_none() {
            return Err("it is on a file system that other hosts may share".to_owned());
        }
        let own = std::process::id();
        let seen =
            mappers::find(self.id, |pid| pid == own).map_err(|error| vmferry::chain(&error))?;
        match seen.confirmed_by(|| lease::ask_on(&self.file)) {
            Sharing::Alone => {}
            Sharing::Mapped(Mapper { pid, name }) => {
                return Err(format!("process {pid} ({name}) has it mapped"));
            }
            Sharing::Unknown(why) => return Err(format!("another process may have it: {why}")),
        }
        let blocks = || self.file.metadata().map(|metadata| metadata.blocks()).map_err(text);
        let before = blocks()?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let bytes = self.range.end - self.range.start;
        rustix::fs::fallocate(&self.file, flags, self.range.start, bytes)
            .map_err(|errno| text(errno.into()))?;
        Ok(before.saturating_sub(blocks()?) * BLOCK_BYTES)
    }
}
