//! Recordings of channels: what each direction carried, above encryption, for `vmferry inspect`.
//!
//! A recorder makes a file for each direction of each channel. A file is a [`RecordingHeader`] and then the bytes as
//! they were read or written; which channel it is, of which session, stands in the greeting that they begin with.
//! **Guest memory stands in them, and the session's token**: the directory has mode 0700, and the files 0600.
//!
//! Recording never changes what a channel does: a disk that is full, or the limit, ends the recording and is told of.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, IoSlice, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::TransportError;
use crate::transport::{Close, Receive, Transmit, Transport};

/// The first bytes of a recording.
pub const RECORDING_MAGIC: [u8; 8] = *b"VMFTRACE";
/// Length of the header in bytes.
pub const RECORDING_HEADER_BYTES: usize = 24;
/// The version of the format that this release writes and reads.
const VERSION: u16 = 1;

/// Which side of a migration has recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordingSide {
    /// The host that the guest leaves.
    Source,
    /// The host that it goes to.
    Destination,
}

/// Which way the bytes went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the source to the destination.
    ToDestination,
    /// From the destination to the source.
    ToSource,
}

/// What a recording begins with, little-endian.
///
/// ```text
///  0       8         10     11          12           16                   24
///  +-------+---------+------+-----------+------------+--------------------+
///  | magic | version | side | direction | connection | seconds since 1970 |
///  +-------+---------+------+-----------+------------+--------------------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordingHeader {
    /// Who has recorded.
    pub side: RecordingSide,
    /// Which way the bytes went.
    pub direction: Direction,
    /// The channel's number on that side: both directions have the same, later channels higher ones.
    pub connection: u32,
    /// When the channel was made, in seconds since 1970.
    pub at: u64,
}

impl RecordingHeader {
    /// As bytes.
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

    /// From bytes.
    ///
    /// # Errors
    /// What is wrong with them, in words.
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
            other => return Err(format!("side {other}, where there are 1 and 2")),
        };
        let direction = match rest[3] {
            1 => Direction::ToDestination,
            2 => Direction::ToSource,
            other => return Err(format!("direction {other}, where there are 1 and 2")),
        };
        let (mut connection, mut at) = ([0; 4], [0; 8]);
        connection.copy_from_slice(&rest[4..8]);
        at.copy_from_slice(&rest[8..16]);
        let (connection, at) = (u32::from_le_bytes(connection), u64::from_le_bytes(at));
        Ok(Self { side, direction, connection, at })
    }
}

/// Whoever is told, in a line, that the recording has ended and why.
type Teller = Box<dyn Fn(&str) + Send + Sync>;

/// Records the channels of one side. Clones are the same recorder.
#[derive(Clone)]
pub struct Recorder(Arc<Shared>);

struct Shared {
    directory: PathBuf,
    side: RecordingSide,
    limit: u64,
    /// Bytes that may still be written.
    left: AtomicU64,
    ended: AtomicBool,
    connections: AtomicU32,
    teller: Mutex<Option<Teller>>,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("directory", &self.0.directory).finish_non_exhaustive()
    }
}

impl Recorder {
    /// Records into `directory`, which is made if it is missing, at most `limit` bytes in all files together.
    ///
    /// # Errors
    /// [`TransportError::File`] if the directory can't be made, or others may look into it.
    pub fn new(directory: &Path, side: RecordingSide, limit: u64) -> Result<Self, TransportError> {
        let problem =
            |problem: String| TransportError::File { path: directory.to_owned(), problem };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .and_then(|()| std::fs::metadata(directory))
            .map_err(|error| problem(format!("can't be made: {error}")))
            .and_then(|found| {
                let open = found.mode() & 0o077 != 0;
                let text = "is open to others, and guest memory would stand in it: chmod 700";
                if open { Err(problem(text.into())) } else { Ok(()) }
            })?;
        Ok(Self(Arc::new(Shared {
            directory: directory.to_owned(),
            side,
            limit,
            left: AtomicU64::new(limit),
            ended: AtomicBool::new(false),
            connections: AtomicU32::new(0),
            teller: Mutex::default(),
        })))
    }

    /// Tells `teller` in a line if the recording ends before the channels do. It must not wait.
    pub fn tell(&self, teller: impl Fn(&str) + Send + Sync + 'static) {
        *self.0.teller.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(teller));
    }

    /// A transport whose bytes are recorded on their way.
    pub(crate) fn wrap(&self, inner: Box<dyn Transport>) -> Recorded {
        let shared = &self.0;
        let at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let tracks = shared.open(at).unwrap_or_else(|error| {
            shared.end(&format!("can't make a file: {error}"));
            [Track::off(shared), Track::off(shared)]
        });
        Recorded { inner, tracks }
    }
}

impl Shared {
    /// The files of the next channel: to the destination, and to the source.
    fn open(self: &Arc<Self>, at: u64) -> io::Result<[Track; 2]> {
        loop {
            let connection = self.connections.fetch_add(1, Ordering::Relaxed);
            let make = |direction| -> io::Result<Track> {
                let name = match direction {
                    Direction::ToDestination => "to-destination",
                    Direction::ToSource => "to-source",
                };
                let path = self.directory.join(format!("{connection:04}-{name}.vmftrace"));
                let mut options = OpenOptions::new();
                let file = options.write(true).create_new(true).mode(0o600).open(path)?;
                let mut track = Track { file: Some(file), shared: Arc::clone(self) };
                let header = RecordingHeader { side: self.side, direction, connection, at };
                track.record(&header.encode());
                Ok(track)
            };
            match make(Direction::ToDestination) {
                // An earlier recording is never written over.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                first => return Ok([first?, make(Direction::ToSource)?]),
            }
        }
    }

    /// Ends the recording of all channels, and says why, once.
    fn end(&self, why: &str) {
        if self.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Some(teller) = &*self.teller.lock().unwrap_or_else(PoisonError::into_inner) {
            teller(&format!("recording to {} has ended: {why}", self.directory.display()));
        }
    }
}

/// One direction's file.
struct Track {
    file: Option<File>,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Track {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Track").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Track {
    fn off(shared: &Arc<Shared>) -> Self {
        Self { file: None, shared: Arc::clone(shared) }
    }

    fn record(&mut self, bytes: &[u8]) {
        if self.shared.ended.load(Ordering::Relaxed) {
            self.file = None;
        }
        let Some(file) = &mut self.file else { return };
        let take = |left: u64| left.checked_sub(bytes.len() as u64);
        if self.shared.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
            self.file = None;
            let limit = self.shared.limit;
            self.shared.end(&format!("its limit of {limit} bytes is reached (--record-limit)"));
        } else if let Err(error) = file.write_all(bytes) {
            self.file = None;
            self.shared.end(&error.to_string());
        }
    }
}

/// A transport that is recorded.
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
        let (received, sent) = match to_destination.shared.side {
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

/// Neither has a descriptor nor anything to show in place: all bytes pass through here.
#[derive(Debug)]
struct RecordedReceive {
    inner: Box<dyn Receive>,
    track: Track,
}

impl Read for RecordedReceive {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(into)?;
        self.track.record(&into[..read]);
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
        self.track.record(&from[..written]);
        Ok(written)
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let written = self.inner.write_vectored(from)?;
        let mut left = written;
        for slice in from {
            let taken = left.min(slice.len());
            self.track.record(&slice[..taken]);
            left -= taken;
        }
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
