//! What two daemons say on a link: who opens which stream, and then frames, acknowledgements and
//! signs of life in both directions.
//!
//! ```text
//!  opener                                   acceptor
//!    Hello (role: stream; the stream's token; attempt)  ->
//!    Opening: where to, known or new, frames received   ->
//!         <- Answer: opened, frames received; or refused and why; or to a question
//!    records                                            <->  records
//! ```
//! A record is its kind in one byte, and what belongs to it; a frame is its own record. All numbers
//! are little-endian.

use std::io::{self, Read, Write};

use vmferry_handover::{FinishAnswer, GuestIdentity, SessionId};
use vmferry_wire::{HELLO_BYTES, Hello, Reason, Role, Token, WireError};

use crate::receive::ReceiveRequest;

/// The longest name or path in an opening.
pub const MAX_NAME_BYTES: usize = 256;

/// The longest reason of a refusal or a reset.
pub const MAX_REASON_BYTES: usize = 1024;

/// The version of this protocol, in the greeting.
pub const PROXY_VERSION: u16 = 1;

/// Bytes that break the protocol, or a link that failed.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The link failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The greeting or a frame is wrong.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A value is not known.
    #[error("{value} is not a known {what}")]
    Unknown {
        /// What it should be.
        what: &'static str,
        /// What came.
        value: u8,
    },
    /// A text is too long, or is not UTF-8.
    #[error("a {what} of {bytes} bytes is too long or is not UTF-8")]
    BadText {
        /// What it is.
        what: &'static str,
        /// The announced length.
        bytes: usize,
    },
    /// The peer speaks another version.
    #[error("the peer speaks versions {least} to {most} of the proxy protocol, this daemon {ours}")]
    Version {
        /// The peer's oldest.
        least: u16,
        /// The peer's newest.
        most: u16,
        /// Ours.
        ours: u16,
    },
}

/// Where a stream comes out at the acceptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// libvirt's RPC socket.
    Libvirt {
        /// The opener's name for the acceptor, one path component: the migration's sockets are in
        /// the directory of that name on both hosts.
        directory: String,
        /// The session of a guest's migration on this connection.
        session: SessionId,
    },
    /// A socket of a migration, in a directory that an earlier RPC stream named.
    Socket {
        /// The directory's name.
        directory: String,
        /// The file's name.
        file: String,
    },
    /// A forwarding rule of the acceptor's configuration.
    Forward {
        /// The rule's name.
        name: String,
    },
    /// No stream: the opener asks for the word about a session's Finish.
    Word {
        /// The session.
        session: SessionId,
    },
    /// No stream: the opener asks for a receiver for a guest.
    Receive(ReceiveRequest),
    /// No stream: the opener sends the definition of a guest, and asks what is not permitted in it.
    Judge(GuestIdentity),
}

impl Target {
    fn number(&self) -> u8 {
        match self {
            Self::Libvirt { .. } => 1,
            Self::Socket { .. } => 2,
            Self::Forward { .. } => 3,
            Self::Word { .. } => 4,
            Self::Receive(_) => 5,
            Self::Judge(_) => 6,
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Libvirt { .. } => f.write_str("libvirt"),
            Self::Socket { directory, file } => write!(f, "{directory}/{file}"),
            Self::Forward { name } => write!(f, "forward {name}"),
            Self::Word { session } => write!(f, "the word about session {session}"),
            Self::Receive(request) => write!(f, "a receiver for {}", request.guest.name),
            Self::Judge(guest) => write!(f, "an opinion about {}", guest.name),
        }
    }
}

/// The opener's first message after its greeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Where the stream goes.
    pub target: Target,
    /// Whether the acceptor has answered this stream's opening before.
    pub is_known: bool,
    /// Frames that the opener has received on earlier links.
    pub received: u64,
}

/// Greets another daemon, and asks for something that is no stream of frames.
///
/// # Errors
/// The link's.
pub fn ask(link: &mut impl Write, token: Token, target: Target) -> io::Result<()> {
    let hello = Hello {
        version_min: PROXY_VERSION,
        version_max: PROXY_VERSION,
        role: Role::Stream,
        lane: 0,
        token,
        attempt: 0,
    };
    link.write_all(&hello.encode())?;
    Opening { target, is_known: false, received: 0 }.write(link)
}

impl Opening {
    /// Writes it.
    ///
    /// # Errors
    /// The link's.
    pub fn write(&self, link: &mut impl Write) -> io::Result<()> {
        let (first, second) = match &self.target {
            Target::Libvirt { directory, session } => (directory.clone(), session.to_string()),
            Target::Socket { directory, file } => (directory.clone(), file.clone()),
            Target::Forward { name } => (name.clone(), String::new()),
            Target::Word { session } => (session.to_string(), String::new()),
            Target::Receive(ReceiveRequest { template, guest, session }) => {
                (template.clone(), format!("{session} {} {}", guest.uuid, guest.name))
            }
            Target::Judge(guest) => (guest.uuid.to_string(), guest.name.clone()),
        };
        let mut bytes = vec![self.target.number(), self.is_known.into()];
        bytes.extend_from_slice(&self.received.to_le_bytes());
        push_text(&mut bytes, &first, MAX_NAME_BYTES);
        push_text(&mut bytes, &second, MAX_NAME_BYTES);
        link.write_all(&bytes)
    }

    /// Reads it.
    ///
    /// # Errors
    /// The link's, or a message that breaks the protocol.
    pub fn read(link: &mut impl Read) -> Result<Self, RecordError> {
        let number = read_byte(link)?;
        let is_known = match read_byte(link)? {
            0 => false,
            1 => true,
            value => return Err(RecordError::Unknown { what: "state of a stream", value }),
        };
        let received = read_u64(link)?;
        let first = read_text(link, MAX_NAME_BYTES, "name")?;
        let second = read_text(link, MAX_NAME_BYTES, "name")?;
        let target = match number {
            1 => Target::Libvirt { directory: first, session: session_of(&second)? },
            2 => Target::Socket { directory: first, file: second },
            3 => Target::Forward { name: first },
            4 => Target::Word { session: session_of(&first)? },
            5 => Target::Receive(receive_request(first, &second)?),
            6 => Target::Judge(GuestIdentity { uuid: uuid_of(&first)?, name: second }),
            value => return Err(RecordError::Unknown { what: "target of a stream", value }),
        };
        Ok(Self { target, is_known, received })
    }
}

/// The acceptor's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The stream goes on.
    Opened {
        /// Frames that the acceptor has received on earlier links.
        received: u64,
    },
    /// The stream is refused, or is not known any more.
    Refused {
        /// Why, for people.
        reason: String,
    },
    /// What is known about a session's Finish.
    Word(FinishAnswer),
    /// A receiver waits for the guest.
    Receiving,
    /// There is no receiver for the guest.
    NotReceiving(Reason),
    /// The definition was judged. The objections follow.
    Judged,
}

impl Answer {
    /// Writes it.
    ///
    /// # Errors
    /// The link's.
    pub fn write(&self, link: &mut impl Write) -> io::Result<()> {
        let mut bytes = Vec::new();
        match self {
            Self::Opened { received } => {
                bytes.push(1);
                bytes.extend_from_slice(&received.to_le_bytes());
            }
            Self::Refused { reason } => {
                bytes.push(2);
                push_text(&mut bytes, reason, MAX_REASON_BYTES);
            }
            Self::Word(answer) => bytes.extend([3, answer.number()]),
            Self::Receiving => bytes.push(4),
            Self::NotReceiving(reason) => {
                bytes.push(5);
                bytes.extend(u16::from(reason.code).to_le_bytes());
                push_text(&mut bytes, &reason.text, MAX_REASON_BYTES);
            }
            Self::Judged => bytes.push(6),
        }
        link.write_all(&bytes)
    }

    /// Reads it.
    ///
    /// # Errors
    /// The link's, or a message that breaks the protocol.
    pub fn read(link: &mut impl Read) -> Result<Self, RecordError> {
        match read_byte(link)? {
            1 => Ok(Self::Opened { received: read_u64(link)? }),
            2 => Ok(Self::Refused { reason: read_text(link, MAX_REASON_BYTES, "reason")? }),
            3 => {
                let value = read_byte(link)?;
                let unknown = RecordError::Unknown { what: "word about a Finish", value };
                FinishAnswer::from_number(value).map(Self::Word).ok_or(unknown)
            }
            4 => Ok(Self::Receiving),
            5 => {
                let code = u16::from_le_bytes([read_byte(link)?, read_byte(link)?]).into();
                let text = read_text(link, MAX_REASON_BYTES, "reason")?;
                Ok(Self::NotReceiving(Reason::new(code, &text)))
            }
            6 => Ok(Self::Judged),
            value => Err(RecordError::Unknown { what: "answer", value }),
        }
    }
}

/// Reads the greeting of a link, after which an [`Opening`] comes if its role is a stream's.
///
/// # Errors
/// The link's, or bytes that are not a greeting.
pub fn read_hello(link: &mut impl Read) -> Result<Hello, RecordError> {
    let mut bytes = [0; HELLO_BYTES];
    link.read_exact(&mut bytes)?;
    let hello = Hello::parse(&bytes)?;
    if !hello.versions().contains(&PROXY_VERSION) {
        let (least, most) = (hello.version_min, hello.version_max);
        return Err(RecordError::Version { least, most, ours: PROXY_VERSION });
    }
    Ok(hello)
}

/// The first byte of every frame.
pub const FRAME_BYTE: u8 = b'V';

/// The kind of a record on an open stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// The first byte of a [`vmferry_codec::Frame`].
    Frame,
    /// 2: the sender has placed all frames up to the number that follows.
    Placed,
    /// 3: the sender's local process reads no more. Bytes for it are discarded.
    Unread,
    /// 4: the stream has failed at the sender. A reason follows.
    Reset,
    /// 5: a sign of life.
    Alive,
}

impl RecordKind {
    /// Its number on the wire.
    pub fn number(self) -> u8 {
        match self {
            Self::Frame => FRAME_BYTE,
            Self::Placed => 2,
            Self::Unread => 3,
            Self::Reset => 4,
            Self::Alive => 5,
        }
    }

    /// The kind of this number.
    ///
    /// # Errors
    /// [`RecordError::Unknown`].
    pub fn from_number(value: u8) -> Result<Self, RecordError> {
        Ok(match value {
            FRAME_BYTE => Self::Frame,
            2 => Self::Placed,
            3 => Self::Unread,
            4 => Self::Reset,
            5 => Self::Alive,
            value => return Err(RecordError::Unknown { what: "record", value }),
        })
    }
}

/// A record with a number.
pub fn placed_record(number: u64) -> [u8; 9] {
    let mut bytes = [RecordKind::Placed.number(); 9];
    bytes[1..].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// The record of a failure.
pub fn reset_record(reason: &str) -> Vec<u8> {
    let mut bytes = vec![RecordKind::Reset.number()];
    push_text(&mut bytes, reason, MAX_REASON_BYTES);
    bytes
}

/// Reads one byte.
pub fn read_byte(link: &mut impl Read) -> io::Result<u8> {
    let mut byte = [0];
    link.read_exact(&mut byte)?;
    Ok(byte[0])
}

/// Reads a number.
pub fn read_u64(link: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    link.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Reads the text of a reset.
pub fn read_reason(link: &mut impl Read) -> Result<String, RecordError> {
    read_text(link, MAX_REASON_BYTES, "reason")
}

/// Appends the text, cut at a character if it is too long.
fn push_text(bytes: &mut Vec<u8>, text: &str, most: usize) {
    let text = &text[..text.floor_char_boundary(most)];
    bytes.extend_from_slice(&(text.len() as u16).to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
}

/// The session, the UUID and the name of the guest are in one text.
fn receive_request(template: String, text: &str) -> Result<ReceiveRequest, RecordError> {
    let bad = || RecordError::BadText { what: "session, UUID and name", bytes: text.len() };
    let mut parts = text.splitn(3, ' ');
    let mut next = || parts.next().ok_or_else(bad);
    let session = session_of(next()?)?;
    let uuid = next()?.parse().map_err(|_| bad())?;
    let guest = GuestIdentity { uuid, name: next()?.to_owned() };
    Ok(ReceiveRequest { template, guest, session })
}

fn session_of(text: &str) -> Result<SessionId, RecordError> {
    let (what, bytes) = ("session number", text.len());
    text.parse().map_err(|_| RecordError::BadText { what, bytes })
}

fn uuid_of(text: &str) -> Result<uuid::Uuid, RecordError> {
    let (what, bytes) = ("UUID", text.len());
    text.parse().map_err(|_| RecordError::BadText { what, bytes })
}

fn read_text(link: &mut impl Read, most: usize, what: &'static str) -> Result<String, RecordError> {
    let mut length = [0; 2];
    link.read_exact(&mut length)?;
    let bytes = usize::from(u16::from_le_bytes(length));
    if bytes > most {
        return Err(RecordError::BadText { what, bytes });
    }
    let mut text = vec![0; bytes];
    link.read_exact(&mut text)?;
    String::from_utf8(text).map_err(|_| RecordError::BadText { what, bytes })
}

#[cfg(test)]
mod tests;
