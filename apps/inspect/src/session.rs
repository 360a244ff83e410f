//! What the files of a session say of each other.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use vmferry_memory::SlotLayout;
use vmferry_transport::{RecordingHeader, RecordingSide};
use vmferry_wire::{SessionId, Token};

/// A session, as one side has recorded it.
#[derive(Debug)]
pub struct Session {
    /// Its number among all.
    pub number: u32,
    /// Who has recorded it, for people.
    side: RecordingSide,
    pub id: Option<SessionId>,
    /// The announced guest's memory, and the number of data channels.
    pub announced: Option<(Vec<SlotLayout>, u8)>,
    /// The last frame of each lane, by the last FINAL that was not withdrawn.
    pub last: Option<Vec<u64>>,
    pub lanes: BTreeMap<u8, Lane>,
}

/// A lane of a session.
#[derive(Debug, Default)]
pub struct Lane {
    /// The highest number of a frame that was read whole.
    pub highest: u64,
    /// The round of that one.
    pub round: u32,
    /// The highest number that the destination has called placed.
    pub placed: u64,
    /// Whether a file of its frames was read, and all of them to the end of the last.
    pub read: bool,
    pub whole: bool,
    /// Frames are missing or broken: what they held of a VMM's own stream is not known.
    pub gap: bool,
    /// Where the next piece of that begins in it, if there is no gap.
    pub stream_offset: u64,
}

/// A channel. Each recorder counts its own from 0, so that neither its number alone nor its side says which it is; both
/// directions were made at the same time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Connection {
    directory: PathBuf,
    side: u8,
    number: u32,
    at: u64,
}

/// All sessions of the files.
#[derive(Debug, Default)]
pub struct Sessions {
    /// Where the file is that is being read.
    directory: PathBuf,
    all: Vec<Session>,
    by_connection: HashMap<Connection, usize>,
    by_token: HashMap<(u8, [u8; 16]), usize>,
}

impl Sessions {
    /// A file begins.
    pub fn read_from(&mut self, path: &str) {
        self.directory = Path::new(path).parent().unwrap_or(Path::new("")).to_owned();
    }

    /// The session of a control channel, by the channel.
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

    /// A control channel is of the session that this token is of.
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
        let mut say = |text: String| found.push(format!("{name}, as the {side} has it: {text}"));
        for (number, lane) in &self.lanes {
            // A lane whose recording is torn may have had more frames.
            let complete = lane.read && lane.whole;
            if complete && lane.placed > lane.highest {
                say(format!(
                    "PLACED says {} of lane {number}, and its last frame is {}",
                    lane.placed, lane.highest
                ));
            }
            let last = self.last.as_ref().and_then(|last| last.get(usize::from(*number)));
            if let Some(last) = last.filter(|last| complete && **last != lane.highest) {
                say(format!(
                    "FINAL says that {last} is the last frame of lane {number}, and that is {}",
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
