//! What a migration reports: its statistics, and forecasts on the way.

pub mod forecast;

pub use vmferry_api::{
    DestinationStats, DowntimeStats, FetchStats, FrameReasons, PageCounts, RoundStats, SourceStats,
};
