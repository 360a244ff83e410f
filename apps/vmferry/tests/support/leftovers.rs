//! What a migration must not leave over: processes, descriptors, sockets, locks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Host, run_ok};

/// Bounds how long ending processes and the threads of live ones may take to release their
/// resources: reaching it is a failure.
const PATIENCE: Duration = Duration::from_secs(20);

/// The open descriptors of a process, by kind: `socket`, `anon_inode:[userfaultfd]`,
/// `anon_inode:kvm-vcpu:0`, `/memfd:NAME`, or a path.
pub type Descriptors = BTreeMap<String, usize>;

/// A process that must be alive when all processes have settled.
pub struct Living<'a> {
    /// The host and guest that it runs.
    pub host: &'a Host,
    pub pid: u32,
    /// The descriptors that it must have open.
    pub descriptors: Descriptors,
}

/// The open descriptors of a process.
pub fn descriptors(pid: u32) -> Descriptors {
    let mut found = Descriptors::new();
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return found };
    for entry in entries.flatten() {
        // A descriptor that is closed meanwhile is not open.
        if let Ok(to) = std::fs::read_link(entry.path()) {
            *found.entry(kind(&to.to_string_lossy())).or_default() += 1;
        }
    }
    found
}

/// The open descriptors of an idle process. A connection that it is just closing does not count.
pub fn descriptors_at_rest(pid: u32) -> Descriptors {
    const LOOKS: u32 = 20;
    const BETWEEN: Duration = Duration::from_millis(10);
    let mut least = descriptors(pid);
    for _ in 1..LOOKS {
        std::thread::sleep(BETWEEN);
        let now = descriptors(pid);
        least.retain(|kind, _| now.contains_key(kind));
        least.iter_mut().for_each(|(kind, count)| *count = now[kind].min(*count));
    }
    least
}

fn kind(target: &str) -> String {
    for numbered in ["socket", "pipe"] {
        if target.starts_with(&format!("{numbered}:[")) {
            return numbered.to_owned();
        }
    }
    let target = target.trim_end_matches(" (deleted)");
    // Each process has its own number, and each test its own directory.
    if target
        .strip_prefix("/proc/")
        .is_some_and(|pid| pid.bytes().all(|byte| byte.is_ascii_digit()))
    {
        return "/proc/PID".to_owned();
    }
    match Path::new(target).strip_prefix(std::env::temp_dir()) {
        Ok(within) => within.components().skip(1).collect::<PathBuf>().display().to_string(),
        Err(_) => target.to_owned(),
    }
}

/// The processes whose hosts are in this directory, with their command lines. Only this test knows
/// the directory's name.
pub fn processes(world: &Path) -> BTreeMap<u32, String> {
    let wanted = format!("VMFERRY_RUNTIME_DIR={}/", world.display());
    processes_where(|variable| variable.starts_with(wanted.as_bytes()))
}

/// The processes that were started for a host.
pub fn processes_of(host: &Host) -> BTreeMap<u32, String> {
    let wanted = format!("VMFERRY_RUNTIME_DIR={}", host.runtime.display());
    processes_where(|variable| variable == wanted.as_bytes())
}

/// The processes with such a variable in their environment.
fn processes_where(is: impl Fn(&[u8]) -> bool) -> BTreeMap<u32, String> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let read = |name: &str| std::fs::read(entry.path().join(name)).unwrap_or_default();
        // Nothing can be read of a zombie.
        if read("environ").split(|&byte| byte == 0).any(&is) {
            let line = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
            found.insert(pid, line);
        }
    }
    found
}

/// Describes what is left on the hosts of a directory except the processes that must live. `stale`
/// are the hosts whose killed processes left their sockets, which the next guest of that name
/// replaces.
pub fn left(world: &Path, hosts: &[&Host], living: &[Living<'_>], stale: &[&Host]) -> Vec<String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = look(world, hosts, living, stale);
        if found.is_empty() || Instant::now() >= deadline {
            return found;
        }
        // No event tells when other processes release their resources.
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The same at this moment.
pub fn look(world: &Path, hosts: &[&Host], living: &[Living<'_>], stale: &[&Host]) -> Vec<String> {
    let mut found = Vec::new();
    for (pid, line) in processes(world) {
        if !living.iter().any(|one| one.pid == pid) {
            found.push(format!("process {pid} lives: {line}"));
        }
    }
    for one in living {
        let now = descriptors(one.pid);
        let kinds: BTreeSet<_> = now.keys().chain(one.descriptors.keys()).collect();
        for kind in kinds {
            let count = |of: &Descriptors| of.get(kind).copied().unwrap_or_default();
            let (has, wanted) = (count(&now), count(&one.descriptors));
            if has != wanted {
                found.push(format!(
                    "process {} has {has} of `{kind}` open, and not {wanted}",
                    one.pid
                ));
            }
        }
    }
    for host in hosts {
        let is = |other: &Host| other.runtime == host.runtime;
        let guests = living.iter().any(|one| is(one.host)) || stale.iter().any(|one| is(one));
        for entry in std::fs::read_dir(&host.runtime).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let wanted = name == "journal" || (guests && name == "web.sock");
            if !wanted {
                found.push(format!("{} is left", entry.path().display()));
            }
        }
        let sessions = run_ok(host, &["status", "--sessions"]);
        for session in sessions["sessions"].as_array().into_iter().flatten() {
            if session["led"] == true {
                found.push(format!("a process still leads session {}", session["session"]));
            }
        }
    }
    found
}
