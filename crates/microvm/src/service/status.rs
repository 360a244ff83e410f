//! The status of a guest, for clients of the control socket.

use serde::Serialize;
use vmferry::destination::FetchProgress;
use vmferry::source::Progress;

use crate::report::Report;
use crate::virtio::BalloonStatus;

/// The status of a guest.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// Name.
    pub name: String,
    /// UUID.
    pub uuid: uuid::Uuid,
    /// The vmferry release of the VMM.
    pub release: &'static str,
    /// `running`, `paused` or `not started`.
    pub phase: &'static str,
    /// `kvm` or `process`.
    pub guest: &'static str,
    /// Why the guest is of that kind.
    pub choice: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// The kind of memory.
    pub memory_kind: String,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// The guest's workload.
    pub workload: String,
    /// The VMM process.
    pub pid: u32,
    /// Peak resident memory of that process in bytes.
    pub peak_rss_bytes: u64,
    /// Why the guest has crashed, if it has.
    pub crash: Option<String>,
    /// The guest's report on itself; absent while a page of it is still at another host.
    pub report: Option<Report>,
    /// The migration under way.
    pub migration: Option<Progress>,
    /// The pages that the guest lacks while it runs here; absent if it has all.
    pub fetch: Option<FetchProgress>,
    /// Whether an estimate is under way.
    pub watched: bool,
    /// The guest's balloon, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonStatus>,
}

/// Peak resident memory of this process: `VmHWM` in `/proc/self/status`, or 0 if it cannot be read.
#[must_use]
pub fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .and_then(|number| number.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
