//! One migration between two threads of this process, over loopback.

use std::ffi::CStr;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use rustix::thread::set_name;
use vmferry::destination::{Received, Stop, receive};
use vmferry::source::{Orders, SourceOutcome, migrate};
use vmferry::{DestinationConfig, MigrateError, SourceConfig, SourceVm};
use vmferry_memory::GuestMemory;
use vmferry_transport::{Address, Dialer, Listener};

use crate::guest::Incoming;

/// So long either side waits for the other.
const PATIENCE: Duration = Duration::from_secs(120);

/// How both sides are set up.
pub struct Setup {
    /// The source.
    pub source: SourceConfig,
    /// The destination.
    pub destination: DestinationConfig,
}

impl Setup {
    /// The defaults, with journals in this directory, and a cap in bytes per second.
    pub fn new(directory: &Path, cap: Option<u64>) -> Self {
        let mut source = SourceConfig::new(directory.join("source"));
        source.max_bandwidth = cap;
        let mut destination = DestinationConfig::new(directory.join("destination"));
        destination.once = true;
        // The source says nothing while a harvest waits for the guest, on a busy machine for long.
        for timeouts in [&mut source.timeouts, &mut destination.timeouts] {
            timeouts.silence = PATIENCE;
            timeouts.stall = PATIENCE;
        }
        Self { source, destination }
    }
}

const CONDUCTOR: &CStr = c"source";

fn thread_cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Whether a thread of this name is of the source's side. Both sides have one that listens to the other;
/// that does next to nothing and is of neither.
pub fn is_of_source(thread: &str) -> bool {
    is_conductor(thread) || thread.starts_with("encode") || thread.ends_with("-send")
}

/// Whether it conducts the source's side.
pub fn is_conductor(thread: &str) -> bool {
    CONDUCTOR.to_str() == Ok(thread)
}

/// The same of the destination's.
pub fn is_of_destination(thread: &str) -> bool {
    matches!(thread, "destination" | "accept")
        || thread.starts_with("place")
        || thread.ends_with("-receive")
}

/// A migration that has ended, one way or the other.
pub struct Ended {
    /// The source's figures.
    pub stats: Box<vmferry::stats::SourceStats>,
    /// CPU seconds of the one thread that conducts the source's side: a part of what the figures have.
    pub conductor_cpu_s: f64,
    /// Why the guest was not handed over, unless it was.
    pub error: Option<MigrateError>,
}

/// Migrates while `meanwhile` is done on the calling thread, which is told whether the migration is over;
/// after that the migration is cancelled if it still goes on and `cancel` says so.
///
/// # Errors
/// No loopback, a destination that says something else than the source, and what `meanwhile` says.
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
        anyhow::bail!("a side of the migration has panicked");
    };
    let done = match (done, &outcome) {
        (Ok(done), _) => done,
        // Why it ended matters more than that it did.
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
        (SourceOutcome::Given { .. }, Received::Nothing { error, .. }) => {
            Err(error).context("the destination has no guest")
        }
        (SourceOutcome::Kept { error, .. }, Received::Owns(_)) => {
            Err(error).context("the source has kept a guest that the destination has")
        }
    }
}
