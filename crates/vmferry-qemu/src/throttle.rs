//! Taking time from a QEMU's vCPU threads, by a control group of their own.
//!
//! With cgroup v2 the group is a threaded child of the one that QEMU is in, and `cpu.max` is its limit;
//! where the `cpu` controller is still of v1, it is a child with `cpu.cfs_quota_us`. vmferry needs to be
//! allowed to write there, which is the operator's decision (`Delegate=yes` in a systemd unit, or
//! root). The group goes when the limit does.
//!
//! Source: Linux `Documentation/admin-guide/cgroup-v2.rst` ("Threads") and `cgroup-v1`,
//! `Documentation/scheduler/sched-bwc.rst`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::QemuError;

/// The limit's period, unless the quota would be too small: short, so that a throttled guest is slow and does
/// not stand still.
const PERIOD_US: u64 = 10_000;

/// The kernel takes no smaller quota.
const LEAST_QUOTA_US: u64 = 1_000;

/// Where the groups of a process are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hierarchy {
    V1,
    V2,
}

/// The vCPU threads of a QEMU, which can be limited. Dropped, no limit is left.
#[derive(Debug)]
pub struct Throttle {
    hierarchy: Hierarchy,
    parent: PathBuf,
    group: PathBuf,
    threads: Vec<u32>,
}

impl Throttle {
    /// Finds out whether the threads of process `pid` can be limited, by making the group for them.
    ///
    /// # Errors
    /// If there is no `cpu` controller, or it may not be used.
    pub fn prepare(pid: u32, threads: Vec<u32>) -> Result<Self, QemuError> {
        let (hierarchy, parent) = group_of(pid).map_err(refused)?;
        let group = parent.join(name(pid));
        let throttle = Self { hierarchy, parent, group, threads };
        throttle.make().map_err(refused)?;
        Ok(throttle)
    }

    /// Limits the threads to `100 - percent` hundredths of a CPU each; 0 takes the limit back.
    ///
    /// # Errors
    /// What the control group says.
    pub fn set(&self, percent: u8) -> Result<(), QemuError> {
        self.limit(percent).map_err(refused)
    }

    /// Takes back the limit that another process, which has died, has left.
    ///
    /// # Errors
    /// What the control group says.
    pub fn lift(pid: u32) -> io::Result<()> {
        let Some((hierarchy, at)) = cpu_groups(pid)? else { return Ok(()) };
        // While the limit holds, the first thread is in the parent and the vCPUs are in the child.
        let group = at.join(name(pid));
        if !group.exists() {
            return Ok(());
        }
        let threads = read_numbers(&group.join(threads_file(hierarchy)))?;
        Self { hierarchy, parent: at, group, threads }.remove()
    }

    fn make(&self) -> io::Result<()> {
        if let Err(error) = fs::create_dir(&self.group)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(error);
        }
        if self.hierarchy == Hierarchy::V2 {
            fs::write(self.group.join("cgroup.type"), "threaded")?;
            fs::write(self.parent.join("cgroup.subtree_control"), "+cpu")?;
        }
        Ok(())
    }

    fn limit(&self, percent: u8) -> io::Result<()> {
        if percent == 0 {
            return self.remove();
        }
        self.make()?;
        let (quota, period) = quota_us(percent, self.threads.len());
        match self.hierarchy {
            Hierarchy::V2 => {
                fs::write(self.group.join("cpu.max"), format!("{quota} {period}"))?;
            }
            Hierarchy::V1 => {
                fs::write(self.group.join("cpu.cfs_period_us"), period.to_string())?;
                fs::write(self.group.join("cpu.cfs_quota_us"), quota.to_string())?;
            }
        }
        self.move_threads(&self.group)
    }

    fn remove(&self) -> io::Result<()> {
        if !self.group.exists() {
            return Ok(());
        }
        self.move_threads(&self.parent)?;
        fs::remove_dir(&self.group)
    }

    fn move_threads(&self, to: &Path) -> io::Result<()> {
        let file = to.join(threads_file(self.hierarchy));
        for thread in &self.threads {
            match fs::write(&file, thread.to_string()) {
                // A vCPU that was unplugged meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                other => other?,
            }
        }
        Ok(())
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        // A QEMU that has ended has left the group, and any other is none the worse for an empty one.
        let _ = self.remove();
    }
}

/// The quota for all threads together, and its period.
fn quota_us(percent: u8, threads: usize) -> (u64, u64) {
    let left = (100 - u64::from(percent.min(99))) * threads.max(1) as u64;
    let period = PERIOD_US.max(LEAST_QUOTA_US * 100 / left);
    (period * left / 100, period)
}

fn name(pid: u32) -> String {
    format!("vmferry-{pid}")
}

fn threads_file(hierarchy: Hierarchy) -> &'static str {
    match hierarchy {
        Hierarchy::V1 => "tasks",
        Hierarchy::V2 => "cgroup.threads",
    }
}

fn group_of(pid: u32) -> io::Result<(Hierarchy, PathBuf)> {
    cpu_groups(pid)?.ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "no `cpu` controller of a control group is mounted")
    })
}

/// The group of the process that the `cpu` controller goes by, of v1 if that is where it is.
fn cpu_groups(pid: u32) -> io::Result<Option<(Hierarchy, PathBuf)>> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    Ok(find(&groups, &mounts))
}

/// Reads `/proc/PID/cgroup` and `/proc/self/mountinfo`.
fn find(groups: &str, mounts: &str) -> Option<(Hierarchy, PathBuf)> {
    let mounted = |kind: &str, controller: Option<&str>| {
        mounts.lines().find_map(|line| {
            let (place, rest) = line.split_once(" - ")?;
            let mut rest = rest.split(' ');
            let found = rest.next()? == kind
                && controller.is_none_or(|name| {
                    rest.nth(1).is_some_and(|options| options.split(',').any(|one| one == name))
                });
            found.then(|| PathBuf::from(place.split(' ').nth(4).unwrap_or_default()))
        })
    };
    let within = |mount: PathBuf, path: &str| mount.join(path.trim_start_matches('/'));
    let of = |wanted: &dyn Fn(&str) -> bool| {
        groups.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            wanted(controllers).then(|| path.to_owned())
        })
    };
    if let Some(path) = of(&|controllers| controllers.split(',').any(|one| one == "cpu")) {
        return Some((Hierarchy::V1, within(mounted("cgroup", Some("cpu"))?, &path)));
    }
    let path = of(&str::is_empty)?;
    Some((Hierarchy::V2, within(mounted("cgroup2", None)?, &path)))
}

fn read_numbers(path: &Path) -> io::Result<Vec<u32>> {
    Ok(fs::read_to_string(path)?.lines().filter_map(|line| line.parse().ok()).collect())
}

fn refused(source: io::Error) -> QemuError {
    QemuError::Local {
        action: "limit QEMU's vCPU threads by a control group: run vmferry as root, or delegate \
                 QEMU's group to it, or leave --throttle out",
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_is_found_in_either_hierarchy() {
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
                      32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        let v1 = find("3:cpuset:/\n1:cpu,cpuacct:/vms/web\n0::/\n", mounts);
        assert_eq!(v1, Some((Hierarchy::V1, "/sys/fs/cgroup/cpu/vms/web".into())));
        let v2 = find("0::/machine.slice/web.scope\n", mounts);
        assert_eq!(
            v2,
            Some((Hierarchy::V2, "/sys/fs/cgroup/unified/machine.slice/web.scope".into()))
        );
        assert_eq!(find("0::/\n", ""), None);
    }

    #[test]
    fn a_quota_is_what_is_left_of_every_thread() {
        assert_eq!(quota_us(20, 1), (8_000, 10_000));
        assert_eq!(quota_us(80, 4), (8_000, 10_000));
        assert_eq!(quota_us(99, 1), (LEAST_QUOTA_US, 100_000));
    }
}
