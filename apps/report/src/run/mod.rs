//! The content of a migration's record.

mod events;
mod read;

use serde::Deserialize;

pub use events::sentence;
pub(crate) use read::{of_object, read};
pub use vmferry_api::{
    RecordedDowntime as Downtime, RecordedFetch as Fetch, RecordedPages as Encoded,
    RecordedRound as Round, RecordedSource as Stats,
};

/// A number that may be missing.
pub type Number = Option<f64>;

/// Bytes per guest page.
pub const PAGE_BYTES: f64 = 4096.0;

/// A migration as recorded.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// The name of the file.
    pub file: String,
    /// The session ID.
    pub id: Option<String>,
    /// The settings of the migration.
    pub started: Started,
    /// The time of the first event, as written in the record.
    pub begun: Option<String>,
    /// The round-trip time in milliseconds, measured on connecting.
    pub round_trip_ms: Number,
    /// The finished rounds.
    pub rounds: Vec<Round>,
    /// Progress samples, several per second.
    pub samples: Vec<Sample>,
    /// The forecast after each harvest.
    pub forecasts: Vec<Forecast>,
    /// All other events, in order.
    pub events: Vec<Event>,
    /// The outcome.
    pub ending: Ending,
    /// The statistics, if they were recorded.
    pub stats: Stats,
    /// How missing pages were fetched with post-copy. Only a destination's record has it.
    pub fetch: Option<Fetch>,
    /// Pages that were still missing at the last progress of the fetch.
    pub remaining_pages: Number,
    /// CPU seconds of the destination's engine. Demos and destinations' records have it.
    pub destination_cpu_s: Number,
    /// Whether the file ends within a line, because the writer was killed or is still writing.
    pub cut_off: bool,
    /// Whether COMMIT was journaled.
    pub committed: bool,
}

/// The settings of the migration.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Started {
    /// The guest's name.
    pub guest: Option<String>,
    /// The destination.
    pub to: Option<String>,
    /// Bytes of the guest's memory.
    pub memory_bytes: Number,
    /// The vmferry release that wrote the record.
    pub release: Option<String>,
    /// The limits of the migration.
    pub limits: Limits,
    /// The compression method.
    pub compression: Option<String>,
    /// The number of data channels.
    pub channels: Number,
}

/// The limits of a migration.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// The downtime limit in milliseconds.
    pub downtime_limit_ms: Number,
    /// The bandwidth cap in bytes per second.
    pub max_bandwidth: Number,
    /// The maximum number of rounds.
    pub max_rounds: Number,
    /// The maximum throttle in percent.
    pub throttle: Number,
}

/// A progress sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Milliseconds since the start.
    pub at_ms: f64,
    /// Bytes passed to the data channels since the start.
    pub sent_bytes: f64,
}

/// The forecast after a harvest.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Forecast {
    /// The preceding round.
    pub round: u64,
    /// Milliseconds since the start.
    pub elapsed_ms: Number,
    /// The guest's dirty rate in bytes per second.
    pub dirty_bytes_per_s: Number,
    /// The link's throughput in bytes per second.
    pub link_bytes_per_s: Number,
    /// The predicted downtime if the guest were paused now, in milliseconds.
    pub predicted_downtime_ms: Number,
    /// The downtime limit in milliseconds.
    pub downtime_limit_ms: Number,
    /// `converging`, `fits` or `not-converging`.
    pub verdict: Option<String>,
    /// Advice for the user.
    pub advice: Option<String>,
}

/// An event.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Milliseconds since the start, if known.
    pub at_ms: Number,
    /// The record does not say when it was: `at_ms` is of the progress before it.
    pub is_about: bool,
    /// The event's name in the file.
    pub name: String,
    /// A description.
    pub text: String,
}

/// The outcome.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Ending {
    /// The destination runs the guest.
    Moved,
    /// The migration failed.
    Failed(Failure),
    /// The record does not say.
    #[default]
    Unknown,
}

/// The error of a failed migration.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Failure {
    /// The error code.
    pub code: String,
    /// The exit status of the command.
    pub exit: Number,
    /// A description.
    pub message: String,
}

impl Failure {
    /// Whether it is in doubt which host owns the guest.
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        self.code == "in-doubt"
    }
}

impl Run {
    /// The guest's name, or "The guest".
    #[must_use]
    pub fn guest(&self) -> &str {
        self.started.guest.as_deref().unwrap_or("The guest")
    }

    /// The downtime limit in milliseconds.
    #[must_use]
    pub fn downtime_limit_ms(&self) -> Number {
        let forecast = || self.forecasts.iter().rev().find_map(|one| one.downtime_limit_ms);
        self.started.limits.downtime_limit_ms.or_else(forecast)
    }

    /// Pages that were missing when the guest started at the destination; `None` without post-copy.
    #[must_use]
    pub fn missing_pages(&self) -> Number {
        let fetched = self.fetch.as_ref().and_then(|fetch| fetch.missing_pages);
        fetched.or(self.stats.missing_pages).filter(|pages| *pages > 0.0)
    }

    /// The advice of the last forecast.
    #[must_use]
    pub fn advice(&self) -> Option<&str> {
        self.forecasts.last()?.advice.as_deref()
    }

    /// Whether the record leaves open which host owns the guest: the writer lost the guest's VMM,
    /// and the record has no resume after that.
    #[must_use]
    pub fn has_unknown_owner(&self, failure: &Failure) -> bool {
        let lost = matches!(failure.code.as_str(), "" | "internal" | "not-answering");
        lost && !self.events.iter().any(|event| event.name == "resumed")
    }

    /// Whether pages of the guest were lost after it had started at the destination.
    #[must_use]
    pub fn has_lost_pages(&self, failure: &Failure) -> bool {
        failure.code == "corrupt" && self.events.iter().any(|event| event.name == "serving")
    }

    /// The start and end of each round in milliseconds since the start, from the durations of the
    /// rounds.
    #[must_use]
    pub fn spans(&self) -> Vec<(f64, f64)> {
        let mut at = 0.0;
        let span = |round: &Round| {
            let begun = at + round.harvest_ms.unwrap_or_default();
            at = begun + round.ms.unwrap_or_default();
            (begun, at)
        };
        self.rounds.iter().map(span).collect()
    }
}
