//! One link of a stream: a thread that sends and one that receives, until the link breaks, another
//! one takes over, or the stream is over.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_codec::{Frame, ReadError};
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter};

use super::linked::{Next, ReceiveError};
use super::{Counters, Stream, StreamFailure};
use crate::packing::Pacer;
use crate::records::{
    FRAME_BYTE, RecordError, RecordKind, placed_record, read_byte, read_reason, read_u64,
    reset_record,
};

/// Time limits of links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timings {
    /// A link on which nothing comes for this long is broken. Default 5 s.
    pub silence: Duration,
    /// A stream without a link for this long is lost. Default 30 s.
    pub reconnect: Duration,
    /// Time limit for a connection and its greetings. Default 5 s.
    pub connect: Duration,
}

impl Default for Timings {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { silence: seconds(5), reconnect: seconds(30), connect: seconds(5) }
    }
}

impl Timings {
    /// How often each side sends a sign of life.
    fn alive(&self) -> Duration {
        self.silence / 4
    }
}

/// Bytes that wait for their turn under a bandwidth cap together.
const TURN_BYTES: usize = 16 << 10;

/// How a link ended.
#[derive(Debug, PartialEq, Eq)]
pub enum LinkEnd {
    /// The stream is over, in one way or the other.
    Over,
    /// Another link has taken over.
    Superseded,
    /// The link broke, and another one is needed. Contains why.
    Broken(String),
}

/// A link on which both sides have greeted.
#[derive(Debug)]
pub struct Link {
    /// Its number, by [`Stream::next_link`].
    pub number: u64,
    /// Its receiving half.
    pub reader: ChannelReader,
    /// Its sending half.
    pub writer: ChannelWriter,
    /// Closes it.
    pub closer: ChannelCloser,
    /// The frames that the peer has received on earlier links.
    pub received: u64,
}

/// Carries the stream over a link. Returns when the link has ended and no thread uses it.
pub fn run_link(stream: &Arc<Stream>, link: Link, timings: &Timings, pacer: &Pacer) -> LinkEnd {
    let Link { number: link, mut reader, mut writer, closer, received } = link;
    if let Err(error) = stream.resume(link, received) {
        return end_of(stream, link, Err(error.into()));
    }
    let limits = reader
        .set_timeout(Some(timings.silence))
        .and_then(|()| writer.set_timeout(Some(timings.silence)));
    if let Err(error) = limits {
        stream.end_link(link);
        return LinkEnd::Broken(error.to_string());
    }
    let ended = std::thread::scope(|scope| {
        let sender = std::thread::Builder::new().name("link-send".into());
        let sending = sender.spawn_scoped(scope, || {
            let sent = send(stream, link, writer, timings.alive(), pacer);
            if sent.is_err() {
                closer.close();
            }
            sent
        });
        let sending = match sending {
            Ok(sending) => sending,
            Err(error) => return Err(LinkError::Record(error.into())),
        };
        let ended = receive(stream, link, reader);
        // Ends the sender's wait.
        stream.end_link(link);
        // The sender's last records may still be on their way if the stream is over.
        if ended.is_err() {
            closer.close();
        }
        match sending.join() {
            Ok(Err(error)) if ended.is_ok() => Err(LinkError::Record(error.into())),
            _ => ended,
        }
    });
    stream.end_link(link);
    end_of(stream, link, ended)
}

/// Why receiving ended.
#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    #[error("the other daemon closed the link")]
    Closed,
}

fn end_of(stream: &Stream, link: u64, ended: Result<(), LinkError>) -> LinkEnd {
    let error = match ended {
        Ok(()) => return LinkEnd::Over,
        Err(_) if stream.is_over() => return LinkEnd::Over,
        Err(_) if !stream.is_last_link(link) => return LinkEnd::Superseded,
        Err(error) => error,
    };
    let text = vmferry::chain(&error);
    match error {
        LinkError::Receive(ReceiveError::Superseded) => LinkEnd::Superseded,
        LinkError::Record(RecordError::Io(_)) | LinkError::Closed => LinkEnd::Broken(text),
        LinkError::Record(_) | LinkError::Receive(_) => {
            stream.fail(StreamFailure::Protocol { problem: text });
            LinkEnd::Over
        }
    }
}

fn send(
    stream: &Stream,
    link: u64,
    mut writer: ChannelWriter,
    alive: Duration,
    pacer: &Pacer,
) -> io::Result<()> {
    let mut spoken = Instant::now();
    loop {
        let waiting = Instant::now();
        match stream.next(link, alive) {
            Next::Frame(number, mut frame) => {
                let begun = Instant::now();
                frame.set_sequence(number);
                let bytes = frame.wire_bytes();
                let mut written = Ok(());
                // At a low cap, the turn of a frame may take longer than a silent link lasts.
                for _ in (0..bytes).step_by(TURN_BYTES) {
                    pacer.await_turn(TURN_BYTES.min(bytes));
                    if spoken.elapsed() >= alive && written.is_ok() {
                        written = writer.write_all(&[RecordKind::Alive.number()]);
                        spoken = Instant::now();
                    }
                }
                let written = written.and_then(|()| frame.write_to(&mut writer));
                spoken = Instant::now();
                // A later link's sender may be waiting for this frame.
                stream.put(number, frame);
                written?;
                Counters::add(&stream.counters.sent, bytes);
                pacer.sent(bytes, begun - waiting, begun.elapsed());
            }
            Next::Placed(number) => writer.write_all(&placed_record(number))?,
            Next::Unread => writer.write_all(&[RecordKind::Unread.number()])?,
            Next::Alive => writer.write_all(&[RecordKind::Alive.number()])?,
            Next::Reset(reason) => {
                writer.write_all(&reset_record(&reason))?;
                return writer.finish();
            }
            Next::Stop => return writer.finish(),
        }
    }
}

fn receive(stream: &Stream, link: u64, mut reader: ChannelReader) -> Result<(), LinkError> {
    loop {
        let first = match read_byte(&mut reader) {
            Ok(first) => first,
            Err(error) => {
                if stream.is_over() {
                    return Ok(());
                }
                return Err(match error.kind() {
                    io::ErrorKind::UnexpectedEof => LinkError::Closed,
                    _ => LinkError::Record(error.into()),
                });
            }
        };
        match RecordKind::from_number(first)? {
            RecordKind::Frame => {
                let mut frame = stream.spare_received();
                let read = frame.read_from(&mut [FRAME_BYTE].chain(&mut reader));
                let header = read.map_err(|error| match error {
                    ReadError::Io(error) => RecordError::Io(error),
                    ReadError::Wire(error) => RecordError::Wire(error),
                })?;
                let Some(header) = header else { return Err(LinkError::Closed) };
                let bytes = frame_bytes(&frame);
                Counters::add(&stream.counters.received, bytes);
                stream.received(link, header.sequence, frame, bytes)?;
            }
            RecordKind::Placed => {
                let number = read_u64(&mut reader).map_err(RecordError::Io)?;
                stream.placed(link, number)?;
            }
            RecordKind::Unread => stream.peer_reads_no_more(),
            RecordKind::Reset => {
                let reason = read_reason(&mut reader)?;
                stream.fail(StreamFailure::Peer { reason });
                return Ok(());
            }
            RecordKind::Alive => {}
        }
        if stream.is_complete() {
            return Ok(());
        }
    }
}

/// The length of a frame on the wire.
fn frame_bytes(frame: &Frame) -> usize {
    frame.header().map_or(0, |header| {
        vmferry_wire::FRAME_HEADER_BYTES + header.table_bytes() + header.payload_bytes as usize
    })
}
