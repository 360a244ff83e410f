//! Memory files of huge pages, on a file system of their own, which only root can mount.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A kind of huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// None: a tmpfs with small pages.
    None,
    /// Transparent huge pages on a tmpfs.
    Transparent,
    /// hugetlbfs with pages of 2 MiB.
    Hugetlb,
}

/// A mounted file system. It must outlive the QEMUs that use it; unmounted on drop.
#[derive(Debug)]
pub struct Mounted {
    directory: PathBuf,
    /// The huge pages that were added to the pool for it, which no other test may use meanwhile.
    _pool: Option<vmferry_kit::HugePages>,
}

impl Mounted {
    /// Mounts a file system of `mib` MiB. Only one test of the host at a time has huge pages.
    ///
    /// # Errors
    /// If mounting is not permitted.
    ///
    /// # Panics
    /// If the kernel has too few huge pages.
    pub fn new(directory: &Path, kind: HugePages, mib: u64) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        let pool = (kind == HugePages::Hugetlb).then(|| vmferry_kit::HugePages::reserve(mib / 2));
        let mounted = Self { directory: directory.to_owned(), _pool: pool };
        let (file_system, options) = match kind {
            HugePages::None => ("tmpfs", format!("size={mib}M")),
            HugePages::Transparent => ("tmpfs", format!("huge=always,size={mib}M")),
            HugePages::Hugetlb => ("hugetlbfs", "pagesize=2M".to_owned()),
        };
        let done = Command::new("mount")
            .args(["-t", file_system, "-o", &options, "none"])
            .arg(directory)
            .output()?;
        if done.status.success() {
            return Ok(mounted);
        }
        Err(io::Error::other(String::from_utf8_lossy(&done.stderr).into_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // An error means that it was not mounted.
        let _ = Command::new("umount").arg(&self.directory).output();
    }
}
