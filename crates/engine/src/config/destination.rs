//! The settings of the destination.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vmferry_codec::Decompressors;
use vmferry_wire::AlgorithmSet;

use super::Timeouts;
use super::policy::Admission;
use super::values::{PROTOCOL_VERSIONS, ProtocolVersions, WorkerCount};
use crate::probe::host::HostFacts;
use crate::witness::Witness;

/// Settings of the destination.
#[derive(Clone, Debug)]
pub struct DestinationConfig {
    /// Directory of the journals.
    pub journal_directory: PathBuf,
    /// Return after the first failed attempt instead of listening on. Default off.
    pub once: bool,
    /// Threads that decode and place. By default one for each processor, at most 64.
    pub workers: Option<WorkerCount>,
    /// Which source may send which guest here. Default none: every authenticated source may send
    /// any guest, and so may every peer that connects over `tcp:` or `unix:`.
    pub policy: Option<Arc<dyn Admission>>,
    /// From a connection to the end of its greeting, including TLS. Default 10 s.
    pub greeting_timeout: Duration,
    /// Creates each worker's decompressors. Default: those that a worker keeps. Benchmarks compare
    /// them with others.
    #[doc(hidden)]
    pub decompressors: fn() -> Decompressors,
    /// What a source may compress with. A source of protocol version 1 is not told. Default all
    /// that this release knows.
    pub algorithms: AlgorithmSet,
    /// Protocol versions that this side speaks. Default: all that this release knows.
    pub protocol: ProtocolVersions,
    /// The timeouts.
    pub timeouts: Timeouts,
    /// Who is asked before a guest runs here. A source with another witness, or without one, is
    /// refused. Default none.
    pub witness: Option<Arc<dyn Witness>>,
    /// What an admitted source learns about this host from a [probe](crate::probe). Default
    /// nothing.
    pub host: HostFacts,
}

impl DestinationConfig {
    /// The default settings.
    #[must_use]
    pub fn new(journal_directory: PathBuf) -> Self {
        Self {
            journal_directory,
            once: false,
            workers: None,
            policy: None,
            greeting_timeout: Duration::from_secs(10),
            decompressors: Decompressors::default,
            algorithms: AlgorithmSet::ALL,
            protocol: ProtocolVersions(PROTOCOL_VERSIONS),
            timeouts: Timeouts { reconnect: Duration::from_secs(600), ..Timeouts::default() },
            witness: None,
            host: HostFacts::default(),
        }
    }
}
