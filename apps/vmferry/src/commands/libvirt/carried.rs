//! What this host's daemon says about the streams of a migration: what they have carried, and why
//! they failed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::peer::Uris;
use crate::commands::daemon::streams::{self, Carried as OfTarget, Failed, FailureKind};

/// How long the daemon may take to notice the end of a stream that libvirt has noticed.
const PATIENCE: Duration = Duration::from_secs(3);

/// How often it is asked meanwhile.
const RETRY_PERIOD: Duration = Duration::from_millis(50);

/// The streams of one migration at this host's daemon.
#[derive(Clone, Debug)]
pub struct DaemonStreams {
    directory: PathBuf,
    peer: String,
    memory: String,
    disks: String,
    since: Instant,
}

/// What the streams have carried.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Carried {
    /// Streams of memory.
    pub memory: OfTarget,
    /// Streams of disks.
    pub disks: OfTarget,
}

impl Carried {
    /// Bytes that QEMU wrote.
    pub fn read_bytes(&self) -> u64 {
        self.memory.read_bytes + self.disks.read_bytes
    }

    /// Bytes on links, before TLS.
    pub fn sent_bytes(&self) -> u64 {
        self.memory.sent_bytes + self.disks.sent_bytes
    }

    /// Number of streams.
    pub fn streams(&self) -> u64 {
        self.memory.streams + self.disks.streams
    }

    /// How often a stream got another link.
    pub fn reconnections(&self) -> u64 {
        self.memory.reconnections + self.disks.reconnections
    }

    /// The longer time without a link, of memory and disks. They lose their links together.
    pub fn link_down_ms(&self) -> f64 {
        self.memory.link_down_ms.max(self.disks.link_down_ms)
    }

    /// Bytes that QEMU wrote divided by the bytes that were sent for them.
    pub fn compression_ratio(&self) -> f64 {
        self.read_bytes() as f64 / self.sent_bytes().max(1) as f64
    }

    /// The events of links that were lost or made since `before`.
    pub fn events_since(&self, before: &Self) -> Vec<Value> {
        let channels =
            [("memory", &before.memory, &self.memory), ("disks", &before.disks, &self.disks)];
        let mut events = Vec::new();
        for (channel, before, now) in channels {
            match (&before.lost, &now.lost) {
                (None, Some(reason)) => events.push(json!({
                    "event": "link-lost", "channel": channel, "reason": reason,
                })),
                (Some(_), None) => events.push(json!({
                    "event": "link-restored", "channel": channel,
                    "after_ms": now.last_link_down_ms,
                })),
                _ => {}
            }
        }
        events
    }

    fn has_open(&self) -> bool {
        self.memory.open + self.disks.open > 0
    }
}

impl DaemonStreams {
    /// The streams of a migration that begins now.
    pub fn new(directory: &Path, peer: &str, uris: &Uris) -> Self {
        // The daemon names a stream after its directory and file.
        let target = |uri: &str| format!("{peer}/{}", uri.rsplit('/').next().unwrap_or_default());
        Self {
            directory: directory.to_owned(),
            peer: peer.to_owned(),
            memory: target(&uris.memory),
            disks: target(&uris.disks),
            since: Instant::now(),
        }
    }

    /// What they have carried so far; `None` if the daemon does not answer.
    pub fn carried(&self) -> Option<Carried> {
        let status = streams::ask(&self.directory).ok()?;
        let of = |wanted: &str| {
            let its = |one: &&OfTarget| one.peer == self.peer && one.target == wanted;
            status.carried.iter().find(its).cloned().unwrap_or_default()
        };
        Some(Carried { memory: of(&self.memory), disks: of(&self.disks) })
    }

    /// What they have carried when the migration has ended: the daemon reads the ends of its
    /// sockets after libvirt has closed them.
    pub fn carried_in_all(&self) -> Option<Carried> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let carried = self.carried()?;
            if !carried.has_open() || Instant::now() >= deadline {
                return Some(carried);
            }
            // The daemon reports no ends by itself.
            std::thread::sleep(RETRY_PERIOD);
        }
    }

    /// The first failure of a link of this migration that libvirt and QEMU only see as the end of
    /// their connection.
    pub fn failure(&self) -> Option<Failed> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = streams::ask(&self.directory).ok()?;
            let age = self.since.elapsed().as_millis() as u64;
            let found = status.failures.into_iter().find(|failed| self.is_cause(failed, age));
            if found.is_some() || Instant::now() >= deadline {
                return found;
            }
            // The daemon notes a failure some time after libvirt has reported it.
            std::thread::sleep(RETRY_PERIOD);
        }
    }

    fn is_cause(&self, failed: &Failed, age_ms: u64) -> bool {
        let is_of_this = [LIBVIRT, &self.memory, &self.disks].contains(&failed.target.as_str());
        let is_recent = failed.age_ms <= age_ms && failed.kind != FailureKind::Other;
        failed.peer == self.peer && is_of_this && is_recent
    }
}

/// How the daemon names the stream of libvirt's calls.
const LIBVIRT: &str = vmferry_proxy::LIBVIRT_SOCKET;

#[cfg(test)]
mod tests {
    use super::*;

    fn streams() -> DaemonStreams {
        let uris = Uris {
            libvirt: "qemu+unix:///system?socket=/run/x/host-b/libvirt".into(),
            memory: "unix:///run/x/host-b/6c34-1.mig".into(),
            disks: "unix:///run/x/host-b/6c34-1.disks".into(),
        };
        DaemonStreams::new(Path::new("/run/x"), "host-b", &uris)
    }

    #[test]
    fn causes_are_recent_failures_of_links_of_this_migration() {
        let cause = |peer: &str, target: &str, kind, age_ms| {
            let (peer, target) = (peer.to_owned(), target.to_owned());
            let failed = Failed { peer, target, kind, reason: "r".into(), age_ms };
            streams().is_cause(&failed, 1000)
        };
        let lost = FailureKind::LinkLost;
        assert!(cause("host-b", "libvirt", FailureKind::Unreachable, 10));
        assert!(cause("host-b", "host-b/6c34-1.mig", lost, 1000));
        assert!(!cause("host-b", "host-b/6c34-2.mig", lost, 10), "another guest's");
        assert!(!cause("host-c", "libvirt", lost, 10), "another peer's");
        assert!(!cause("host-b", "libvirt", lost, 1001), "an earlier one");
        assert!(!cause("host-b", "libvirt", FailureKind::Other, 10), "libvirt sees it");
    }

    #[test]
    fn lost_links_are_events_when_they_are_lost_and_made() {
        let at = |lost: Option<&str>, last_link_down_ms| {
            let lost = lost.map(str::to_owned);
            let memory = OfTarget { lost, last_link_down_ms, ..OfTarget::default() };
            Carried { memory, ..Carried::default() }
        };
        let (before, down) = (at(None, 0.0), at(Some("reset"), 0.0));
        assert!(before.events_since(&before).is_empty());
        let lost = &down.events_since(&before)[0];
        assert_eq!((&lost["event"], &lost["channel"]), (&"link-lost".into(), &"memory".into()));
        assert!(down.events_since(&down).is_empty());
        let made = &at(None, 2000.0).events_since(&down)[0];
        assert_eq!(made["event"], "link-restored");
        assert_eq!(made["after_ms"], 2000.0);
    }

    #[test]
    fn memory_and_disks_are_added_up() {
        let of = |read_bytes, sent_bytes, link_down_ms| OfTarget {
            streams: 2,
            read_bytes,
            sent_bytes,
            reconnections: 1,
            link_down_ms,
            ..OfTarget::default()
        };
        let carried = Carried { memory: of(300, 100, 5.0), disks: of(100, 100, 7.0) };
        assert_eq!((carried.streams(), carried.reconnections()), (4, 2));
        assert_eq!((carried.compression_ratio(), carried.link_down_ms()), (2.0, 7.0));
    }
}
