//! Decides whether a file of guest memory may be emptied, and empties it.
//!
//! A destination empties its QEMU's memory files before a guest is placed in them, and again when
//! an attempt has failed. A source releases the pages of the files once its guest runs elsewhere.
//! Both destroy any other data in such a file. So a file is emptied only if all of these rules
//! hold, and is left alone otherwise:
//!
//! 1. *It is plain RAM* ([`Backends::use_of`]): the machine's memory, a NUMA node's, or a DIMM's.
//!    What an `nvdimm`, a `virtio-pmem` or any other device keeps in a file is data, and may be
//!    shared with others.
//! 2. *It is memory of this host* ([`kind_of`]): a tmpfs, hugetlbfs or a memfd. Other hosts may
//!    share a file on any other file system, which can't be detected here.
//! 3. *QEMU has it mapped shared and writable.* A file that QEMU may only read is never opened for
//!    writing.
//! 4. *It is used by this QEMU only* ([`examine`]): no other process is seen to have it mapped, and
//!    the kernel grants a write lease on QEMU's own descriptor, which it does only if no other
//!    process anywhere has the file open or mapped, whatever its user, PID namespace or overlay. A
//!    lease that is refused overrules what is seen: processes are examined one after the other, and
//!    a file may be passed on meanwhile. If no lease can be asked for, every process of this
//!    machine must have been examined, except for a memfd that this QEMU has created: it has no
//!    name, and only QEMU can pass it on.
//! 5. *A source's QEMU has ended.*
//!
//! Rule 4 is checked when a QEMU is attached, so that a mistake is reported at once, and again just
//! before each emptying.

pub(crate) mod backends;
mod lease;
mod mappers;
mod release;
pub(crate) mod sharing;
#[cfg(test)]
mod tests;

use std::fs::File;

use vmferry_memory::GuestMemory;

pub use self::backends::{Backends, Use};
pub use self::release::{KeptFile, Leaving, Release};
pub use self::sharing::{Examiner, Mapper, Sharing};
use crate::error::QemuError;
use crate::located::Located;
use crate::process::{self, Mapping};

/// Finds out which processes use the file behind a mapping of QEMU. `ours` are vmferry's own
/// processes, which may have it mapped.
///
/// # Errors
/// If the processes of this host can't be listed.
pub fn examine(pid: u32, mapping: &Mapping, ours: &[u32]) -> Result<Sharing, QemuError> {
    let seen = mappers::find(mapping.file, |other| other == pid || ours.contains(&other))?;
    Ok(seen.confirmed_by(|| lease::ask(pid, mapping)))
}

/// A file system whose files are memory of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A tmpfs, or a memfd.
    Tmpfs,
    /// hugetlbfs, or a memfd of huge pages.
    Hugetlbfs,
}

/// `include/uapi/linux/magic.h`.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// The kind of a file; `None` if it is on any other file system.
pub fn kind_of(file: &File) -> std::io::Result<Option<FileKind>> {
    Ok(match rustix::fs::fstatfs(file)?.f_type as u64 {
        TMPFS_MAGIC => Some(FileKind::Tmpfs),
        HUGETLBFS_MAGIC => Some(FileKind::Hugetlbfs),
        _ => None,
    })
}

/// A block's file.
#[derive(Clone)]
struct BlockFile {
    /// QEMU's name for the block.
    block: String,
    mapping: Mapping,
    /// QEMU itself has created the file, and it has no name: another process can only get it from
    /// this QEMU.
    is_made_by_qemu: bool,
}

/// The files of a destination's memory, and whether they may be emptied.
#[derive(Clone)]
pub struct MemoryFiles {
    pid: u32,
    files: Vec<BlockFile>,
    examiner: Examiner,
}

impl MemoryFiles {
    /// The files of QEMU's memory backends that are shared, except those that devices share with
    /// others on purpose.
    pub fn of(located: &Located, examiner: Examiner) -> Self {
        let shared = located.blocks.iter().filter_map(|(block, mapping)| {
            let (used, kind) =
                (located.backends.use_of(&block.name), located.backends.kind(&block.name)?);
            let mapping = mapping.as_ref().filter(|it| it.writable && used != Use::Shared)?;
            Some(BlockFile {
                block: block.name.clone(),
                mapping: mapping.clone(),
                is_made_by_qemu: kind == "memory-backend-memfd",
            })
        });
        Self { pid: located.pid, files: shared.collect(), examiner }
    }

    /// Replaces the examiner, because this process's rights change.
    pub fn examine_by(&mut self, examiner: Examiner) {
        self.examiner = examiner;
    }

    /// Checks that no other visible process has the files mapped. If one has, the files must not be
    /// written at all.
    ///
    /// # Errors
    /// `QemuError::FileInUse` with the process and the file.
    pub fn nobody_else_is_seen(&self) -> Result<(), QemuError> {
        self.check(|_| true)
    }

    /// Checks that the files are used by this QEMU only.
    ///
    /// # Errors
    /// `QemuError::FileInUse`, or `QemuError::Unproved` with the reason why it can't be known.
    pub fn are_ours_alone(&self) -> Result<(), QemuError> {
        self.check(|file| file.is_made_by_qemu)
    }

    /// Examines all files. For those that satisfy `is_enough`, it is enough that no other user is
    /// visible.
    fn check(&self, is_enough: impl Fn(&BlockFile) -> bool) -> Result<(), QemuError> {
        for file in &self.files {
            let (block, path) = (file.block.clone(), file.mapping.path.clone());
            match (self.examiner)(self.pid, &file.mapping)? {
                Sharing::Alone => {}
                Sharing::Unknown(_) if is_enough(file) => {}
                Sharing::Unknown(why) => return Err(QemuError::Unproved { block, path, why }),
                Sharing::Mapped(Mapper { pid, name }) => {
                    return Err(QemuError::FileInUse { block, path, pid, name });
                }
            }
        }
        Ok(())
    }

    /// Empties the guest's memory, if it is used by this QEMU only at this moment.
    ///
    /// # Errors
    /// As [`are_ours_alone`](Self::are_ours_alone), and file system errors.
    pub fn empty(&self, memory: &GuestMemory) -> Result<(), QemuError> {
        self.are_ours_alone()?;
        memory.empty().map_err(|error| QemuError::Local {
            action: "empty the memory files",
            source: std::io::Error::other(error),
        })
    }
}

/// Checks that the nature of a destination's block allows emptying it: rules 1 to 3.
///
/// # Errors
/// Why it does not, and what to change.
pub fn may_be_emptied(
    block: &str,
    used: &Use,
    mapping: &Mapping,
    file: &File,
) -> Result<(), QemuError> {
    let refused = |why: String| Err(QemuError::Memory { block: block.to_owned(), why });
    if let Some(why) = used.why_not() {
        return refused(why);
    }
    if !mapping.writable {
        return refused(READ_ONLY.to_owned());
    }
    match kind_of(file) {
        Ok(Some(_)) => Ok(()),
        Ok(None) => refused(format!(
            "is {}, on a file system that other hosts may share, and a destination empties its \
             memory files: put it on a tmpfs or hugetlbfs (`mem-path=/dev/shm/NAME`)",
            mapping.path
        )),
        Err(source) => Err(QemuError::Local { action: "look at the memory file", source }),
    }
}

/// Why vmferry does not move a block whose file is read-only.
pub const READ_ONLY: &str = "is a file that QEMU may only read, which vmferry does not write";

/// Opens the file of a mapping that QEMU can write. Uses QEMU's own descriptor if it can be
/// fetched, so that there is no second open file description, which would keep the kernel from
/// granting a lease. Otherwise opens the same file again.
///
/// # Errors
/// If the mapping is not shared and writable, or no descriptor can be obtained.
pub fn open(pid: u32, mapping: &Mapping) -> Result<File, QemuError> {
    if !mapping.shared || !mapping.writable {
        let source = std::io::ErrorKind::PermissionDenied.into();
        let action = "write the memory file, which may only be read,";
        return Err(QemuError::Process { action, pid, source });
    }
    match process::own_descriptor(pid, mapping) {
        Ok(file) => Ok(file),
        Err(_) => process::open_file(pid, mapping),
    }
}
