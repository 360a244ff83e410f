//! Memory files made of huge pages: a file system of one's own, which only root can mount.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How many huge pages the kernel keeps.
const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// A kind of huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// Transparent ones, of a tmpfs.
    Transparent,
    /// Those of hugetlbfs, of 2 MiB.
    Hugetlb,
}

/// A mounted file system; gone when dropped, after the QEMUs that use it.
#[derive(Debug)]
pub struct Mounted {
    directory: PathBuf,
    /// What the pool of huge pages was before.
    pool: Option<String>,
}

impl Mounted {
    /// Mounts it with room for `mib`.
    ///
    /// # Errors
    /// Where that is not permitted, or there are no huge pages to be had.
    pub fn new(directory: &Path, kind: HugePages, mib: u64) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        let mut mounted = Self { directory: directory.to_owned(), pool: None };
        let (file_system, options) = match kind {
            HugePages::Transparent => ("tmpfs", format!("huge=always,size={mib}M")),
            HugePages::Hugetlb => {
                let before = std::fs::read_to_string(POOL)?;
                let pages: u64 = before.trim().parse().unwrap_or_default();
                let wanted = pages + mib / 2;
                std::fs::write(POOL, wanted.to_string())?;
                mounted.pool = Some(before.clone());
                let now: u64 = std::fs::read_to_string(POOL)?.trim().parse().unwrap_or_default();
                if now < wanted {
                    return Err(io::Error::other(format!("the kernel has {now} huge pages only")));
                }
                ("hugetlbfs", "pagesize=2M".to_owned())
            }
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
        // Not mounted, there is nothing to take away.
        let _ = Command::new("umount").arg(&self.directory).output();
        if let Some(pool) = &self.pool {
            let _ = std::fs::write(POOL, pool.trim());
        }
    }
}
