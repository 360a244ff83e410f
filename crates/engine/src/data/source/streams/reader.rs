//! The thread that reads one stream.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::Sender;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmferry_codec::{EncodedFrame, HotPages, Piece, StreamEncoder};
use vmferry_memory::GuestBytes;

use super::in_order::InOrder;
use super::packers::DividedPiece;
use super::{Cutting, Tally};
use crate::data::source::chooser::Chooser;
use crate::data::source::lane::{FrameSummary, QueuedFrame, Signal, SourceLane};
use crate::error::MigrateError;
use crate::machine::source::io::Input;
use crate::vmm::streamed::{LONGEST_RECORD, Marks, Recogniser};

/// The least size of a piece, if the VMM has written that much.
const PIECE_BYTES: usize = 256 << 10;

/// The most bytes read for a piece, which is then cut at the end of a record.
const BUFFER_BYTES: usize = PIECE_BYTES + 4 * LONGEST_RECORD;

/// How long a piece waits for more bytes while the channel is busy with others.
const LINGER: Duration = Duration::from_millis(1);

/// How often an idle reader checks whether the session has ended.
const LOOK: Duration = Duration::from_millis(100);

/// Reads pieces, recognizes pages, divides the pieces and passes them on.
pub struct StreamReader {
    pub lane: Arc<SourceLane>,
    pub socket: UnixStream,
    pub recogniser: Box<dyn Recogniser>,
    pub in_order: Arc<InOrder>,
    pub signal: Arc<Signal>,
    pub chooser: Arc<Chooser>,
    pub kept: HotPages,
    /// Used for pieces that are not compressed.
    pub encoder: StreamEncoder,
    pub pieces: Sender<DividedPiece>,
    pub tally: Arc<Tally>,
    pub results: Sender<Input>,
}

/// Consumes everything and finds no pages.
struct NoRecogniser;

impl Recogniser for NoRecogniser {
    fn look(&mut self, bytes: &[u8], _marks: &mut Marks) -> usize {
        bytes.len()
    }
}

/// A piece that was read.
struct Cut {
    bytes: usize,
    /// Whether the stream has ended.
    last: bool,
}

impl StreamReader {
    /// Reads until the VMM closes its end.
    pub fn run(mut self) {
        if let Err(error) = self.read_all() {
            let _ = self.results.send(Input::Failed(error));
        }
    }

    fn read_all(&mut self) -> Result<(), MigrateError> {
        let (mut marks, mut rest) = (Marks::default(), GuestBytes::new());
        let (mut offset, mut ticket) = (0, 0);
        loop {
            let Some(mut frame) = self.acquire() else { return Ok(()) };
            let cut = self.read_piece(&mut frame, &mut marks, &mut rest);
            let Cut { bytes, last } = cut.map_err(|source| MigrateError::Local {
                action: "read the stream of the guest's VMM",
                source,
            })?;
            // Checked after the read. Once the migration is given up, the VMM may drain its own
            // end, and bytes read here may have gaps. The destination keeps a prefix of the stream.
            if bytes > 0 && !self.tally.given_up.load(Ordering::Acquire) {
                let round = self.tally.pass.load(Ordering::Relaxed);
                let zero_pages = marks.zero_pages;
                let piece = Piece { offset, bytes, pages: &marks.pages, zero_pages, round };
                self.pass_on(frame, piece, ticket)?;
                (offset, ticket) = (offset + bytes as u64, ticket + 1);
            } else {
                self.lane.give_back(frame);
            }
            if last {
                if self.tally.cut.is_made() {
                    let (socket, first) = (self.socket.try_clone(), std::mem::take(&mut rest));
                    let socket = socket.map_err(|source| MigrateError::Local {
                        action: "duplicate a socket of the guest's VMM",
                        source,
                    })?;
                    self.tally.cut.keep(self.lane.number(), Cutting { socket, first });
                }
                self.end(ticket);
                return Ok(());
            }
        }
    }

    /// A buffer with a reservation in the lane's queue; `None` at the end.
    fn acquire(&self) -> Option<EncodedFrame> {
        loop {
            let seen = self.signal.now()?;
            if let Some(frame) = self.lane.reserve() {
                return Some(frame);
            }
            self.signal.wait(seen);
        }
    }

    /// Reads until a piece is complete, or until nothing more is available and the channel is idle.
    /// Bytes after the last whole record are left in `rest` for the next piece.
    fn read_piece(
        &mut self,
        frame: &mut EncodedFrame,
        marks: &mut Marks,
        rest: &mut GuestBytes,
    ) -> std::io::Result<Cut> {
        let buffer = frame.bytes_mut(BUFFER_BYTES);
        let (mut filled, mut taken) = (rest.len(), 0);
        buffer[..filled].copy_from_slice(rest);
        rest.clear();
        marks.clear();
        let last = loop {
            if self.tally.cut.is_made() {
                break true;
            }
            if filled > taken {
                let known = marks.pages.len();
                let looked = self.recogniser.look(&buffer[taken..filled], marks);
                marks.pages[known..].iter_mut().for_each(|mark| mark.at += taken);
                taken += looked.min(filled - taken);
            }
            if taken == 0 && filled == buffer.len() {
                // The recognizer would never consume anything, and can't continue after bytes that
                // it has not consumed.
                self.recogniser = Box::new(NoRecogniser);
                taken = filled;
            }
            let full = taken >= PIECE_BYTES || filled == buffer.len();
            if full || taken > 0 && !self.more_comes()? {
                break false;
            }
            if taken == 0 && !self.await_more()? {
                break true;
            }
            match self.socket.read(&mut buffer[filled..]) {
                Ok(0) => {
                    taken = filled;
                    break true;
                }
                Ok(read) => filled += read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // The VMM has died, or the socket was closed here.
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                    taken = filled;
                    break true;
                }
                Err(error) => return Err(error),
            }
        };
        rest.extend_from_slice(&buffer[taken..filled]);
        Ok(Cut { bytes: taken, last })
    }

    /// Whether more can be read now, or soon while the channel has something to send.
    fn more_comes(&self) -> std::io::Result<bool> {
        self.is_readable(if self.lane.is_channel_idle() { Duration::ZERO } else { LINGER })
    }

    /// Blocks until more can be read; `false` if the session has ended.
    fn await_more(&self) -> std::io::Result<bool> {
        while !self.is_readable(LOOK)? {
            if self.signal.now().is_none() || self.tally.cut.is_made() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn is_readable(&self, wait: Duration) -> std::io::Result<bool> {
        let wait = Timespec { tv_sec: 0, tv_nsec: wait.as_nanos() as _ };
        let cut = self.tally.cut.descriptor();
        let mut polled =
            [PollFd::new(&self.socket, PollFlags::IN), PollFd::new(&cut, PollFlags::IN)];
        match poll(&mut polled, Some(&wait)) {
            Ok(_) => Ok(!polled[0].revents().is_empty()),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    fn pass_on(
        &mut self,
        mut frame: EncodedFrame,
        piece: Piece<'_>,
        ticket: u64,
    ) -> Result<(), MigrateError> {
        let uncompressed = self.chooser.skips_compression() && !self.chooser.needs_compressors();
        let decision = if uncompressed {
            self.chooser.choose_uncompressed(piece.round)
        } else {
            self.chooser.choose(self.lane.is_channel_idle(), piece.round)
        };
        frame.divide(piece, &self.kept, decision.choice);
        let (lane, to) = (self.lane.number(), Arc::clone(&self.in_order));
        let piece = DividedPiece { frame, decision, ticket, lane, to };
        if decision.choice.pack.is_none() {
            return piece.pack(&mut self.encoder, &self.chooser, &self.tally);
        }
        // Packers outlive readers.
        let _ = self.pieces.send(piece);
        Ok(())
    }

    /// Sends the end of the stream on the lane.
    fn end(&self, ticket: u64) {
        if self.tally.given_up.load(Ordering::Acquire) {
            return;
        }
        let Some(mut frame) = self.acquire() else { return };
        frame.end_of_round(self.tally.pass.load(Ordering::Relaxed));
        let (rearm_time, log, free_pages) = (Duration::ZERO, "VMM", 0);
        let summary = FrameSummary::EndOfRound { rearm_time, log, free_pages };
        self.in_order.put(ticket, QueuedFrame { frame, summary });
    }
}
