//! What a migration's record says.

mod events;
mod read;

use serde::Deserialize;

pub(crate) use read::{of_object, read};
pub use vmferry_api::{
    RecordedDowntime as Downtime, RecordedPages as Encoded, RecordedRound as Round,
    RecordedSource as Stats,
};

/// A number that may be missing.
pub type Number = Option<f64>;

/// Bytes of a guest's page.
pub const PAGE_BYTES: f64 = 4096.0;

/// A migration as its record tells of it.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// The file, as it was named.
    pub file: String,
    /// Number of the session.
    pub id: Option<String>,
    /// What was asked for.
    pub started: Started,
    /// When the first event was, as it is written there.
    pub begun: Option<String>,
    /// Round trip in milliseconds, when it was connected.
    pub round_trip_ms: Number,
    /// Every round that was finished.
    pub rounds: Vec<Round>,
    /// How far it was, several times a second.
    pub samples: Vec<Sample>,
    /// What was expected after each harvest.
    pub forecasts: Vec<Forecast>,
    /// Everything else that happened, in order.
    pub events: Vec<Event>,
    /// How it ended.
    pub ending: Ending,
    /// Its statistics, if they were written.
    pub stats: Stats,
    /// CPU seconds of the destination's engine, of a demo.
    pub destination_cpu_s: Number,
    /// The file ends within a line: whoever wrote it was killed, or still writes.
    pub cut_off: bool,
    /// Whether COMMIT was journalled.
    pub committed: bool,
}

/// What was asked for.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Started {
    /// The guest's name.
    pub guest: Option<String>,
    /// Where it is to go.
    pub to: Option<String>,
    /// The guest's memory.
    pub memory_bytes: Number,
    /// The release that wrote this.
    pub release: Option<String>,
    /// What the migration may cost.
    pub limits: Limits,
    /// What is to be done with pages.
    pub compression: Option<String>,
    /// Data channels.
    pub channels: Number,
}

/// What a migration may cost.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// For how long the guest may stand still, in milliseconds.
    pub downtime_limit_ms: Number,
    /// Cap in bytes per second.
    pub max_bandwidth: Number,
    /// Rounds.
    pub max_rounds: Number,
    /// What the vCPUs may lose, in per cent.
    pub throttle: Number,
}

/// How far it was.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Milliseconds since the start.
    pub at_ms: f64,
    /// Bytes handed to the data channels since the start.
    pub sent_bytes: f64,
}

/// What was expected after a harvest.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Forecast {
    /// The round before.
    pub round: u64,
    /// Milliseconds since the start.
    pub elapsed_ms: Number,
    /// What the guest writes, in bytes per second.
    pub dirty_bytes_per_s: Number,
    /// What the link carries, in bytes per second.
    pub link_bytes_per_s: Number,
    /// The downtime, if the guest were paused now, in milliseconds.
    pub predicted_downtime_ms: Number,
    /// What it may be, in milliseconds.
    pub downtime_limit_ms: Number,
    /// `converging`, `fits` or `not-converging`.
    pub verdict: Option<String>,
    /// What could be done.
    pub advice: Option<String>,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Milliseconds since the start, if that is known.
    pub at_ms: Number,
    /// The record does not say when it was: `at_ms` is of the progress before it.
    pub is_about: bool,
    /// Its name in the file.
    pub name: String,
    /// In words.
    pub text: String,
}

/// How it ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Ending {
    /// The destination has the guest.
    Moved,
    /// It failed.
    Failed(Failure),
    /// The record does not say.
    #[default]
    Unknown,
}

/// Why it failed.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Failure {
    /// In one word.
    pub code: String,
    /// The command's exit status.
    pub exit: Number,
    /// In words.
    pub message: String,
}

impl Failure {
    /// Whether it is open who has the guest.
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        self.code == "in-doubt"
    }
}

impl Run {
    /// The guest's name, or a word for it.
    #[must_use]
    pub fn guest(&self) -> &str {
        self.started.guest.as_deref().unwrap_or("The guest")
    }

    /// What the downtime may be, in milliseconds.
    #[must_use]
    pub fn downtime_limit_ms(&self) -> Number {
        let forecast = || self.forecasts.iter().rev().find_map(|one| one.downtime_limit_ms);
        self.started.limits.downtime_limit_ms.or_else(forecast)
    }

    /// The advice that stood when it ended.
    #[must_use]
    pub fn advice(&self) -> Option<&str> {
        self.forecasts.last()?.advice.as_deref()
    }

    /// Whether a failure leaves open who has the guest: whoever wrote the record lost the guest's VMM, and did not hear
    /// that the guest was resumed.
    #[must_use]
    pub fn is_unheard(&self, failure: &Failure) -> bool {
        let lost = matches!(failure.code.as_str(), "" | "internal" | "not-answering");
        lost && !self.events.iter().any(|event| event.name == "resumed")
    }

    /// When each round began and ended, in milliseconds since the start: their times one after the other.
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
