//! The statistics of a migration as they stand in a file.
//!
//! Every member may be missing: an older release has fewer of them, and what is unknown is left out of the page.
//! The names and units are those of `vmferry::stats`, and a test there keeps both alike.

use serde::{Deserialize, Serialize};

/// A number that may be missing.
pub type Number = Option<f64>;

/// Pages by how they travelled.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct Encoded {
    /// As a mark: all zero.
    pub zero: Number,
    /// As they are.
    pub raw: Number,
    /// As what has changed.
    pub delta: Number,
    /// Compressed with LZ4.
    pub lz4: Number,
    /// Compressed with Zstandard.
    pub zstd: Number,
    /// Compressed with zlib.
    pub zlib: Number,
}

/// A round.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct Round {
    /// Number, from 1.
    pub round: u64,
    /// Pages that it had to send.
    pub pages: Number,
    /// Of these, all zero.
    pub zero_pages: Number,
    /// Of these, free and not sent.
    pub free_pages: Number,
    /// By how they travelled.
    pub encoded: Encoded,
    /// Bytes on the data channels.
    pub bytes: Number,
    /// Its time in milliseconds.
    pub ms: Number,
    /// The harvest before it, in milliseconds.
    pub harvest_ms: Number,
    /// The harvest's share, in per cent.
    pub harvest_percent: Number,
    /// Pages per second that the guest wrote before.
    pub dirty_pages_per_s: Number,
    /// Bytes of pages with content per second.
    pub bytes_per_s: Number,
    /// What the vCPUs lost, in per cent.
    pub throttle_percent: Number,
    /// Whether the guest was paused.
    pub paused: bool,
    /// Whether a channel was lost meanwhile.
    pub interrupted: bool,
}

/// Parts of the downtime, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct Downtime {
    /// Until every vCPU and device was quiet.
    pub pause_ms: Number,
    /// The last harvest.
    pub harvest_ms: Number,
    /// Saving the state, while the last round is sent.
    pub save_ms: Number,
    /// From the last harvest until everything had left.
    pub send_ms: Number,
    /// From there until READY.
    pub ready_ms: Number,
    /// COMMIT, until RUNNING has come back.
    pub commit_ms: Number,
}

/// A whole migration.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct Stats {
    /// Every round.
    pub rounds: Vec<Round>,
    /// Until the guest ran there, in milliseconds.
    pub total_ms: Number,
    /// The downtime in milliseconds.
    pub downtime_ms: Number,
    /// What was predicted, in milliseconds.
    pub predicted_downtime_ms: Number,
    /// Its parts.
    pub downtime: Downtime,
    /// Bytes on the data channels and of the state.
    pub sent_bytes: Number,
    /// The guest's memory.
    pub memory_bytes: Number,
    /// The state of vCPUs and devices.
    pub state_bytes: Number,
    /// Whether the digests agree.
    pub digest_match: Option<bool>,
    /// Whether both memories, hashed whole, agree.
    pub verify_match: Option<bool>,
    /// What hashing took, in milliseconds.
    pub verify_ms: Number,
    /// CPU seconds of the engine's threads.
    pub engine_cpu_s: Number,
    /// Of these, the migration thread's.
    pub planning_cpu_s: Number,
    /// What was to be done with pages.
    pub compression: Option<String>,
    /// Pages that were not sent.
    pub free_pages: Number,
    /// Bytes of pages with content over bytes that travelled.
    pub compression_ratio: Number,
    /// Which dirty log.
    pub dirty_log: Option<String>,
    /// Data channels.
    pub channels: Number,
    /// How the link is made.
    pub transport: Option<String>,
    /// Version of the protocol.
    pub protocol: Number,
    /// Round trip in milliseconds.
    pub round_trip_ms: Number,
    /// Channels that were made again.
    pub reconnections: Number,
    /// Bytes of frames that were sent again.
    pub resent_bytes: Number,
    /// Time without all channels, in milliseconds.
    pub link_down_ms: Number,
    /// How often the paused guest ran on at the source.
    pub recalls: Number,
    /// For how long it had stood still then, in milliseconds.
    pub recalled_pause_ms: Number,
}
