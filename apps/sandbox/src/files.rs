//! The files, ports and processes that a restricted process can access: Landlock.

use std::io;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus,
    PathBeneath, RestrictionStatus, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr,
    Scope,
};
use rustix::fs::{Mode, OFlags};

use crate::error::SandboxError;
use crate::{Sandbox, Work};

/// The newest Landlock version that is used. ABI 9 would also restrict Unix sockets, which are
/// needed.
const NEWEST: ABI = ABI::V7;

/// Files that a restricted process may access. A directory includes everything below it. Paths that
/// do not exist are skipped.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// Files and directories to read. For a file that may be replaced, name its directory: a rule
    /// applies to the existing file.
    pub read: Vec<PathBuf>,
    /// Devices to open for reading and writing, and to control.
    pub devices: Vec<PathBuf>,
    /// Directories in which files, directories and sockets may be created, read, written and
    /// removed.
    pub write: Vec<PathBuf>,
    /// Directories from which files may only be removed.
    pub remove_files: Vec<PathBuf>,
    /// Directories from which empty directories may only be removed.
    pub remove_directories: Vec<PathBuf>,
}

/// The features that this kernel's Landlock lacks, for people. Empty if it has all that are used.
pub fn missing() -> Vec<String> {
    let ask = || Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let files = |abi| ask().handle_access(AccessFs::from_all(abi)).is_ok();
    if !files(ABI::V1) {
        return vec!["Landlock (files, ports and signals are not restricted)".to_owned()];
    }
    let scopes = Scope::AbstractUnixSocket | Scope::Signal;
    [
        (files(ABI::V3), "Landlock 3 (truncating files)"),
        (ask().handle_access(AccessNet::BindTcp).is_ok(), "Landlock 4 (listening at TCP ports)"),
        (files(ABI::V5), "Landlock 5 (device calls)"),
        (ask().scope(scopes).is_ok(), "Landlock 6 (signals and abstract sockets)"),
    ]
    .into_iter()
    .filter(|(available, _)| !available)
    .map(|(_, what)| what.to_owned())
    .collect()
}

/// Restricts this thread. Returns the Landlock version in force.
///
/// # Errors
/// A path cannot be opened, or the kernel refused.
pub fn restrict(sandbox: &Sandbox) -> Result<u32, SandboxError> {
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        // No port may be bound: the process already listens.
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::AbstractUnixSocket | Scope::Signal)?;
    if sandbox.work == Work::MemoryOnly {
        ruleset = ruleset.handle_access(AccessNet::ConnectTcp)?;
    }
    let mut ruleset = ruleset.create()?;
    let files = &sandbox.files;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let device = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
    let write = read
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeDir
        | AccessFs::MakeSock
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir;
    let rights = [
        (&files.read, read),
        (&files.devices, device),
        (&files.write, write),
        (&files.remove_files, AccessFs::RemoveFile.into()),
        (&files.remove_directories, AccessFs::RemoveDir.into()),
    ];
    for (paths, access) in rights {
        for path in paths {
            ruleset = allow(ruleset, path, access)?;
        }
    }
    let RestrictionStatus { landlock, .. } = ruleset.restrict_self()?;
    Ok(match landlock {
        LandlockStatus::Available { effective_abi, .. } => {
            (effective_abi as u32).min(NEWEST as u32)
        }
        _ => 0,
    })
}

fn allow(
    ruleset: RulesetCreated,
    path: &Path,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, SandboxError> {
    let failed = |source| SandboxError::Path { path: path.to_owned(), source };
    let opened = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let opened: OwnedFd = match opened.map_err(io::Error::from) {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(ruleset),
        Err(error) => return Err(failed(error)),
    };
    let stat = rustix::fs::fstat(&opened).map_err(|errno| failed(errno.into()))?;
    let is_directory = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir();
    // Rights that only directories have are invalid in a rule for a file.
    let access = if is_directory { access } else { access & AccessFs::from_file(NEWEST) };
    let ruleset = ruleset.add_rule(PathBeneath::new(opened.as_fd(), access))?;
    // A rule applies to an inode. When the kernel is short of memory, `/proc` replaces the inode of
    // a process. The open descriptor keeps the inode of the rule alive.
    let _ = opened.into_raw_fd();
    Ok(ruleset)
}
