//! Compares the files of a session with each other.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use vmferry_memory::SlotLayout;
use vmferry_transport::{RecordingHeader, RecordingSide};
use vmferry_wire::{SessionId, Token};

/// A session as recorded by one side.
#[derive(Debug)]
pub struct Session {
    /// The number of the session among all sessions.
    pub number: u32,
    /// The side that recorded it.
    side: RecordingSide,
    pub id: Option<SessionId>,
    /// The memory layout of the guest, and the number of lanes.
    pub announced: Option<(Vec<SlotLayout>, u8)>,
    /// The last frame of each lane, from the last FINAL that was not withdrawn.
    pub last: Option<Vec<u64>>,
    pub lanes: BTreeMap<u8, Lane>,
}

/// A lane of a session.
#[derive(Debug, Default)]
pub struct Lane {
    /// The highest sequence number that was read completely.
    pub highest: u64,
    /// The round of that frame.
    pub round: u32,
    /// The highest sequence number that the destination reported as placed.
    pub placed: u64,
    /// Whether a file of the lane was read, and whether the last file was whole.
    pub read: bool,
    pub whole: bool,
    /// Whether frames are missing or broken, so that parts of the VMM's stream are unknown.
    pub gap: bool,
    /// The offset of the next piece in the stream, if there is no gap.
    pub stream_offset: u64,
}

/// Identifies a channel. Each recorder counts its channels from 0, so number and side are not
/// unique. Both directions of a channel have the same time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Connection {
    directory: PathBuf,
    side: u8,
    number: u32,
    at: u64,
}

/// The sessions of all files.
#[derive(Debug, Default)]
pub struct Sessions {
    /// The directory of the current file.
    directory: PathBuf,
    all: Vec<Session>,
    by_connection: HashMap<Connection, usize>,
    by_token: HashMap<(u8, [u8; 16]), usize>,
}

impl Sessions {
    /// Starts a file.
    pub fn read_from(&mut self, path: &str) {
        self.directory = Path::new(path).parent().unwrap_or(Path::new("")).to_owned();
    }

    /// The session of a control channel.
    pub fn of_connection(&mut self, header: &RecordingHeader) -> &mut Session {
        let connection = self.connection(header);
        let next = self.all.len();
        let index = *self.by_connection.entry(connection).or_insert(next);
        self.get(index, header.side)
    }

    /// The session of a token.
    pub fn of_token(&mut self, header: &RecordingHeader, token: Token) -> &mut Session {
        let next = self.all.len();
        let index = *self.by_token.entry((side(header), token.0)).or_insert(next);
        self.get(index, header.side)
    }

    /// Associates a control channel with the session of this token.
    pub fn join(&mut self, header: &RecordingHeader, token: Token) {
        let connection = self.connection(header);
        let token = (side(header), token.0);
        match (self.by_connection.get(&connection), self.by_token.get(&token)) {
            (Some(&index), _) => {
                self.by_token.insert(token, index);
            }
            (None, Some(&index)) => {
                self.by_connection.insert(connection, index);
            }
            (None, None) => {
                self.of_connection(header);
                self.join(header, Token(token.1));
            }
        }
    }

    fn connection(&self, header: &RecordingHeader) -> Connection {
        Connection {
            directory: self.directory.clone(),
            side: side(header),
            number: header.connection,
            at: header.at,
        }
    }

    fn get(&mut self, index: usize, side: RecordingSide) -> &mut Session {
        if index == self.all.len() {
            self.all.push(Session {
                number: index as u32,
                side,
                id: None,
                announced: None,
                last: None,
                lanes: BTreeMap::new(),
            });
        }
        &mut self.all[index]
    }

    pub fn disagreements(&self) -> Vec<String> {
        self.all.iter().flat_map(Session::disagreements).collect()
    }
}

impl Session {
    fn disagreements(&self) -> Vec<String> {
        let side = match self.side {
            RecordingSide::Source => "source",
            RecordingSide::Destination => "destination",
        };
        let name = self.id.map_or_else(|| "a session".to_owned(), |id| format!("session {id}"));
        let mut found = Vec::new();
        let mut report =
            |text: String| found.push(format!("{name}, recorded by the {side}: {text}"));
        for (number, lane) in &self.lanes {
            // A lane whose recording is cut off may have had more frames.
            let complete = lane.read && lane.whole;
            if complete && lane.placed > lane.highest {
                report(format!(
                    "PLACED names frame {} of lane {number}, but its last frame is {}",
                    lane.placed, lane.highest
                ));
            }
            let last = self.last.as_ref().and_then(|last| last.get(usize::from(*number)));
            if let Some(last) = last.filter(|last| complete && **last != lane.highest) {
                report(format!(
                    "FINAL names {last} as the last frame of lane {number}, but that is {}",
                    lane.highest
                ));
            }
        }
        found
    }
}

fn side(header: &RecordingHeader) -> u8 {
    u8::from(header.side == RecordingSide::Destination)
}
