//! Whether the file that a guest's memory is made of may be emptied, and emptying it.
//!
//! A destination empties its QEMU's memory files before a guest is placed in them, and again when
//! an attempt has failed; a source gives the pages of the files back once its guest runs elsewhere.
//! Each of them destroys whatever else is in such a file. So a file is emptied only if all of this
//! holds, and is left alone otherwise:
//!
//! 1. *It is plain RAM* ([`Backends::use_of`]): the machine's memory, a NUMA node's, or a DIMM's.
//!    What an `nvdimm`, a `virtio-pmem` or any other device keeps in a file is data, and may be
//!    somebody else's too.
//! 2. *It is memory of this host* ([`kind_of`]): a tmpfs, hugetlbfs or a memfd. Other hosts may
//!    share a file on any other file system, and nothing here can see them.
//! 3. *QEMU has it mapped shared and writable.* A file that QEMU may only read is never opened for
//!    writing.
//! 4. *It is this QEMU's alone* ([`examine`]): no other process has it mapped, and either the
//!    kernel grants a write lease on QEMU's own descriptor, which it does only if nobody else
//!    anywhere has the file open or mapped, whatever user, PID namespace or overlay they come from;
//!    or every process of this machine could be looked at. What can't be looked at is no proof, but
//!    for a memfd that this QEMU has made: it has no name, and only QEMU can give it to others.
//! 5. *A source's QEMU has ended.*
//!
//! Rule 4 is checked when a QEMU is attached, so that a mistake is told at once, and again just
//! before each emptying.

mod backends;
mod lease;
mod mappers;
mod release;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vmferry_memory::GuestMemory;

pub use self::backends::{Backends, Use};
pub use self::release::{KeptFile, Leaving, Release};
use crate::error::QemuError;
use crate::process::{self, Mapping};
use crate::ram::Located;

/// Whose a file of QEMU's memory is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// This QEMU's alone.
    Alone,
    /// Another process has it mapped.
    Mapped(Mapper),
    /// Nobody was seen, and not everybody could be: why.
    Unknown(String),
}

/// A process that has a file mapped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapper {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub name: String,
}

/// Looks whose a mapping of QEMU's is, from any thread and at any time: `examine`, with the rights
/// that it takes.
pub type Examiner = Arc<dyn Fn(u32, &Mapping) -> Result<Sharing, QemuError> + Send + Sync>;

/// Looks whose the file behind a mapping of QEMU is. `ours` are vmferry's own processes, which may
/// have it mapped.
///
/// # Errors
/// If the processes of this host can't be listed.
pub fn examine(pid: u32, mapping: &Mapping, ours: &[u32]) -> Result<Sharing, QemuError> {
    let seen = mappers::find(mapping.file, |other| other == pid || ours.contains(&other))?;
    Ok(match seen {
        mappers::Seen { mapper: Some(mapper), .. } => Sharing::Mapped(mapper),
        mappers::Seen { unseen: None, .. } => Sharing::Alone,
        _ if lease::is_granted(pid, mapping) => Sharing::Alone,
        mappers::Seen { unseen: Some(why), .. } => Sharing::Unknown(why),
    })
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

/// What a file is made of; `None` for what is on any other file system.
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
    /// QEMU's name of the block.
    block: String,
    mapping: Mapping,
    /// QEMU has made the file itself, and it has no name: another process can only have it from
    /// this QEMU.
    is_made_by_qemu: bool,
}

/// The files of a destination's memory: whether they may be emptied.
#[derive(Clone)]
pub struct MemoryFiles {
    pid: u32,
    files: Vec<BlockFile>,
    examiner: Examiner,
}

impl MemoryFiles {
    /// Those of QEMU's memory backends that are shared files, but for those that devices share with
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

    /// Looks with other rights from now on.
    pub fn examine_by(&mut self, examiner: Examiner) {
        self.examiner = examiner;
    }

    /// Makes sure that no other process is seen to have them mapped: nothing may be written there
    /// then, by whomever.
    ///
    /// # Errors
    /// The process and the file.
    pub fn nobody_else_is_seen(&self) -> Result<(), QemuError> {
        self.check(|_| true)
    }

    /// Makes sure that they are this QEMU's alone.
    ///
    /// # Errors
    /// Who else has one, or why that can't be known.
    pub fn are_ours_alone(&self) -> Result<(), QemuError> {
        self.check(|file| file.is_made_by_qemu)
    }

    /// Looks whose all files are. Of some it `is_enough` that nobody else is seen to have them.
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

    /// Empties the guest's memory, if it is this QEMU's alone now.
    ///
    /// # Errors
    /// As [`are_ours_alone`](Self::are_ours_alone), and what the files say.
    pub fn empty(&self, memory: &GuestMemory) -> Result<(), QemuError> {
        self.are_ours_alone()?;
        memory.empty().map_err(|error| QemuError::Local {
            action: "empty the memory files",
            source: std::io::Error::other(error),
        })
    }
}

/// Makes sure that a destination's block may be emptied by what it is: rules 1 to 3.
///
/// # Errors
/// Why not, and what to change.
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

/// Why a block is not moved by vmferry whose file may not be written.
pub const READ_ONLY: &str = "is a file that QEMU may only read, which vmferry does not write";

/// Opens the file of a mapping that QEMU can write: QEMU's own descriptor of it if that can be had,
/// so that there is no second one beside it (which would keep the kernel from granting a lease),
/// and else one of the same file.
///
/// # Errors
/// If the mapping is not shared and writable, or no descriptor may be had.
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
