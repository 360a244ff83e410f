//! What a migration did, for people and machines.

use serde::Serialize;
use vmferry_codec::{FrameCounts, Method};
use vmferry_wire::{Algorithm, Release};

/// Pages by how they travelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PageCounts {
    /// As a mark: all zero.
    pub zero: u64,
    /// As they are.
    pub raw: u64,
    /// As what has changed since they were sent before.
    pub delta: u64,
    /// Compressed with LZ4.
    pub lz4: u64,
    /// Compressed with Zstandard.
    pub zstd: u64,
    /// Compressed with zlib.
    pub zlib: u64,
    /// Of those sent as they are: looked random.
    pub random: u64,
    /// Of those sent as they are: were compressed and had not shrunk.
    pub grown: u64,
}

impl PageCounts {
    /// Pages with content.
    #[must_use]
    pub fn content(&self) -> u64 {
        self.raw + self.delta + self.lz4 + self.zstd + self.zlib
    }

    /// Adds other pages.
    pub fn add(&mut self, other: &Self) {
        self.zero += other.zero;
        self.raw += other.raw;
        self.delta += other.delta;
        self.lz4 += other.lz4;
        self.zstd += other.zstd;
        self.zlib += other.zlib;
        self.random += other.random;
        self.grown += other.grown;
    }

    pub(crate) fn add_frame(&mut self, counts: &FrameCounts, method: Option<Method>) {
        self.zero += counts.zero_pages;
        self.raw += counts.raw_pages;
        self.delta += counts.delta_pages;
        self.random += counts.random_pages;
        self.grown += counts.grown_pages;
        if let Some(method) = method {
            *match method.algorithm() {
                Algorithm::Lz4 => &mut self.lz4,
                Algorithm::Zstd => &mut self.zstd,
                Algorithm::Zlib => &mut self.zlib,
            } += counts.packed_pages;
        }
    }
}

/// Frames by why they are encoded as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FrameReasons {
    /// The user has said how.
    pub fixed: u64,
    /// That way moves the most pages, by what was measured.
    pub best: u64,
    /// The channel was waiting, and the frame was sooner there in that way.
    pub waiting: u64,
    /// To measure another way.
    pub trial: u64,
}

impl FrameReasons {
    /// Adds other frames.
    pub fn add(&mut self, other: &Self) {
        self.fixed += other.fixed;
        self.best += other.best;
        self.waiting += other.waiting;
        self.trial += other.trial;
    }
}

/// One pre-copy round, or the last one with the guest paused.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RoundStats {
    /// Number, from 1.
    pub round: u32,
    /// Pages that the round had to send: populated ones in the first, dirty ones later.
    pub pages: u64,
    /// Pages of these that were all zero and travelled as a mark.
    pub zero_pages: u64,
    /// Pages of these that were not sent, as the guest had hinted that they are free.
    pub free_pages: u64,
    /// All pages by how they travelled.
    pub encoded: PageCounts,
    /// Frames by why they are encoded as they are.
    pub frames: FrameReasons,
    /// Bytes on the data channels, frames and marks included, before TLS.
    pub bytes: u64,
    /// From the start of the round until the destination had placed everything, in milliseconds.
    pub ms: f64,
    /// The harvest that gave these pages (of which dirty-log calls are all), in milliseconds.
    pub harvest_ms: f64,
    /// The harvest's share of its own time and the round's together, in per cent.
    pub harvest_percent: f64,
    /// Protecting pages again just before they were read, over all lanes together, in milliseconds: part
    /// of `ms`. Only a log that does so has any.
    pub rearm_ms: f64,
    /// The dirty log that these pages are from.
    pub dirty_log: &'static str,
    /// For how long its devices, and it may be the guest, waited for it, in milliseconds: 0 unless
    /// devices write memory that no log sees otherwise.
    pub harvest_pause_ms: f64,
    /// What the guest wrote before this round, in pages per second; 0 for the first.
    pub dirty_pages_per_s: f64,
    /// Bytes of pages with content over the round's time, in bytes per second.
    pub bytes_per_s: f64,
    /// What the vCPUs lost of their time in this round, in per cent.
    pub throttle_percent: u8,
    /// Whether the guest was paused.
    pub paused: bool,
    /// Whether a channel was lost and made again meanwhile.
    pub interrupted: bool,
}

/// Where the downtime went, in milliseconds of the source's clock.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DowntimeStats {
    /// From the guest's last instruction until every vCPU and device was quiet.
    pub pause_ms: f64,
    /// The last harvest.
    pub harvest_ms: f64,
    /// Saving the state of vCPUs and devices, while the last round was being sent.
    pub save_ms: f64,
    /// From the last harvest until everything had left this host: pages, state, digest.
    pub send_ms: f64,
    /// From there until READY: the destination places, loads and compares.
    pub ready_ms: f64,
    /// Writing COMMIT, and from there until RUNNING has come back.
    pub commit_ms: f64,
}

/// Statistics of one migration, as seen by the source.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SourceStats {
    /// Every round in order, the paused one last.
    pub rounds: Vec<RoundStats>,
    /// From the start of the dirty log to RUNNING (or to the failure), without `verify_ms`.
    pub total_ms: f64,
    /// From the moment that the guest stood still until RUNNING came back, without `verify_ms`: an
    /// upper bound of what the guest missed, by half a round trip. 0 if the guest was never paused.
    pub downtime_ms: f64,
    /// All pauses for harvests before that, together, in milliseconds.
    pub harvest_pauses_ms: f64,
    /// What was predicted when the guest was paused.
    pub predicted_downtime_ms: f64,
    /// The parts of the downtime.
    pub downtime: DowntimeStats,
    /// Bytes on the data channels and the size of the state.
    pub sent_bytes: u64,
    /// The guest's memory, populated or not.
    pub memory_bytes: u64,
    /// Size of the state of vCPUs and devices.
    pub state_bytes: u64,
    /// The digests of what was sent and of what was placed agree; absent before READY.
    pub digest_match: Option<bool>,
    /// Both paused memories, hashed whole, agree; absent unless asked for.
    pub verify_match: Option<bool>,
    /// Time that `--verify` kept the guest paused on top, in milliseconds.
    pub verify_ms: f64,
    /// CPU seconds of the engine's threads, not of the guest's vCPUs.
    pub engine_cpu_s: f64,
    /// Of these, the migration thread's: the conductor of the rounds, and finding the pages of each frame.
    pub planning_cpu_s: f64,
    /// What was to be done with pages that are not zero: `auto`, `none`, `delta` or a method.
    pub compression: String,
    /// Pages of all rounds by how they travelled.
    pub encoded: PageCounts,
    /// Pages of all rounds that were not sent, as the guest had hinted that they are free.
    pub free_pages: u64,
    /// Bytes of all pages with content, over the bytes that travelled.
    pub compression_ratio: f64,
    /// Which dirty log was used.
    pub dirty_log: String,
    /// Number of data channels.
    pub channels: u8,
    /// How the link is made, such as `tls 127.0.0.1:7001`.
    pub transport: String,
    /// The version of the protocol that both sides spoke.
    pub protocol: u16,
    /// What the destination is, if it has said so: since version 2 of the protocol.
    pub destination: Option<Release>,
    /// Fields of a newer release in what the destination said, that were left out.
    pub unknown_fields: u64,
    /// Round trip on the control channel, in milliseconds.
    pub round_trip_ms: f64,
    /// How often a lost channel was made again.
    pub reconnections: u32,
    /// Bytes of frames that were sent again for it. Part of neither `sent_bytes` nor a round's bytes.
    pub resent_bytes: u64,
    /// For how long at least one channel was missing, in milliseconds.
    pub link_down_ms: f64,
    /// How often the guest was paused and ran on here, as the link was lost before everything had arrived.
    pub recalls: u32,
    /// For how long it stood still then, in milliseconds: not part of `downtime_ms`.
    pub recalled_pause_ms: f64,
}

/// Statistics of one migration, as seen by the destination.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DestinationStats {
    /// Frames placed.
    pub frames: u64,
    /// Pages placed with content.
    pub content_pages: u64,
    /// Pages announced as zero.
    pub zero_pages: u64,
    /// Bytes read from the data channels.
    pub received_bytes: u64,
    /// Loading the state of vCPUs and devices, in milliseconds.
    pub load_ms: f64,
    /// From COMMIT to the guest's first instruction, the journal included, in milliseconds.
    pub start_ms: f64,
    /// CPU seconds of the engine's threads, not of the guest's vCPUs.
    pub engine_cpu_s: f64,
    /// The version of the protocol that both sides spoke.
    pub protocol: u16,
    /// What the source is, if it has said so: since version 2 of the protocol.
    pub source: Option<Release>,
    /// Fields of a newer release in what the source said, that were left out.
    pub unknown_fields: u64,
}
