//! One migration between two threads of this process, over loopback.

use std::ffi::CStr;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use rustix::thread::set_name;
use vmferry::config::compression::{CompressionConfig, CompressionWay, WhenBusy};
use vmferry::config::{BandwidthCap, ConfigError};
use vmferry::destination::{Received, Stop, receive};
use vmferry::source::{Orders, SourceOutcome, migrate};
use vmferry::{DestinationConfig, MigrateError, SourceConfig, SourceVm};
use vmferry_memory::GuestMemory;
use vmferry_transport::{Address, Dialer, Listener};

use crate::guest::Incoming;

/// Timeout of either side while the other is silent.
const SILENCE_LIMIT: Duration = Duration::from_secs(120);

/// The configuration of both sides.
pub struct Setup {
    /// The source's configuration.
    pub source: SourceConfig,
    /// The destination's configuration.
    pub destination: DestinationConfig,
}

impl Setup {
    /// The default configuration with journals in `directory` and a cap in bytes per second.
    pub fn new(directory: &Path, cap: Option<u64>) -> Result<Self, ConfigError> {
        let mut source = SourceConfig::new(directory.join("source"));
        source.max_bandwidth = cap.map(BandwidthCap::new).transpose()?;
        let mut destination = DestinationConfig::new(directory.join("destination"));
        destination.once = true;
        // The source is silent while a harvest waits for the guest. On a busy machine this takes
        // long.
        for timeouts in [&mut source.timeouts, &mut destination.timeouts] {
            timeouts.silence = SILENCE_LIMIT;
            timeouts.stall = SILENCE_LIMIT;
        }
        Ok(Self { source, destination })
    }

    /// Compresses with this method. Pages wait for a worker, so that all are compressed.
    pub fn compress(&mut self, way: CompressionWay, deltas: Deltas) {
        let default = CompressionConfig::default();
        let delta_memory = match deltas {
            Deltas::On => default.delta_memory,
            Deltas::Off => 0,
        };
        let when_busy = WhenBusy::Wait;
        self.source.compression = CompressionConfig { way, when_busy, delta_memory, ..default };
    }
}

/// Whether the source keeps copies to compute deltas from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deltas {
    Off,
    On,
}

const CONDUCTOR: &CStr = c"source";

fn thread_cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Whether the thread with this name belongs to the source. Both sides have a thread that listens
/// to the other; it uses almost no CPU time and is counted for neither.
pub fn is_of_source(thread: &str) -> bool {
    is_conductor(thread) || thread.starts_with("encode") || thread.ends_with("-send")
}

/// Whether the thread with this name conducts the source's side.
pub fn is_conductor(thread: &str) -> bool {
    CONDUCTOR.to_str() == Ok(thread)
}

/// Whether the thread with this name belongs to the destination.
pub fn is_of_destination(thread: &str) -> bool {
    matches!(thread, "destination" | "accept")
        || thread.starts_with("place")
        || thread.ends_with("-receive")
}

/// The result of a migration.
pub struct Ended {
    /// The source's statistics.
    pub stats: Box<vmferry::stats::SourceStats>,
    /// CPU seconds of the thread that conducts the source's side. The statistics include them.
    pub conductor_cpu_s: f64,
    /// Why the guest was not handed over. `None` if it was.
    pub error: Option<MigrateError>,
}

/// Migrates while the calling thread runs `meanwhile`, which can ask whether the migration is over.
/// Afterwards the migration is canceled if it is still running and `cancel` is set.
///
/// # Errors
/// The loopback connection failed, the two sides disagree on the outcome, or `meanwhile` failed.
pub fn migrate_while<V: SourceVm + Send, T>(
    vm: V,
    there: &GuestMemory,
    setup: Setup,
    cancel: bool,
    meanwhile: impl FnOnce(&Orders, &dyn Fn() -> bool) -> anyhow::Result<T>,
) -> anyhow::Result<(T, Ended)> {
    let listener = Listener::bind(&Address::Tcp { host: "127.0.0.1".to_owned(), port: 0 }, None)?;
    let dialer = Dialer::new(listener.local_address().clone(), None);
    let orders = Orders::new();
    let (incoming, Setup { source, destination }) = (Incoming(there.clone()), setup);
    let (done, outcome, received) = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let _ = set_name(c"destination");
            receive(listener, incoming, &destination, &Stop::default(), &mut |_| {})
        });
        let migrating = scope.spawn(|| {
            let _ = set_name(CONDUCTOR);
            let begun = thread_cpu_s();
            let outcome = migrate(vm, &dialer, source, &orders, &mut |_| {});
            (outcome, thread_cpu_s() - begun)
        });
        let done = meanwhile(&orders, &|| migrating.is_finished());
        if cancel || done.is_err() {
            orders.cancel();
        }
        (done, migrating.join(), receiving.join())
    });
    let (Ok((outcome, conductor_cpu_s)), Ok(received)) = (outcome, received) else {
        anyhow::bail!("one side of the migration panicked");
    };
    let done = match (done, &outcome) {
        (Ok(done), _) => done,
        // The reason why the migration ended is more useful than the fact that it did.
        (Err(_), SourceOutcome::Kept { error, .. })
            if !matches!(error, MigrateError::Cancelled { .. }) =>
        {
            anyhow::bail!("the migration failed: {error}")
        }
        (Err(error), _) => return Err(error),
    };
    match (outcome, received) {
        (SourceOutcome::Given { stats, .. }, Received::Owns(_)) => {
            Ok((done, Ended { stats, conductor_cpu_s, error: None }))
        }
        (SourceOutcome::Kept { error, stats, .. }, Received::Nothing { .. }) => {
            Ok((done, Ended { stats, conductor_cpu_s, error: Some(error) }))
        }
        (SourceOutcome::Lost { error, .. }, _) => Err(error).context("the guest is lost"),
        (SourceOutcome::Given { .. }, Received::Nothing { error, .. }) => {
            Err(error).context("the destination does not own the guest")
        }
        (SourceOutcome::Kept { error, .. }, Received::Owns(_)) => {
            Err(error).context("the source kept the guest, but the destination owns it too")
        }
    }
}
