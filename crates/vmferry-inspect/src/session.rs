//! What the files of a session say of each other.

use std::collections::{BTreeMap, HashMap};

use vmferry_codec::StreamDecoder;
use vmferry_memory::SlotLayout;
use vmferry_transport::{RecordingHeader, RecordingSide};
use vmferry_wire::{SessionId, Token};

use super::pages::SeenPages;

/// A session, as one side has recorded it.
#[derive(Debug)]
pub struct Session {
    /// Who has recorded it, for people.
    side: RecordingSide,
    pub id: Option<SessionId>,
    /// The announced guest's memory, and the number of data channels.
    pub announced: Option<(Vec<SlotLayout>, u8)>,
    /// The last frame of each lane, by the last FINAL that was not withdrawn.
    pub last: Option<Vec<u64>>,
    pub lanes: BTreeMap<u8, Lane>,
    pub pages: SeenPages,
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
    /// A VMM's own stream.
    pub stream: Option<StreamDecoder>,
}

/// All sessions of the files.
#[derive(Debug)]
pub struct Sessions {
    page_bytes: u64,
    all: Vec<Session>,
    by_connection: HashMap<(u8, u32), usize>,
    by_token: HashMap<(u8, [u8; 16]), usize>,
}

impl Sessions {
    pub fn new(page_bytes: u64) -> Self {
        let (by_connection, by_token) = (HashMap::new(), HashMap::new());
        Self { page_bytes, all: Vec::new(), by_connection, by_token }
    }

    /// The session of a control channel, by the channel's number.
    pub fn of_connection(&mut self, header: &RecordingHeader) -> &mut Session {
        let key = (side(header), header.connection);
        let next = self.all.len();
        let index = *self.by_connection.entry(key).or_insert(next);
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
        let connection = (side(header), header.connection);
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

    fn get(&mut self, index: usize, side: RecordingSide) -> &mut Session {
        if index == self.all.len() {
            self.all.push(Session {
                side,
                id: None,
                announced: None,
                last: None,
                lanes: BTreeMap::new(),
                pages: SeenPages::new(self.page_bytes),
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
