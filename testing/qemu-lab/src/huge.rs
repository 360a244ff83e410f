//! Memory files of huge pages, on a file system of their own, which only root can mount.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The size of the kernel's pool of huge pages.
const POOL: &str = "/proc/sys/vm/nr_hugepages";

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
    /// The huge pages that were added to the pool for it.
    pages: u64,
}

impl Mounted {
    /// Mounts a file system of `mib` MiB.
    ///
    /// # Errors
    /// If mounting is not permitted, or the kernel has too few huge pages.
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
        // An error means that it was not mounted.
        let _ = Command::new("umount").arg(&self.directory).output();
        if self.pages > 0 {
            let _ = change_pool(|pages| pages.saturating_sub(self.pages));
        }
    }
}

/// Changes the size of the pool, which other tests change too. Returns the sizes before and after.
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
