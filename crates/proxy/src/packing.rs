//! How a stream's bytes become frames: pages of guest memory are recognized in QEMU's streams and
//! encoded as those of any guest; other bytes are compressed when that pays, or sent as they are.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry::config::compression::CompressionConfig;
use vmferry::data::source::chooser::{Chooser, Decision};
use vmferry::vmm::streamed::{Marks, PageMark, Recogniser};
use vmferry_codec::{Choice, CompressError, EncodedFrame, HotPages, Method, Piece, StreamEncoder};
use vmferry_memory::{PAGE_SIZE, SlotId};
use vmferry_qemu::AnyStream;
use vmferry_transport::RateLimiter;

/// The most pages of one stream that both sides keep for deltas: 256 MiB.
pub const MAX_KEPT_PAGES_OF_A_STREAM: u32 = 65_536;

/// What the senders of a stream's links report to, and wait for.
#[derive(Clone, Debug, Default)]
pub struct Pacer {
    chooser: Option<Arc<Chooser>>,
    limiter: Option<RateLimiter>,
}

impl Pacer {
    /// A pacer with the bandwidth cap of the peer, if there is one.
    pub fn new(chooser: Option<Arc<Chooser>>, limiter: Option<RateLimiter>) -> Self {
        Self { chooser, limiter }
    }

    /// Waits until the cap lets this number of bytes through.
    pub fn await_turn(&self, bytes: usize) {
        if let Some(limiter) = &self.limiter {
            // False at the end, which the sender finds elsewhere.
            let _ = limiter.take(bytes as u64);
        }
    }

    /// A frame was sent, after the link had waited for it.
    pub fn sent(&self, bytes: usize, waited: Duration, took: Duration) {
        if let Some(chooser) = &self.chooser {
            chooser.sent(0, bytes as u64, waited, took);
        }
    }
}

/// Makes frames of one direction of a stream.
pub struct Packer {
    /// Chooses the encoding; `None` to send the bytes as they are.
    chooser: Option<Arc<Chooser>>,
    recogniser: Recognition,
    marks: Marks,
    kept: HotPages,
    /// Where the next piece begins in the stream.
    offset: u64,
    pass: Pass,
}

/// What is known about a stream's bytes.
enum Recognition {
    /// QEMU's migration stream, or one that begins like one.
    Qemu(AnyStream),
    /// Any other: blocks of 4096 bytes are judged one by one.
    Blocks,
}

/// Counts the passes over guest memory: QEMU sends the pages of a pass in ascending order.
#[derive(Debug)]
struct Pass {
    number: u32,
    last: (SlotId, u64),
}

impl Pass {
    fn saw(&mut self, pages: &[PageMark]) {
        for mark in pages {
            let at = (mark.slot, mark.page);
            if at < self.last {
                self.number = self.number.saturating_add(1);
            }
            self.last = at;
        }
    }
}

impl Packer {
    /// Sends the bytes as they are.
    pub fn plain() -> Self {
        Self::with(None, 0)
    }

    /// Compresses when that pays. `chooser` also hears from the senders of the stream's links.
    pub fn compressing(chooser: Arc<Chooser>, config: &CompressionConfig) -> Self {
        let most = u64::from(MAX_KEPT_PAGES_OF_A_STREAM) * PAGE_SIZE as u64;
        Self::with(Some(chooser), config.delta_memory.min(most))
    }

    fn with(chooser: Option<Arc<Chooser>>, kept_bytes: u64) -> Self {
        Self {
            chooser,
            recogniser: Recognition::Qemu(AnyStream::new()),
            marks: Marks::default(),
            kept: HotPages::new(kept_bytes),
            offset: 0,
            pass: Pass { number: 1, last: (SlotId(0), 0) },
        }
    }

    /// A new piece begins.
    pub fn begin_piece(&mut self) {
        self.marks.clear();
    }

    /// Looks at more bytes of the piece, which begin at `at` in it. Returns the number of bytes
    /// that are whole records. `full` says that the piece has no room for more.
    pub fn parse(&mut self, bytes: &[u8], at: usize, full: bool) -> usize {
        if self.chooser.is_none() {
            return bytes.len();
        }
        if let Recognition::Qemu(stream) = &mut self.recogniser {
            let known = self.marks.pages.len();
            let taken = stream.look(bytes, &mut self.marks).min(bytes.len());
            let is_other = stream.is_other() || taken == 0 && at == 0 && full;
            if !is_other {
                self.marks.pages[known..].iter_mut().for_each(|mark| mark.at += at);
                return taken;
            }
            self.marks.pages.truncate(known);
            self.recogniser = Recognition::Blocks;
        }
        bytes.len()
    }

    /// Divides the first `bytes` bytes of the frame's buffer. Pieces are divided in the order of
    /// the stream, and may then be encoded in any order. `idle` says that the link waits.
    pub fn divide(&mut self, mut frame: EncodedFrame, bytes: usize, idle: bool) -> DividedPiece {
        if matches!(self.recogniser, Recognition::Blocks) && self.chooser.is_some() {
            let block = |index| PageMark { at: index * PAGE_SIZE, slot: SlotId(0), page: 0 };
            self.marks.pages.extend((0..bytes / PAGE_SIZE).map(block));
        } else {
            self.pass.saw(&self.marks.pages);
        }
        let begun = Instant::now();
        let round = match self.recogniser {
            Recognition::Qemu(_) => self.pass.number,
            // Never a delta: nothing is known to be sent twice.
            Recognition::Blocks => 1,
        };
        let decision = self.chooser.as_ref().map(|chooser| {
            match chooser.skips_compression() && !chooser.needs_compressors() {
                true => chooser.choose_uncompressed(round),
                false => chooser.choose(idle, round),
            }
        });
        let choice = decision.map_or_else(Choice::default, |decision| decision.choice);
        let piece = Piece { round, ..self.piece(bytes) };
        frame.divide(piece, &self.kept, choice);
        self.offset += bytes as u64;
        let learns = self.chooser.clone().zip(decision);
        DividedPiece { frame, method: choice.pack, learns, dividing: begun.elapsed() }
    }

    fn piece(&self, bytes: usize) -> Piece<'_> {
        let Self { marks, offset, pass, .. } = self;
        let (pages, zero_pages) = (&marks.pages[..], marks.zero_pages);
        Piece { offset: *offset, bytes, pages, zero_pages, round: pass.number }
    }
}

/// A piece that is divided into pages and other bytes, and not encoded yet.
pub struct DividedPiece {
    frame: EncodedFrame,
    method: Option<Method>,
    /// Hears what the encoding took.
    learns: Option<(Arc<Chooser>, Decision)>,
    dividing: Duration,
}

impl DividedPiece {
    /// Whether it has to be compressed, which takes longer than all else.
    pub fn is_to_be_compressed(&self) -> bool {
        self.method.is_some()
    }

    /// Encodes it.
    ///
    /// # Errors
    /// The compressor's.
    pub fn encode(mut self, encoder: &mut StreamEncoder) -> Result<EncodedFrame, CompressError> {
        let begun = Instant::now();
        let (counts, _) = encoder.encode(&mut self.frame, self.method)?;
        if let Some((chooser, decision)) = self.learns {
            chooser.encoded(decision, counts, self.dividing + begun.elapsed());
        }
        Ok(self.frame)
    }
}
