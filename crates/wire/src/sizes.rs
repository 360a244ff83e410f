//! Lengths that the frame header and its tables share.

/// Maximum payload length: 128 pages with content, twice the usual frame of this release.
pub const MAX_FRAME_PAYLOAD_BYTES: u32 = 512 << 10;

/// Length of an entry in the run table.
pub const RUN_HEADER_BYTES: usize = 24;

/// Length of the segment table's head.
pub const SEGMENT_TABLE_HEAD_BYTES: usize = 16;

/// Length of an entry in the segment table.
pub const SEGMENT_BYTES: usize = 8;
