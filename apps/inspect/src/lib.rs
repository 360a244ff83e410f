//! What is in a file that vmferry has written, record by record, and where it is broken: recorded channels
//! ([`vmferry_transport::Recorder`]), journals, and saved states.
//!
//! Goes in: bytes, file by file. Comes out: a [`Record`] for each thing that was read, with its offset, and an [`Outcome`]
//! for each file: whole, cut off at its end, or broken, and then where and how. Nothing is taken on trust: what a
//! destination would check of a frame is checked here, as far as the pages are known that a delta changes. Files of one
//! session are held against each other ([`Inspector::disagreements`]).
//!
//! Memory is bounded by [`Inspector::new`]'s argument, whatever stands in the files, besides a few MiB for the frame that is
//! read, the longest message (64 MiB, as a saved state), and the records of a journal. A recording is read once, from
//! its beginning to its end.

#![forbid(unsafe_code)]

mod bytes;
mod control;
mod data;
mod message;
mod other;
mod pages;
mod piece;
mod record;
mod session;

use std::io::{self, Read};

use vmferry_transport::{Direction, RECORDING_HEADER_BYTES, RECORDING_MAGIC, RecordingHeader};

use self::bytes::{Bytes, Stop};
use self::pages::SeenPages;
pub use self::record::{Break, End, Kind, Outcome, Record};
use self::session::Sessions;

/// Whoever is told of each record. An error of its own ends the reading.
pub type Tell<'a> = dyn FnMut(&Record) -> io::Result<()> + 'a;

/// So much of a file's beginning says what it is, and when its turn is.
pub const HEAD_BYTES: usize = 64;

/// Reads files, and remembers what those of one session say of each other.
#[derive(Debug)]
pub struct Inspector {
    sessions: Sessions,
    seen: SeenPages,
    /// Tell of each run of pages.
    runs: bool,
}

impl Inspector {
    /// One that takes at most so many bytes of memory for what it knows of pages, of all sessions together, to check deltas
    /// with. `runs`: tell of each run of pages and each segment of a piece, and not of each frame only.
    #[must_use]
    pub fn new(page_bytes: u64, runs: bool) -> Self {
        Self { sessions: Sessions::default(), seen: SeenPages::new(page_bytes), runs }
    }

    /// Reads a file and tells of each record. `hint` is the file's path: a journal's name says whose it is, and channels of one
    /// session are in one directory.
    ///
    /// # Errors
    /// The reader's and `tell`'s. What is wrong with the file is in the outcome.
    pub fn file(
        &mut self,
        hint: &str,
        from: impl Read,
        tell: &mut Tell<'_>,
    ) -> io::Result<Outcome> {
        let mut bytes = Bytes::new(from);
        self.sessions.read_from(hint);
        let is_empty = bytes.is_at_end()?;
        let kind = match kind_of(bytes.peek(HEAD_BYTES)?) {
            Kind::Unknown if hint.ends_with(".journal") => Kind::Journal,
            Kind::Unknown if is_empty && hint.ends_with(".vmftrace") => Kind::Recording,
            kind => kind,
        };
        let mut records = 0;
        let mut counted = |record: &Record| {
            records += 1;
            tell(record)
        };
        let read = match kind {
            Kind::Recording => self.recording(&mut bytes, &mut counted),
            Kind::State => other::state(&mut bytes, &mut counted),
            Kind::Journal => other::journal(hint, &mut bytes, &mut counted),
            Kind::Unknown if is_empty => {
                Err(Stop::Cut { offset: 0, what: "an empty file".into(), needed: 1, found: 0 })
            }
            Kind::Unknown => Err(Stop::Broken {
                offset: 0,
                what: "the file".into(),
                problem: format!(
                    "it begins with {}: it is no recording, journal or saved state of vmferry",
                    bytes.peek(8)?.escape_ascii()
                ),
            }),
        };
        let end = match read {
            Ok(()) => End::Whole,
            Err(Stop::Io(error)) => return Err(error),
            Err(Stop::Cut { offset, what, needed, found }) => {
                End::CutOff { offset, record: records + 1, what, needed, found }
            }
            Err(Stop::Broken { offset, what, problem }) => {
                End::Broken(Break { offset, record: records + 1, what, problem })
            }
        };
        Ok(Outcome { kind, records, bytes: bytes.offset(), end })
    }

    /// Where the files that were read contradict each other, each in a line.
    #[must_use]
    pub fn disagreements(&self) -> Vec<String> {
        self.sessions.disagreements()
    }

    fn recording<R: Read>(
        &mut self,
        bytes: &mut Bytes<R>,
        tell: &mut Tell<'_>,
    ) -> Result<(), Stop> {
        let what = "the recording's header";
        let head = bytes.array::<RECORDING_HEADER_BYTES>(what)?;
        let header = RecordingHeader::parse(&head).map_err(|problem| Stop::Broken {
            offset: 0,
            what: what.into(),
            problem,
        })?;
        tell(&message::recording(&header))?;
        match header.direction {
            Direction::ToDestination => self.read_from_source(&header, bytes, tell),
            Direction::ToSource => self.read_from_destination(&header, bytes, tell),
        }
    }
}

/// What a file is, by its first bytes. An empty one may have been to become anything.
#[must_use]
pub fn kind_of(head: &[u8]) -> Kind {
    let begins =
        |magic: &[u8]| !head.is_empty() && magic.starts_with(&head[..head.len().min(magic.len())]);
    let is_line = |head: &[u8]| {
        head.len() > 9 && head[..8].iter().all(u8::is_ascii_hexdigit) && head[8..10] == *b" {"
    };
    if begins(&RECORDING_MAGIC) {
        Kind::Recording
    } else if begins(b"VMFSTATE") {
        Kind::State
    } else if is_line(head) {
        Kind::Journal
    } else {
        Kind::Unknown
    }
}

/// When a file's turn is, by its first [`HEAD_BYTES`]: what the control channel says is needed to check frames, and a
/// channel must not come before the one that it follows. Files are best read in this order.
#[must_use]
pub fn turn_of(head: &[u8]) -> (u8, u32, u8) {
    let Some((head, rest)) = head.split_first_chunk::<RECORDING_HEADER_BYTES>() else {
        return (9, 0, 0);
    };
    let Ok(header) = RecordingHeader::parse(head) else { return (9, 0, 0) };
    let to_source = header.direction == Direction::ToSource;
    // The role in the greeting: 2 is a data channel.
    let is_data = !to_source && rest.get(12) == Some(&2);
    (u8::from(is_data), header.connection, u8::from(to_source))
}
