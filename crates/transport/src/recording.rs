//! Recordings of channels: the plaintext of each direction, for `vmferry inspect`.
//!
//! A recorder writes one file per direction of each channel. A file is a [`RecordingHeader`]
//! followed by the bytes that were read or written. These begin with the greeting, which identifies
//! the channel and the session. **The files contain guest memory and the session's token**, so the
//! directory has mode 0700 and the files have mode 0600.
//!
//! Recording never changes a channel's behavior. A full or slow disk, or the size limit, ends the
//! recording and is reported. No channel waits for the disk, because the guest may be paused
//! meanwhile: a separate [writer] thread does.

mod writer;

use std::fs::DirBuilder;
use std::io::{self, IoSlice, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::error::TransportError;
use crate::transport::{Close, Receive, Transmit, Transport};
pub use writer::finish_recordings;
use writer::{FLUSH_TIMEOUT, Job, Shared};

/// The first bytes of a recording.
pub const RECORDING_MAGIC: [u8; 8] = *b"VMFTRACE";
/// Length of the header in bytes.
pub const RECORDING_HEADER_BYTES: usize = 24;
/// The version of the format that this release writes and reads.
const VERSION: u16 = 1;

/// The side of a migration that made the recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordingSide {
    /// The host that the guest leaves.
    Source,
    /// The host that the guest moves to.
    Destination,
}

/// The direction of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the source to the destination.
    ToDestination,
    /// From the destination to the source.
    ToSource,
}

/// The header of a recording, little-endian.
///
/// ```text
///  0       8         10     11          12           16                   24
///  +-------+---------+------+-----------+------------+--------------------+
///  | magic | version | side | direction | connection | seconds since 1970 |
///  +-------+---------+------+-----------+------------+--------------------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordingHeader {
    /// The side that recorded.
    pub side: RecordingSide,
    /// The direction of the bytes.
    pub direction: Direction,
    /// The channel's number on that side. Both directions have the same number; later channels have
    /// higher ones.
    pub connection: u32,
    /// When the channel was opened, in seconds since 1970.
    pub at: u64,
}

impl RecordingHeader {
    /// Encodes the header.
    #[must_use]
    pub fn encode(&self) -> [u8; RECORDING_HEADER_BYTES] {
        let mut bytes = [0; RECORDING_HEADER_BYTES];
        bytes[..8].copy_from_slice(&RECORDING_MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = if self.side == RecordingSide::Source { 1 } else { 2 };
        bytes[11] = if self.direction == Direction::ToDestination { 1 } else { 2 };
        bytes[12..16].copy_from_slice(&self.connection.to_le_bytes());
        bytes[16..].copy_from_slice(&self.at.to_le_bytes());
        bytes
    }

    /// Parses a header.
    ///
    /// # Errors
    /// The problem in words.
    pub fn parse(bytes: &[u8; RECORDING_HEADER_BYTES]) -> Result<Self, String> {
        let (magic, rest) = bytes.split_at(8);
        if magic != RECORDING_MAGIC {
            return Err(format!("it begins with {} and not with VMFTRACE", magic.escape_ascii()));
        }
        let version = u16::from_le_bytes([rest[0], rest[1]]);
        if version != VERSION {
            return Err(format!("version {version}, and this release reads version {VERSION}"));
        }
        let side = match rest[2] {
            1 => RecordingSide::Source,
            2 => RecordingSide::Destination,
            other => return Err(format!("side {other} is neither 1 nor 2")),
        };
        let direction = match rest[3] {
            1 => Direction::ToDestination,
            2 => Direction::ToSource,
            other => return Err(format!("direction {other} is neither 1 nor 2")),
        };
        let (mut connection, mut at) = ([0; 4], [0; 8]);
        connection.copy_from_slice(&rest[4..8]);
        at.copy_from_slice(&rest[8..16]);
        let (connection, at) = (u32::from_le_bytes(connection), u64::from_le_bytes(at));
        Ok(Self { side, direction, connection, at })
    }
}

/// Records the channels of one side. Clones are the same recorder.
#[derive(Clone)]
pub struct Recorder(Arc<Handle>);

/// Held by the recorder's clones and channels. When the last one is dropped, the writer finishes
/// and exits.
struct Handle(Arc<Shared>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("directory", &self.0.0.directory).finish_non_exhaustive()
    }
}

impl Recorder {
    /// Records into `directory`, which is created if it is missing, at most `limit` bytes in all
    /// files together.
    ///
    /// # Errors
    /// [`TransportError::File`] if the directory cannot be created, or if other users may read it.
    pub fn new(directory: &Path, side: RecordingSide, limit: u64) -> Result<Self, TransportError> {
        let problem =
            |problem: String| TransportError::File { path: directory.to_owned(), problem };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .and_then(|()| std::fs::metadata(directory))
            .map_err(|error| problem(format!("can't be created: {error}")))
            .and_then(|found| {
                let open = found.mode() & 0o077 != 0;
                let text = "is accessible to other users, and the recording contains guest memory: \
                    chmod 700";
                if open { Err(problem(text.into())) } else { Ok(()) }
            })?;
        let shared = Shared::new(directory, side, limit);
        Ok(Self(Arc::new(Handle(Arc::new(shared)))))
    }

    /// Calls `observer` with a line of text if the recording ends before the channels do. The call
    /// must not block.
    pub fn on_end(&self, observer: impl Fn(&str) + Send + Sync + 'static) {
        self.0.0.on_end(Box::new(observer));
    }

    /// Waits until everything recorded so far is written, at most 2 s. After that the recording
    /// ends.
    pub fn flush(&self) {
        self.0.0.flush(Instant::now() + FLUSH_TIMEOUT);
    }

    /// A transport whose bytes are recorded.
    pub(crate) fn wrap(&self, inner: Box<dyn Transport>) -> Recorded {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let first = self.0.0.open(at);
        let track = |second: u64| {
            let number = first.map(|first| first + second);
            Track { number, handle: Arc::clone(&self.0) }
        };
        Recorded { inner, tracks: [track(0), track(1)] }
    }
}

/// One direction of a channel.
struct Track {
    /// The file's number for the writer; `None` if nothing is recorded.
    number: Option<u64>,
    handle: Arc<Handle>,
}

impl std::fmt::Debug for Track {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Track").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Track {
    /// Records `bytes` bytes. Calls `content` only if they are needed. Never waits for a disk.
    fn record(&mut self, bytes: usize, content: impl FnOnce(&mut Vec<u8>)) {
        let Some(track) = self.number.filter(|_| bytes > 0) else { return };
        let shared = &self.handle.0;
        if shared.has_ended() {
            return;
        }
        if shared.reserve(bytes) {
            let mut copy = Vec::with_capacity(bytes);
            content(&mut copy);
            shared.put(Job::Write { track, bytes: copy });
        }
    }
}

impl Drop for Track {
    fn drop(&mut self) {
        if let Some(track) = self.number {
            self.handle.0.put(Job::Close { track });
        }
    }
}

/// A recorded transport.
#[derive(Debug)]
pub(crate) struct Recorded {
    inner: Box<dyn Transport>,
    /// To the destination, and to the source.
    tracks: [Track; 2],
}

impl Transport for Recorded {
    fn closer(&self) -> Arc<dyn Close> {
        self.inner.closer()
    }

    fn split(self: Box<Self>) -> (Box<dyn Receive>, Box<dyn Transmit>) {
        let Self { inner, tracks: [to_destination, to_source] } = *self;
        let (received, sent) = match to_destination.handle.0.side {
            RecordingSide::Source => (to_source, to_destination),
            RecordingSide::Destination => (to_destination, to_source),
        };
        let (receive, transmit) = inner.split();
        (
            Box::new(RecordedReceive { inner: receive, track: received }),
            Box::new(RecordedTransmit { inner: transmit, track: sent }),
        )
    }
}

/// Offers no descriptor and no reading in place, so that all bytes pass through here.
#[derive(Debug)]
struct RecordedReceive {
    inner: Box<dyn Receive>,
    track: Track,
}

impl Read for RecordedReceive {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(into)?;
        self.track.record(read, |copy| copy.extend_from_slice(&into[..read]));
        Ok(read)
    }
}

impl Receive for RecordedReceive {
    fn buffer_bytes(&self) -> usize {
        self.inner.buffer_bytes()
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.inner.set_timeout(timeout)
    }
}

#[derive(Debug)]
struct RecordedTransmit {
    inner: Box<dyn Transmit>,
    track: Track,
}

impl Write for RecordedTransmit {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(from)?;
        self.track.record(written, |copy| copy.extend_from_slice(&from[..written]));
        Ok(written)
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let written = self.inner.write_vectored(from)?;
        self.track.record(written, |copy| {
            for slice in from {
                let left = written - copy.len();
                copy.extend_from_slice(&slice[..left.min(slice.len())]);
            }
        });
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl Transmit for RecordedTransmit {
    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.inner.set_timeout(timeout)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.inner.finish()
    }
}

#[cfg(test)]
#[path = "recording/tests.rs"]
mod tests;
