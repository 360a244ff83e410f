//! Lengths that a frame's header and its tables share.

/// Longest payload: twice the pages of a frame as this release sends it.
pub const MAX_FRAME_PAYLOAD_BYTES: u32 = 512 << 10;

/// Length of an entry of the run table.
pub const RUN_HEADER_BYTES: usize = 24;

/// Length of the table before its first segment.
pub const SEGMENT_TABLE_HEAD_BYTES: usize = 16;

/// Length of a segment in the table.
pub const SEGMENT_BYTES: usize = 8;
