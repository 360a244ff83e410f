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
    /// The number of the first fetch lane, if there may be fetch lanes.
    pub first_fetch_lane: Option<u8>,
    /// The channels of fetch lanes, by the time and number of each.
    fetch_channels: BTreeMap<(u64, u32), FetchChannel>,
}

/// A channel of a fetch lane.
#[derive(Debug)]
pub struct FetchChannel {
    lane: u8,
    /// Frames that the source has sent.
    pub answers: u64,
    /// Requests that the destination has sent, if they were read to the end.
    pub requests: Option<u64>,
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

    /// The session of a channel on which a source asks about it.
    pub fn of_question(&mut self, header: &RecordingHeader, id: SessionId) -> &mut Session {
        let known = |session: &Session| session.id == Some(id) && session.side == header.side;
        if let Some(index) = self.all.iter().position(known) {
            let connection = self.connection(header);
            self.by_connection.insert(connection, index);
        }
        let session = self.of_connection(header);
        session.id = Some(id);
        session
    }

    /// Associates a fetch lane's channel with the session of this token.
    pub fn join_fetch_channel(&mut self, header: &RecordingHeader, token: Token, lane: u8) {
        if let Some(&index) = self.by_token.get(&(side(header), token.0)) {
            let connection = self.connection(header);
            self.by_connection.insert(connection, index);
            let channel = FetchChannel { lane, answers: 0, requests: None };
            self.all[index].fetch_channels.insert((header.at, header.connection), channel);
        }
    }

    /// The session of a channel that was read before in the other direction.
    pub fn known(&self, header: &RecordingHeader) -> Option<&Session> {
        self.by_connection.get(&self.connection(header)).map(|index| &self.all[*index])
    }

    /// A fetch lane's channel that was read before in the other direction.
    pub fn fetch_channel(&mut self, header: &RecordingHeader) -> Option<&mut FetchChannel> {
        let index = *self.by_connection.get(&self.connection(header))?;
        self.all[index].fetch_channels.get_mut(&(header.at, header.connection))
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
                first_fetch_lane: None,
                fetch_channels: BTreeMap::new(),
            });
        }
        &mut self.all[index]
    }

    pub fn disagreements(&self) -> Vec<String> {
        self.all.iter().flat_map(Session::disagreements).collect()
    }
}

impl Session {
    /// Whether this is the number of a fetch lane, and not of a data lane.
    pub fn is_fetch_lane(&self, lane: u8) -> bool {
        self.first_fetch_lane.is_some_and(|first| lane >= first)
    }

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
        for FetchChannel { lane, answers, requests } in self.fetch_channels.values() {
            if let Some(requests) = requests.filter(|requests| requests < answers) {
                report(format!("lane {lane} has {answers} answers to {requests} requests"));
            }
        }
        found
    }
}

fn side(header: &RecordingHeader) -> u8 {
    u8::from(header.side == RecordingSide::Destination)
}
