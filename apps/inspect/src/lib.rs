//! Prints and checks the files that vmferry writes, record by record: recorded channels
//! ([`vmferry_transport::Recorder`]), journals, and saved states.
//!
//! The input is the bytes of each file. The output is a [`Record`] with an offset for everything
//! that was read, and an [`Outcome`] for each file: whole, cut off at its end, or broken at a
//! certain byte. Nothing is trusted: everything that a destination would check in a frame is
//! checked here, as far as the pages that a delta changes are known. Files of one session are
//! compared with each other ([`Inspector::disagreements`]).
//!
//! Memory is bounded by the argument of [`Inspector::new`], whatever the files contain. A few MiB
//! for the current frame, the longest message (64 MiB, as is a saved state) and the records of a
//! journal are in addition. A recording is read once, from start to end.

#![forbid(unsafe_code)]

mod bytes;
mod control;
mod data;
mod fetch;
mod message;
mod other;
mod pages;
mod piece;
mod record;
mod session;

use std::io::{self, Read};

use vmferry_transport::{Direction, RECORDING_HEADER_BYTES, RECORDING_MAGIC, RecordingHeader};
use vmferry_wire::HELLO_REPLY_BYTES;

use self::bytes::{Bytes, Stop};
use self::pages::SeenPages;
pub use self::record::{Break, End, Kind, Outcome, Record};
use self::session::Sessions;

/// The callback for each record. An error from it stops the reading.
pub type Tell<'a> = dyn FnMut(&Record) -> io::Result<()> + 'a;

/// Bytes at the start of a file that [`kind_of`] and [`turn_of`] need.
pub const HEAD_BYTES: usize = 64;

/// Reads files, and remembers what the files of one session say about each other.
#[derive(Debug)]
pub struct Inspector {
    sessions: Sessions,
    seen: SeenPages,
    /// Whether to report each run of pages.
    runs: bool,
}

impl Inspector {
    /// Makes an inspector that uses at most `page_bytes` bytes of memory for the pages of all
    /// sessions, which it needs to check deltas. With `runs` it also reports each run of pages and
    /// each segment of a piece.
    #[must_use]
    pub fn new(page_bytes: u64, runs: bool) -> Self {
        Self { sessions: Sessions::default(), seen: SeenPages::new(page_bytes), runs }
    }

    /// Reads a file and reports each record. `hint` is the file's path: a journal's name gives its
    /// side, and the channels of one session are in one directory.
    ///
    /// # Errors
    /// The reader or `tell` failed. Errors in the file's content are in the outcome.
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
                    "not a recording, journal or saved state of vmferry: it begins with {}",
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

    /// The contradictions between the files that were read, one per line.
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

/// The kind of a file, from its first bytes. An empty file can be of any kind.
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

/// The sort key for the order of reading, from the first [`HEAD_BYTES`]. The control channel is
/// needed to check frames, and a channel must come before the channel that replaces it.
#[must_use]
pub fn turn_of(head: &[u8]) -> (u8, u32, u8) {
    let Some((head, rest)) = head.split_first_chunk::<RECORDING_HEADER_BYTES>() else {
        return (9, 0, 0);
    };
    let Ok(header) = RecordingHeader::parse(head) else { return (9, 0, 0) };
    let to_source = header.direction == Direction::ToSource;
    // The role in the greeting: 2 is a data channel. The destination's greeting has no role, but
    // only on a fetch lane requests follow.
    let is_data = if to_source {
        rest.get(HELLO_REPLY_BYTES..).is_some_and(fetch::is_request)
    } else {
        rest.get(12) == Some(&2)
    };
    (u8::from(is_data), header.connection, u8::from(to_source))
}
