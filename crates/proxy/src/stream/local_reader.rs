//! The thread that reads the local socket, and makes frames of what it reads.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::RecvFlags;
use vmferry_codec::{EncodedFrame, StreamEncoder};
use vmferry_memory::GuestBytes;

use super::waker::{Waker, is_readable};
use super::{Counters, Stream, StreamFailure};
use crate::packers::{Packers, encode};
use crate::packing::Packer;

/// The least size of a piece, if the process has written that much.
const PIECE_BYTES: usize = 256 << 10;

/// The most bytes read for a piece, which is then cut at the end of a record.
const BUFFER_BYTES: usize = PIECE_BYTES + 4 * vmferry::vmm::streamed::LONGEST_RECORD;

/// How long a piece waits for more bytes while the link is busy with others.
const LINGER: Duration = Duration::from_millis(1);

/// How long it does not look whether there are any.
const PAUSE: Duration = Duration::from_micros(50);

/// Looks at a stream's bytes on their way, and may change them.
pub trait Tap: Send {
    /// Takes the next bytes that were read, or none after a wake-up, and appends those to pass on.
    ///
    /// # Errors
    /// The stream must end, and why.
    fn pass(&mut self, bytes: &[u8], into: &mut Vec<u8>) -> Result<(), String>;
}

/// Reads the local socket until the process closes its end.
pub struct LocalReader {
    /// The stream.
    pub stream: Arc<Stream>,
    /// The socket.
    pub socket: UnixStream,
    /// Divides the pieces.
    pub packer: Packer,
    /// Encodes pieces that need no compression.
    pub encoder: StreamEncoder,
    /// Compress the others.
    pub packers: Packers,
    /// Sees the bytes first. Such a stream is sent as it comes.
    pub tap: Option<Box<dyn Tap>>,
    /// Makes the tap pass on what it has added itself.
    pub waker: Arc<Waker>,
}

/// A piece that was read.
struct Cut {
    bytes: usize,
    /// Whether the stream has ended.
    last: bool,
}

impl LocalReader {
    /// Reads until the process closes its end, or the stream is over.
    pub fn run(mut self) {
        let read = match self.tap.take() {
            Some(tap) => self.read_tapped(tap),
            None => self.read_pieces(),
        };
        if let Err(problem) = read {
            self.stream.fail(StreamFailure::Local { problem });
        }
    }

    fn read_pieces(&mut self) -> Result<(), String> {
        let mut rest = GuestBytes::new();
        loop {
            let Some(mut frame) = self.stream.acquire() else { return Ok(()) };
            let cut = self.read_piece(&mut frame, &mut rest);
            let Cut { bytes, last } = cut.map_err(|error| format!("reading: {error}"))?;
            if bytes > 0 {
                self.push(frame, bytes);
            } else {
                self.stream.give_back(frame);
            }
            if last {
                self.end();
                return Ok(());
            }
        }
    }

    /// Reads until a piece is complete, or until nothing more is available and the link is idle.
    /// Bytes after the last whole record are left in `rest` for the next piece.
    fn read_piece(&mut self, frame: &mut EncodedFrame, rest: &mut GuestBytes) -> io::Result<Cut> {
        let buffer = frame.bytes_mut(BUFFER_BYTES);
        let (mut filled, mut taken) = (rest.len(), 0);
        buffer[..filled].copy_from_slice(rest);
        rest.clear();
        self.packer.begin_piece();
        let last = loop {
            if filled > taken {
                let is_full = filled == buffer.len();
                taken += self.packer.parse(&buffer[taken..filled], taken, is_full);
            }
            if taken >= PIECE_BYTES || filled == buffer.len() {
                break false;
            }
            match self.read(&mut buffer[filled..], taken > 0)? {
                Some(0) => {
                    taken = filled;
                    break true;
                }
                Some(read) => filled += read,
                None => break false,
            }
        };
        rest.extend_from_slice(&buffer[taken..filled]);
        Ok(Cut { bytes: taken, last })
    }

    /// Reads some bytes; none at the end. `None` if a piece that `is_begun` is not to wait for more.
    fn read(&self, into: &mut [u8], is_begun: bool) -> io::Result<Option<usize>> {
        loop {
            match rustix::net::recv(&self.socket, &mut *into, RecvFlags::DONTWAIT) {
                Ok((read, _)) => {
                    Counters::add(&self.stream.counters.read, read);
                    return Ok(Some(read));
                }
                Err(Errno::CONNRESET) => return Ok(Some(0)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if is_begun => {
                    if !self.more_comes()? {
                        return Ok(None);
                    }
                }
                Err(Errno::AGAIN) => {
                    // A blocked `recv` of a Unix socket also wakes when the other direction is
                    // drained.
                    self.waker.wait(&self.socket)?;
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Whether more can be read soon, while the link has something to send. The process has time to
    /// fill its socket: each of its writes would wake this thread, and it writes 32 KiB at a time.
    fn more_comes(&self) -> io::Result<bool> {
        if self.stream.is_sender_idle() {
            return Ok(false);
        }
        self.waker.pause(PAUSE)?;
        is_readable(&self.socket, LINGER)
    }

    /// Encodes and sends the piece in the frame's buffer.
    fn push(&mut self, frame: EncodedFrame, bytes: usize) {
        let piece = self.packer.divide(frame, bytes, self.stream.is_sender_idle());
        let number = self.stream.reserve(bytes);
        if piece.is_to_be_compressed() {
            self.packers.encode(piece, number, &self.stream);
        } else {
            // Sooner than another thread would wake up.
            encode(piece, &mut self.encoder, number, &self.stream);
        }
    }

    /// Reads as the bytes come, and sends what the tap passes on.
    fn read_tapped(&mut self, mut tap: Box<dyn Tap>) -> Result<(), String> {
        let (mut buffer, mut passed) = (vec![0; 64 << 10], Vec::new());
        loop {
            let readable = self.waker.wait(&self.socket).map_err(|error| error.to_string())?;
            let read = match readable {
                true => match self.socket.read(&mut buffer) {
                    Ok(read) => Some(read),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Some(0),
                    Err(error) => return Err(format!("reading: {error}")),
                },
                false => None,
            };
            Counters::add(&self.stream.counters.read, read.unwrap_or(0));
            tap.pass(&buffer[..read.unwrap_or(0)], &mut passed)?;
            for bytes in passed.chunks(PIECE_BYTES) {
                let Some(mut frame) = self.stream.acquire() else { return Ok(()) };
                frame.bytes_mut(bytes.len()).copy_from_slice(bytes);
                self.packer.begin_piece();
                self.push(frame, bytes.len());
            }
            passed.clear();
            if read == Some(0) {
                self.end();
                return Ok(());
            }
            if self.stream.is_over() {
                return Ok(());
            }
        }
    }

    /// Sends the end of the stream.
    fn end(&self) {
        let Some(mut frame) = self.stream.acquire() else { return };
        frame.end_of_round(1);
        self.stream.put_last(frame);
    }
}
