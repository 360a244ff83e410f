//! The QEMUs of this host, found by their QMP sockets.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use vmferry_fleet::{Guest, GuestPhase, GuestVmm};
use vmferry_handover::journal::{self, Verdict};
use vmferry_qemu::{Glance, process_name};

/// How often a QEMU is asked. Its socket serves one client at a time, so others wait for
/// milliseconds.
const ASK_PERIOD: Duration = Duration::from_secs(10);

/// The same for one that has shown no guest yet: it may just have arrived.
const ASK_AGAIN_PERIOD: Duration = Duration::from_secs(2);

/// The QEMUs with sockets `*.qmp` in some directories.
#[derive(Debug)]
pub struct Qemus {
    directories: Vec<PathBuf>,
    journals: PathBuf,
    known: BTreeMap<PathBuf, Known>,
}

/// What is known of a socket.
#[derive(Debug)]
struct Known {
    /// The number of the socket's file: another QEMU makes another one.
    inode: u64,
    asked: Instant,
    seen: Option<Glance>,
}

impl Qemus {
    /// Those in these directories, with the journals of this host.
    pub fn new(directories: Vec<PathBuf>, journals: PathBuf) -> Self {
        Self { directories, journals, known: BTreeMap::new() }
    }

    /// The guests now. A QEMU that another client uses is as it was seen last.
    pub fn guests(&mut self) -> Vec<Guest> {
        let mut known = std::mem::take(&mut self.known);
        for (socket, inode) in self.sockets() {
            let before =
                known.remove(&socket).filter(|known| known.inode == inode && known.lives());
            let known = match before {
                Some(known) if known.asked.elapsed() < known.ask_period() => known,
                before => {
                    let seen = Glance::at(&socket).ok();
                    let seen = seen.or(before.and_then(|known| known.seen));
                    Known { inode, asked: Instant::now(), seen }
                }
            };
            self.known.insert(socket, known);
        }
        let seen = self
            .known
            .iter()
            .filter_map(|(socket, known)| self.guest(socket, known.seen.as_ref()?));
        seen.collect()
    }

    fn sockets(&self) -> Vec<(PathBuf, u64)> {
        let mut sockets = Vec::new();
        for directory in &self.directories {
            // A directory may be made later, and files in it come and go.
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                let path = entry.path();
                let is_qmp = path.extension().is_some_and(|ending| ending == "qmp");
                let Some(about) = entry.metadata().ok().filter(|_| is_qmp) else { continue };
                if about.file_type().is_socket() {
                    sockets.push((path, about.ino()));
                }
            }
        }
        sockets
    }

    /// `None` for a QEMU that waits for a guest, and for a guest that has no UUID to be known by.
    fn guest(&self, socket: &Path, seen: &Glance) -> Option<Guest> {
        let identity = &seen.identity;
        if seen.state == "inmigrate" || identity.uuid.is_nil() {
            return None;
        }
        Some(Guest {
            uuid: identity.uuid,
            name: identity.name.clone(),
            vmm: GuestVmm::Qemu,
            phase: self.phase(seen),
            memory_bytes: Some(seen.memory_bytes),
            vcpus: Some(seen.vcpus),
            socket: Some(socket.to_owned()),
        })
    }

    fn phase(&self, seen: &Glance) -> GuestPhase {
        if seen.state == "running" {
            return GuestPhase::Running;
        }
        // A QEMU whose guest has moved stays paused, and so does one that has not run it yet.
        let process = seen.pid.and_then(process_name);
        let sessions = journal::sessions_in(&self.journals, &seen.identity, process.as_deref());
        let verdict = sessions.ok().and_then(|all| Some(all.last()?.verdict));
        match (verdict, seen.state.as_str()) {
            (Some(Verdict::There), _) => GuestPhase::Other,
            (Some(Verdict::InDoubt), _) => GuestPhase::InDoubt,
            (_, "paused" | "suspended" | "prelaunch" | "io-error") => GuestPhase::Paused,
            (_, "internal-error" | "guest-panicked") => GuestPhase::Crashed,
            _ => GuestPhase::Other,
        }
    }
}

impl Known {
    fn ask_period(&self) -> Duration {
        match &self.seen {
            Some(seen) if seen.state != "inmigrate" => ASK_PERIOD,
            _ => ASK_AGAIN_PERIOD,
        }
    }

    fn lives(&self) -> bool {
        let pid = self.seen.as_ref().and_then(|seen| seen.pid);
        pid.is_none_or(|pid| Path::new(&format!("/proc/{pid}")).exists())
    }
}
