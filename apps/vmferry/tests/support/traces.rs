//! What a migration could leave over in QEMU and next to it.

use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::Qemu;

use super::Host;
use super::leftovers::processes_of;

/// The state of a QEMU before a migration: its migration settings, and the number of its
/// descriptors of each kind.
#[derive(Debug, PartialEq)]
pub struct Traces {
    capabilities: Value,
    parameters: Value,
    descriptors: BTreeMap<String, usize>,
}

impl Traces {
    /// Reads a QEMU's state as soon as its QMP socket is free: the cleanup releases it last.
    pub fn of(qemu: &Qemu) -> Self {
        let mut qmp = Qmp::connect(&qemu.qmp).unwrap();
        let capabilities = qmp.execute("query-migrate-capabilities", json!({})).unwrap();
        let mut parameters = qmp.execute("query-migrate-parameters", json!({})).unwrap();
        for name in ["tls-creds", "tls-hostname"] {
            // QEMU omits a name that was never set, and lists an empty one that was.
            if parameters[name] == "" {
                parameters.as_object_mut().unwrap().remove(name);
            }
        }
        Self { capabilities, parameters, descriptors: descriptors(qemu.child.id()) }
    }
}

/// The targets of `/proc/PID/fd`, without the numbers of sockets and pipes. Event descriptors are
/// left out: they appear and vanish with QEMU's own work.
fn descriptors(pid: u32) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten() {
        let Ok(link) = std::fs::read_link(entry.path()) else { continue };
        let link = link.to_string_lossy().into_owned();
        let kind = link
            .split_once(":[")
            .map_or(link.as_str(), |(kind, rest)| if kind == "anon_inode" { rest } else { kind });
        if kind != "eventfd]" {
            *found.entry(kind.to_owned()).or_default() += 1;
        }
    }
    found
}

/// Checks that no process of these hosts lives, neither vmferry's nor a QEMU that it started, and
/// that no socket and no throttling control group is left. A process that has just finished may
/// take a moment to end.
pub fn nothing_is_left(hosts: &[&Host], qemus: &[&Qemu]) {
    let deadline = Instant::now() + Duration::from_secs(60);
    for host in hosts {
        loop {
            let left = processes_of(host);
            if left.is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "left running: {left:?}");
            // The end of another process's child is not signaled to this one.
            std::thread::sleep(Duration::from_millis(10));
        }
        let entries = std::fs::read_dir(&host.runtime).into_iter().flatten().flatten();
        let sockets: Vec<PathBuf> = entries
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
            .map(|entry| entry.path())
            .collect();
        assert!(sockets.is_empty(), "left over: {sockets:?}");
    }
    for qemu in qemus {
        let name = format!("vmferry-{}", qemu.child.id());
        assert_eq!(group(Path::new("/sys/fs/cgroup"), &name, 6), None, "a control group is left");
    }
}

fn group(at: &Path, name: &str, depth: u32) -> Option<PathBuf> {
    let wanted = at.join(name);
    if wanted.is_dir() {
        return Some(wanted);
    }
    let deeper = depth.checked_sub(1)?;
    let entries = std::fs::read_dir(at).ok()?.flatten();
    let mut below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    below.find_map(|entry| group(&entry.path(), name, deeper))
}
