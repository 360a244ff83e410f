//! Memory files made of huge pages: a file system of one's own, which only root can mount.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How many huge pages the kernel keeps.
const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// A kind of huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// None: a tmpfs of small ones.
    None,
    /// Transparent ones, of a tmpfs.
    Transparent,
    /// Those of hugetlbfs, of 2 MiB.
    Hugetlb,
}

/// A mounted file system; gone when dropped, after the QEMUs that use it.
#[derive(Debug)]
pub struct Mounted {
    directory: PathBuf,
    /// Huge pages that the pool has for this.
    pages: u64,
}

impl Mounted {
    /// Mounts it with room for `mib`.
    ///
    /// # Errors
    /// Where that is not permitted, or there are no huge pages to be had.
    pub fn new(directory: &Path, kind: HugePages, mib: u64) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        let mut mounted = Self { directory: directory.to_owned(), pages: 0 };
        let (file_system, options) = match kind {
            HugePages::None => ("tmpfs", format!("size={mib}M")),
            HugePages::Transparent => ("tmpfs", format!("huge=always,size={mib}M")),
            HugePages::Hugetlb => {
                let wanted = mib / 2;
                let (before, now) = change_pool(|pages| pages + wanted)?;
                mounted.pages = now - before;
                if mounted.pages < wanted {
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
        if self.pages > 0 {
            let _ = change_pool(|pages| pages.saturating_sub(self.pages));
        }
    }
}

/// Changes the size of the pool, which other tests change too; says what it was and is.
fn change_pool(change: impl FnOnce(u64) -> u64) -> io::Result<(u64, u64)> {
    let lock = File::create(std::env::temp_dir().join("vmferry-huge-pages.lock"))?;
    lock.lock()?;
    let read = || -> io::Result<u64> {
        let text = std::fs::read_to_string(POOL)?;
        text.trim().parse().map_err(io::Error::other)
    };
    let before = read()?;
    std::fs::write(POOL, change(before).to_string())?;
    Ok((before, read()?))
}
