//! Types shared by the command, the HTTP API and recorded migrations. Each type is declared once,
//! so that the engine, the `--json` output and reports cannot disagree about it.

#![forbid(unsafe_code)]

mod release;
mod sparse;
mod stats;

pub use release::{MAX_RELEASE_BYTES, Release};
pub use sparse::Recorded;
pub use stats::{
    DestinationStats, DowntimeStats, FetchStats, FrameReasons, PageCounts, RecordedDestination,
    RecordedDowntime, RecordedFetch, RecordedPages, RecordedReasons, RecordedRound, RecordedSource,
    RoundStats, SourceStats,
};
