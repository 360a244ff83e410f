//! The types that the command, the HTTP API and recorded migrations share. Each of them is declared
//! here and nowhere else: what the engine fills, what is printed with `--json`, and what a report
//! reads are the same declaration.

#![forbid(unsafe_code)]

mod release;
mod sparse;
mod stats;

pub use release::{MAX_RELEASE_BYTES, Release};
pub use sparse::Recorded;
pub use stats::{
    DestinationStats, DowntimeStats, FrameReasons, PageCounts, RecordedDestination,
    RecordedDowntime, RecordedPages, RecordedReasons, RecordedRound, RecordedSource, RoundStats,
    SourceStats,
};
