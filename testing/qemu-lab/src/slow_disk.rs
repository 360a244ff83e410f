//! Slow storage: a control group in which the kernel limits reads of a file's device, after it has
//! pinned the pages that the data goes to.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The hierarchy that limits block I/O with cgroup v1.
const HIERARCHY: &str = "/sys/fs/cgroup/blkio";

/// The limit on one process. Removed on drop.
#[derive(Debug)]
pub struct SlowDisk {
    group: PathBuf,
    pid: u32,
}

impl SlowDisk {
    /// Limits the reads of `pid` from the device that `file` is on.
    ///
    /// # Errors
    /// If there is no such control group, or it can't be used.
    pub fn limit(pid: u32, file: &Path, bytes_per_s: u64) -> io::Result<Self> {
        let group = Path::new(HIERARCHY).join(format!("vmferry-test-{pid}"));
        fs::create_dir(&group)?;
        let slow = Self { group, pid };
        let device = fs::metadata(file)?.dev();
        // `makedev` of the C library: twelve bits of the major number above eight of the minor.
        let (major, minor) = ((device >> 8) & 0xfff, device & 0xff);
        let limit = format!("{major}:{minor} {bytes_per_s}");
        fs::write(slow.group.join("blkio.throttle.read_bps_device"), limit)?;
        fs::write(slow.group.join("cgroup.procs"), pid.to_string())?;
        Ok(slow)
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        // A process that has ended has left the group.
        let _ = fs::write(Path::new(HIERARCHY).join("cgroup.procs"), self.pid.to_string());
        let _ = fs::remove_dir(&self.group);
    }
}
