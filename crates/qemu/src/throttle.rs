//! Throttles a QEMU's vCPU threads by a control group of their own.
//!
//! With cgroup v2 the group is a threaded child of the thread's group, and `cpu.max` is its limit.
//! If the `cpu` controller is still on v1, it is a child with `cpu.cfs_quota_us`. So existing
//! limits of the thread stay in force, and it returns to its former group: libvirt keeps each vCPU
//! in a group of its own. vmferry needs write access there, which the operator has to grant
//! (`Delegate=yes` in a systemd unit, or root). The group is removed together with the limit.
//!
//! Source: Linux `Documentation/admin-guide/cgroup-v2.rst` ("Threads") and `cgroup-v1`,
//! `Documentation/scheduler/sched-bwc.rst`.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::QemuError;

/// How long a thread that is exiting may take to leave its control group.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// How often this is checked.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// The limit's period, unless the quota would be too small. It is short, so that a throttled guest
/// is slow and does not stall.
const PERIOD_US: u64 = 10_000;

/// The smallest quota that the kernel accepts.
const LEAST_QUOTA_US: u64 = 1_000;

/// The cgroup version of a process's groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hierarchy {
    V1,
    V2,
}

/// The vCPU threads of a QEMU, which can be limited. On drop the limit is removed.
#[derive(Debug)]
pub struct Throttle {
    hierarchy: Hierarchy,
    groups: Vec<Group>,
}

/// Threads that are in one control group, and are limited in a child of that group.
#[derive(Debug)]
struct Group {
    /// Their group without a limit. libvirt has a group of its own for each vCPU.
    parent: PathBuf,
    child: PathBuf,
    threads: Vec<u32>,
}

impl Throttle {
    /// Finds out whether these threads of process `pid` can be limited, by creating their groups.
    ///
    /// # Errors
    /// If there is no `cpu` controller, or it can't be used.
    pub fn prepare(pid: u32, threads: Vec<u32>) -> Result<Self, QemuError> {
        let (hierarchy, parents) = parents(pid, &threads).map_err(refused)?;
        let groups = parents.into_iter().map(|(parent, threads)| {
            let child = parent.join(name(pid));
            Group { parent, child, threads }
        });
        let throttle = Self { hierarchy, groups: groups.collect() };
        throttle.groups.iter().try_for_each(|group| group.make(hierarchy)).map_err(refused)?;
        Ok(throttle)
    }

    /// Limits the threads to `100 - percent` hundredths of a CPU each; 0 removes the limit.
    ///
    /// # Errors
    /// Errors of the control group.
    pub fn set(&self, percent: u8) -> Result<(), QemuError> {
        let limit = |group: &Group| group.limit(self.hierarchy, percent);
        self.groups.iter().try_for_each(limit).map_err(refused)
    }

    /// Removes the limit that another process, which has died, has left: each thread returns to the
    /// parent group.
    ///
    /// # Errors
    /// Errors of the control group.
    pub fn lift(pid: u32) -> io::Result<()> {
        let threads = crate::process::threads(pid).map_err(io::Error::other)?;
        let (hierarchy, parents) = match parents(pid, &threads) {
            // Without such a controller nothing was limited.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        let mut lifted = Ok(());
        for (parent, _) in parents {
            let child = parent.join(name(pid));
            if child.exists() {
                let threads = read_numbers(&child.join(threads_file(hierarchy)))?;
                lifted = lifted.and(Group { parent, child, threads }.remove(hierarchy));
            }
        }
        lifted
    }
}

impl Group {
    fn make(&self, hierarchy: Hierarchy) -> io::Result<()> {
        if let Err(error) = fs::create_dir(&self.child)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(error);
        }
        if hierarchy == Hierarchy::V2 {
            fs::write(self.child.join("cgroup.type"), "threaded")?;
            fs::write(self.parent.join("cgroup.subtree_control"), "+cpu")?;
        }
        Ok(())
    }

    fn limit(&self, hierarchy: Hierarchy, percent: u8) -> io::Result<()> {
        if percent == 0 {
            return self.remove(hierarchy);
        }
        self.make(hierarchy)?;
        let (quota, period) = quota_us(percent, self.threads.len());
        match hierarchy {
            Hierarchy::V2 => {
                fs::write(self.child.join("cpu.max"), format!("{quota} {period}"))?;
            }
            Hierarchy::V1 => {
                fs::write(self.child.join("cpu.cfs_period_us"), period.to_string())?;
                fs::write(self.child.join("cpu.cfs_quota_us"), quota.to_string())?;
            }
        }
        move_threads(hierarchy, &self.threads, &self.child)
    }

    fn remove(&self, hierarchy: Hierarchy) -> io::Result<()> {
        if !self.child.exists() {
            return Ok(());
        }
        let deadline = Instant::now() + LEAVE_TIMEOUT;
        loop {
            // Includes threads that a limited thread has started.
            let inside = read_numbers(&self.child.join(threads_file(hierarchy)))?;
            move_threads(hierarchy, &inside, &self.parent)?;
            match fs::remove_dir(&self.child) {
                // A thread that is exiting leaves by itself, without a notification.
                Err(error)
                    if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline =>
                {
                    std::thread::sleep(LOOK_PERIOD);
                }
                removed => return removed,
            }
        }
    }
}

/// Moves threads into a group.
fn move_threads(hierarchy: Hierarchy, threads: &[u32], to: &Path) -> io::Result<()> {
    let file = to.join(threads_file(hierarchy));
    for thread in threads {
        match fs::write(&file, thread.to_string()) {
            // The vCPU was unplugged meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            other => other?,
        }
    }
    Ok(())
}

impl Drop for Throttle {
    fn drop(&mut self) {
        // A QEMU that has ended has left the group, and an empty group does no harm to any other.
        for group in &self.groups {
            let _ = group.remove(self.hierarchy);
        }
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

/// The groups that limit these threads of a process by the `cpu` controller (v1 if the controller
/// is there), and the threads in each. A thread that is already limited counts for its former
/// group.
fn parents(pid: u32, threads: &[u32]) -> io::Result<(Hierarchy, BTreeMap<PathBuf, Vec<u32>>)> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let mut found = BTreeMap::<PathBuf, Vec<u32>>::new();
    let mut hierarchy = None;
    for thread in threads {
        let groups = match fs::read_to_string(format!("/proc/{pid}/task/{thread}/cgroup")) {
            // The thread has ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            groups => groups?,
        };
        let Some((kind, group)) = find(&groups, &mounts) else { break };
        let parent = match group.parent() {
            Some(parent) if group.ends_with(name(pid)) => parent.to_owned(),
            _ => group,
        };
        hierarchy = Some(kind);
        found.entry(parent).or_default().push(*thread);
    }
    let none = || {
        let text = "no `cpu` controller of a control group is mounted";
        io::Error::new(io::ErrorKind::NotFound, text)
    };
    Ok((hierarchy.ok_or_else(none)?, found))
}

/// Parses `/proc/PID/cgroup` and `/proc/self/mountinfo`.
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
                 QEMU's group to it, or do not throttle the guest",
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttle_finds_the_group_in_either_hierarchy() {
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

    /// A waiting thread of this process in a control group of its own, as libvirt has for a vCPU.
    struct Placed {
        thread: u32,
        home: PathBuf,
        _going_on: std::sync::mpsc::Sender<()>,
    }

    fn place(hierarchy: Hierarchy, home: PathBuf) -> Placed {
        fs::create_dir_all(&home).unwrap();
        if hierarchy == Hierarchy::V2 {
            fs::write(home.join("cgroup.type"), "threaded").unwrap();
        }
        let (going_on, is_over) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            let _ = is_over.recv();
        });
        let thread: u32 = told.recv().unwrap();
        fs::write(home.join(threads_file(hierarchy)), thread.to_string()).unwrap();
        Placed { thread, home, _going_on: going_on }
    }

    /// Uses this host's own hierarchy, which needs root.
    #[test]
    fn throttle_limits_threads_below_their_groups_and_returns_them() {
        let pid = std::process::id();
        let own = crate::process::threads(pid).unwrap();
        let (hierarchy, parents) = parents(pid, &own[..1]).unwrap();
        let at = parents.keys().next().unwrap().join(format!("vmferry-test-{pid}"));
        let placed = [0, 1].map(|vcpu| place(hierarchy, at.join(format!("vcpu{vcpu}"))));
        let is_in = |group: &Path, thread: u32| {
            read_numbers(&group.join(threads_file(hierarchy))).unwrap().contains(&thread)
        };
        let all_home = || {
            placed
                .iter()
                .all(|one| is_in(&one.home, one.thread) && !one.home.join(name(pid)).exists())
        };
        let threads = || placed.iter().map(|one| one.thread).collect::<Vec<_>>();
        let throttle = Throttle::prepare(pid, threads()).unwrap();
        for _ in 0..2 {
            throttle.set(50).unwrap();
            for one in &placed {
                assert!(is_in(&one.home.join(name(pid)), one.thread), "below its own group");
            }
            throttle.set(0).unwrap();
            assert!(all_home());
        }
        // The process that limited them was killed: the next one prepares again, or removes the
        // limit.
        throttle.set(80).unwrap();
        std::mem::forget(throttle);
        let next = Throttle::prepare(pid, threads()).unwrap();
        next.set(50).unwrap();
        std::mem::forget(next);
        Throttle::lift(pid).unwrap();
        assert!(all_home());
        let homes = placed.each_ref().map(|one| one.home.clone());
        for one in placed {
            fs::write(at.parent().unwrap().join(threads_file(hierarchy)), one.thread.to_string())
                .unwrap();
        }
        homes.iter().chain([&at]).for_each(|group| fs::remove_dir(group).unwrap());
    }

    #[test]
    fn throttle_quota_is_the_remaining_share_of_every_thread() {
        assert_eq!(quota_us(20, 1), (8_000, 10_000));
        assert_eq!(quota_us(80, 4), (8_000, 10_000));
        assert_eq!(quota_us(99, 1), (LEAST_QUOTA_US, 100_000));
    }
}
