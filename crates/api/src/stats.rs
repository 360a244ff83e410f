//! Statistics of a migration.

use serde::{Deserialize, Serialize};

use crate::release::Release;
use crate::sparse::Recorded;

/// Declares each statistics struct in two forms: one that the engine fills, and one that is read
/// from a record and whose numbers may all be missing.
macro_rules! statistics {
    ($(
        $(#[$about:meta])*
        pub struct $name:ident / $recorded:ident {
            $($(#[$member_about:meta])* pub $member:ident: $kind:ty,)*
        }
    )*) => {$(
        $(#[$about])*
        #[derive(Clone, Debug, Default, PartialEq, Serialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub struct $name {
            $($(#[$member_about])* pub $member: $kind,)*
        }

        $(#[$about])*
        ///
        /// The form that is read from a record: missing values are `None`.
        #[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
        #[serde(default)]
        pub struct $recorded {
            $($(#[$member_about])* pub $member: <$kind as Recorded>::Sparse,)*
        }

        impl Recorded for $name {
            type Sparse = $recorded;

            fn sparse(self) -> $recorded {
                $recorded { $($member: self.$member.sparse(),)* }
            }
        }
    )*};
}

statistics! {
    /// Pages by how they were sent.
    pub struct PageCounts / RecordedPages {
        /// All-zero pages, sent as a marker.
        pub zero: u64,
        /// Uncompressed.
        pub raw: u64,
        /// As a delta against the last version sent.
        pub delta: u64,
        /// Compressed with LZ4.
        pub lz4: u64,
        /// Compressed with Zstandard.
        pub zstd: u64,
        /// Compressed with zlib.
        pub zlib: u64,
        /// Uncompressed pages that looked random.
        pub random: u64,
        /// Uncompressed pages whose compressed form was not smaller.
        pub grown: u64,
    }

    /// Frames by the reason for their encoding.
    pub struct FrameReasons / RecordedReasons {
        /// The user fixed the encoding.
        pub fixed: u64,
        /// Measurements say that this encoding moves the most pages.
        pub best: u64,
        /// The channel was idle, and this encoding delivered the frame sooner.
        pub waiting: u64,
        /// To measure a different encoding.
        pub trial: u64,
    }

    /// One pre-copy round, or the last round with the guest paused.
    pub struct RoundStats / RecordedRound {
        /// Round number, from 1.
        pub round: u32,
        /// Pages the round had to send: populated pages in the first round, dirty pages later.
        pub pages: u64,
        /// Of these, pages that were all zero and were sent as a marker.
        pub zero_pages: u64,
        /// Of these, pages that were not sent because the guest had hinted that they are free.
        pub free_pages: u64,
        /// All pages by how they were sent.
        pub encoded: PageCounts,
        /// Frames by the reason for their encoding.
        pub frames: FrameReasons,
        /// Bytes on the data channels, including frame headers and markers, before TLS.
        pub bytes: u64,
        /// From the start of the round until the destination had placed everything, in
        /// milliseconds.
        pub ms: f64,
        /// Duration of the harvest that found these pages (all of it dirty-log calls), in
        /// milliseconds.
        pub harvest_ms: f64,
        /// The harvest's share of the time of harvest and round together, in percent.
        pub harvest_percent: f64,
        /// Time for write-protecting pages again just before they were read, summed over all lanes,
        /// in milliseconds. It is part of `ms`, and 0 for logs that do not do this.
        pub rearm_ms: f64,
        /// The dirty log that found these pages.
        pub dirty_log: String,
        /// Time the harvest waited for devices, in milliseconds. The guest may have been paused
        /// meanwhile. 0 unless devices write memory in a way that no dirty log records.
        pub harvest_pause_ms: f64,
        /// The rate at which the guest dirtied pages before this round, in pages per second; 0 for
        /// the first.
        pub dirty_pages_per_s: f64,
        /// Bytes of pages with content divided by the round's time, in bytes per second.
        pub bytes_per_s: f64,
        /// CPU time taken from the vCPUs by throttling in this round, in percent.
        pub throttle_percent: u8,
        /// Whether the guest was paused.
        pub paused: bool,
        /// Whether a channel was lost and reestablished during the round.
        pub interrupted: bool,
    }

    /// The parts of the downtime, in milliseconds of the source's clock.
    pub struct DowntimeStats / RecordedDowntime {
        /// From the guest's last instruction until every vCPU and device was quiesced.
        pub pause_ms: f64,
        /// The last harvest.
        pub harvest_ms: f64,
        /// Saving the vCPU and device state while the last round was being sent.
        pub save_ms: f64,
        /// Time beyond that for reading a sample of the guest's storage, for a destination that
        /// does not know whether its storage is the same.
        pub storage_ms: f64,
        /// From the last harvest until pages, state and digest were all sent.
        pub send_ms: f64,
        /// From then until READY: the destination places, loads and compares.
        pub ready_ms: f64,
        /// From writing COMMIT until RUNNING or FETCHING was received.
        pub commit_ms: f64,
    }

    /// Statistics of one migration, as seen by the source.
    pub struct SourceStats / RecordedSource {
        /// Every round in order, the paused one last.
        pub rounds: Vec<RoundStats>,
        /// From the start of the dirty log to RUNNING or to the failure, without `verify_ms`.
        pub total_ms: f64,
        /// From the pause of the guest until RUNNING was received, or FETCHING with post-copy,
        /// without `verify_ms`. This is an upper bound of the guest's downtime, by half a round
        /// trip. 0 if the guest was never paused.
        pub downtime_ms: f64,
        /// All earlier pauses for harvests together, in milliseconds.
        pub harvest_pauses_ms: f64,
        /// The downtime predicted when the guest was paused.
        pub predicted_downtime_ms: f64,
        /// The parts of the downtime.
        pub downtime: DowntimeStats,
        /// Bytes on the data channels plus the size of the state.
        pub sent_bytes: u64,
        /// Size of the guest's memory, including pages that are not populated.
        pub memory_bytes: u64,
        /// Size of the vCPU and device state.
        pub state_bytes: u64,
        /// Whether the digests of the sent and the placed pages agree; absent before READY.
        pub digest_match: Option<bool>,
        /// Whether the hashes of both paused memories agree; absent unless requested.
        pub verify_match: Option<bool>,
        /// Additional pause for `--verify`, in milliseconds.
        pub verify_ms: f64,
        /// CPU seconds of the engine's threads, not of the guest's vCPUs.
        pub engine_cpu_s: f64,
        /// CPU seconds of the migration thread, which conducts the rounds and finds the pages of
        /// each frame. Part of `engine_cpu_s`.
        pub planning_cpu_s: f64,
        /// The chosen encoding of nonzero pages: `auto`, `none`, `delta` or a method.
        pub compression: String,
        /// Pages of all rounds by how they were sent.
        pub encoded: PageCounts,
        /// Pages of all rounds that were not sent because the guest had hinted that they are free.
        pub free_pages: u64,
        /// Bytes of all pages with content, divided by the bytes sent for them.
        pub compression_ratio: f64,
        /// The dirty log that was used.
        pub dirty_log: String,
        /// Number of data channels.
        pub channels: u8,
        /// The kind of link, such as `tls 127.0.0.1:7001`.
        pub transport: String,
        /// The negotiated protocol version.
        pub protocol: u16,
        /// The destination's release, if it announced one (protocol version 2 and later).
        pub destination: Option<Release>,
        /// Unknown fields in the destination's messages that were ignored. A newer release sends
        /// them.
        pub unknown_fields: u64,
        /// Round trip on the control channel, in milliseconds.
        pub round_trip_ms: f64,
        /// Number of times a lost channel was reestablished.
        pub reconnections: u32,
        /// Bytes of frames that were sent again after a reconnection. Not part of `sent_bytes` or
        /// of a round's bytes.
        pub resent_bytes: u64,
        /// Time during which at least one channel was missing, in milliseconds.
        pub link_down_ms: f64,
        /// Number of times the guest was paused and then resumed here because the link was lost
        /// before everything had arrived.
        pub recalls: u32,
        /// Time the guest was paused by these recalls, in milliseconds. Not part of `downtime_ms`.
        pub recalled_pause_ms: f64,
        /// Pages that the destination lacked when the guest started there, with post-copy.
        pub missing_pages: u64,
        /// Time during which the destination fetched these pages from here, in milliseconds.
        pub serving_ms: f64,
    }

    /// Pages that the guest lacked when it started at the destination with post-copy, and how they
    /// arrived.
    pub struct FetchStats / RecordedFetch {
        /// Pages that were missing when the guest started.
        pub missing_pages: u64,
        /// Pages that arrived while a thread of the guest waited for them.
        pub fault_pages: u64,
        /// Pages that arrived before any thread touched them.
        pub background_pages: u64,
        /// Pages that arrived although they were there already.
        pub again_pages: u64,
        /// Faults of the guest's threads, including those at pages that were never populated.
        pub faults: u64,
        /// Faults at pages that were never populated at the source, which are zero.
        pub zero_faults: u64,
        /// From the start of the guest until the last missing page had arrived, or until now, in
        /// milliseconds.
        pub fetch_ms: f64,
        /// All waits for missing pages together, in milliseconds. Threads wait at the same time.
        pub waited_ms: f64,
        /// The mean wait for a page, in microseconds, from the request to the placement.
        pub wait_mean_us: f64,
        /// The median wait in microseconds.
        pub wait_p50_us: u64,
        /// The wait in microseconds that 99 % of all waits did not exceed.
        pub wait_p99_us: u64,
        /// The longest wait in microseconds.
        pub wait_max_us: u64,
        /// Number of times a lost channel was reestablished while the guest ran.
        pub reconnections: u32,
        /// Time during which at least one channel was missing, in milliseconds.
        pub link_down_ms: f64,
    }

    /// Statistics of one migration, as seen by the destination.
    pub struct DestinationStats / RecordedDestination {
        /// Frames placed.
        pub frames: u64,
        /// Pages placed with content.
        pub content_pages: u64,
        /// Pages marked as zero.
        pub zero_pages: u64,
        /// Bytes read from the data channels.
        pub received_bytes: u64,
        /// Duration of loading the vCPU and device state, in milliseconds.
        pub load_ms: f64,
        /// Time beyond that for comparing a sample of the guest's storage, in milliseconds; 0 if
        /// none was needed.
        pub storage_ms: f64,
        /// From COMMIT to the guest's first instruction, including the journal, in milliseconds.
        pub start_ms: f64,
        /// Pages that were fetched while the guest ran; absent without post-copy.
        pub fetch: Option<FetchStats>,
        /// CPU seconds of the engine's threads, not of the guest's vCPUs.
        pub engine_cpu_s: f64,
        /// The negotiated protocol version.
        pub protocol: u16,
        /// The source's release, if it announced one (protocol version 2 and later).
        pub source: Option<Release>,
        /// Unknown fields in the source's messages that were ignored. A newer release sends them.
        pub unknown_fields: u64,
    }
}

impl Copy for PageCounts {}

impl Eq for PageCounts {}

impl Copy for FrameReasons {}

impl Eq for FrameReasons {}

impl PageCounts {
    /// Pages with content.
    #[must_use]
    pub fn content(&self) -> u64 {
        self.raw + self.delta + self.lz4 + self.zstd + self.zlib
    }

    /// Adds `other` to these counts.
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
}

impl FrameReasons {
    /// Adds `other` to these counts.
    pub fn add(&mut self, other: &Self) {
        self.fixed += other.fixed;
        self.best += other.best;
        self.waiting += other.waiting;
        self.trial += other.trial;
    }
}
