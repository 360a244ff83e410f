//! Encoding pages into frames.

use std::sync::Arc;

use vmferry_memory::{GuestBytes, PAGE_SIZE, SlotId, is_zero, page_hash, zero_page_hash};
use vmferry_wire::{Algorithm, Encoding, FrameHeader, FrameKind, Run, table_checksum};

use crate::compress::{Compress, CompressError, Compressors};
use crate::delta::BASE_SUM_BYTES;
use crate::entropy::looks_random;
use crate::frame::EncodedFrame;
use crate::hashes::{PageHashes, SumChange};
use crate::hot_pages::{Delta, HotPages, PageVersion};
use crate::method::Method;

/// How the pages of one frame are encoded. Zero pages are always sent as marks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// The method for pages that look compressible; `None` to send them raw.
    pub pack: Option<Method>,
    /// Whether deltas are used for pages that were sent before.
    pub delta: DeltaUse,
}

impl Choice {
    /// Maximum length of a delta in bytes.
    pub(crate) fn longest_delta(self) -> usize {
        match self.pack {
            Some(_) => LONGEST_DELTA_BESIDE_PACKING,
            None => LONGEST_DELTA,
        }
    }
}

/// Whether deltas are used for pages that were sent before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeltaUse {
    /// No deltas.
    #[default]
    Off,
    /// Send deltas of pages whose last version is held, and keep the pages for later deltas.
    Make,
}

/// The pages of a frame.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// The round, from 1.
    pub round: u32,
    /// The slot of all pages.
    pub slot: SlotId,
    /// Page indices, ascending. The copies of the pages are in this order at the beginning of
    /// [`EncodedFrame::pages_mut`].
    pub pages: &'a [u64],
}

/// Contents of a frame: numbers of pages by encoding, and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameCounts {
    /// Zero pages, which need no payload.
    pub zero_pages: u64,
    /// Pages sent raw.
    pub raw_pages: u64,
    /// Pages compressed together.
    pub packed_pages: u64,
    /// Pages sent as deltas.
    pub delta_pages: u64,
    /// Pages that were sent before but whose last version is not held.
    pub unheld_pages: u64,
    /// Pages that are held but changed too much for a delta.
    pub rewritten_pages: u64,
    /// Pages sent raw because they looked random.
    pub random_pages: u64,
    /// Pages sent raw because compression did not make them smaller.
    pub grown_pages: u64,
    /// Bytes of the deltas before compression.
    pub delta_bytes: u64,
    /// Length of the packed part in bytes.
    pub packed_bytes: u64,
}

impl FrameCounts {
    /// Pages with content.
    #[must_use]
    pub fn content_pages(&self) -> u64 {
        self.raw_pages + self.packed_pages + self.delta_pages
    }
}

/// A frame could not be encoded.
#[derive(Debug, thiserror::Error)]
#[error("page {page} of {slot} and those behind it in a frame could not be compressed")]
pub struct EncodeError {
    /// The slot.
    pub slot: SlotId,
    /// The first page that was to be compressed.
    pub page: u64,
    /// The error of the compressor.
    #[source]
    pub source: CompressError,
}

/// A worker's compressors.
pub(crate) type Made = Vec<(Method, Box<dyn Compress>)>;

/// Encodes frames. It has a worker's contexts and buffers and is kept for the whole migration.
pub struct Encoder {
    compressors: Compressors,
    /// Created at first use. There are few, and usually only one is used.
    made: Made,
    hot: Arc<HotPages>,
    runs: Vec<Run>,
    /// Records of delta runs.
    deltas: GuestBytes,
    /// Input for the compressor, if it is not contiguous in the copy.
    gathered: GuestBytes,
    base_sum: BaseSum,
}

/// The sum of the hashes of the current delta run's base pages.
#[derive(Default)]
struct BaseSum {
    /// Its position in the records.
    at: usize,
    sum: u64,
}

/// Packing is expected to reduce a page to about a quarter, so a longer delta saves nothing.
const LONGEST_DELTA_BESIDE_PACKING: usize = PAGE_SIZE / 4;
/// A delta that saves less than half does not pay for computing and applying it.
const LONGEST_DELTA: usize = PAGE_SIZE / 2;
/// Packing must save at least one part in this many of its input: 3 %, the gain below which the
/// measurement of [`looks_random`] counts a page as one that is not worth packing.
pub(crate) const LEAST_GAIN: usize = 32;
/// Deltas of fewer bytes are not worth a call of the compressor on both sides: even halved, they
/// would save less than an eighth of one raw page.
pub(crate) const SHORTEST_PACKED_DELTAS: usize = 1024;

impl Encoder {
    /// An encoder without contexts; they are created at first use.
    #[must_use]
    pub fn new(compressors: Compressors, hot: Arc<HotPages>) -> Self {
        Self {
            compressors,
            made: Vec::new(),
            hot,
            runs: Vec::new(),
            deltas: GuestBytes::new(),
            gathered: GuestBytes::new(),
            base_sum: BaseSum::default(),
        }
    }

    /// Encodes the pages of a batch, whose copies are in `frame`, and records their hashes. The
    /// frame does not have its [number](EncodedFrame::set_sequence) yet.
    ///
    /// # Errors
    /// The compressor's. The hashes are recorded even then: the migration is over.
    ///
    /// # Panics
    /// If the frame's buffer has fewer pages than the batch.
    pub fn encode(
        &mut self,
        frame: &mut EncodedFrame,
        batch: Batch<'_>,
        hashes: &PageHashes,
        choice: Choice,
    ) -> Result<FrameCounts, EncodeError> {
        let mut counts = FrameCounts::default();
        self.choose_encodings(frame.pages(batch.pages.len()), batch, hashes, choice, &mut counts);
        frame.begin();
        let algorithm = self.pack(frame, batch, choice.pack, &mut counts)?;
        let mut index = 0;
        for run in &self.runs {
            let end = index + run.pages as usize;
            if run.encoding == Encoding::Raw {
                frame.push_raw(index * PAGE_SIZE, end * PAGE_SIZE);
            }
            index = end;
            run.encode(&mut frame.head);
        }
        let table = &frame.head[vmferry_wire::FRAME_HEADER_BYTES..];
        let header = FrameHeader {
            kind: FrameKind::Pages,
            algorithm,
            slot: batch.slot,
            round: batch.round,
            runs: self.runs.len() as u32,
            sequence: 0,
            payload_bytes: (counts.raw_pages as usize * PAGE_SIZE + frame.packed_bytes) as u32,
            packed_bytes: frame.packed_bytes as u32,
            delta_bytes: self.deltas.len() as u32,
            table_checksum: table_checksum(table),
        };
        frame.finish(header);
        counts.delta_bytes = self.deltas.len() as u64;
        counts.packed_bytes = frame.packed_bytes as u64;
        Ok(counts)
    }

    /// Chooses the encoding of each page, builds the runs and the deltas, and records the hashes.
    fn choose_encodings(
        &mut self,
        copy: &[u8],
        batch: Batch<'_>,
        hashes: &PageHashes,
        choice: Choice,
        counts: &mut FrameCounts,
    ) {
        let mut change = SumChange::default();
        self.runs.clear();
        self.deltas.clear();
        for (&page, content) in batch.pages.iter().zip(copy.chunks_exact(PAGE_SIZE)) {
            let slot = batch.slot;
            let zero = is_zero(content);
            let hash =
                if zero { zero_page_hash(slot, page) } else { page_hash(content, slot, page) };
            let sent_hash = hashes.replace(slot, page, hash, &mut change);
            let version =
                PageVersion { slot, page, round: batch.round, sent_hash, new_hash: hash, content };
            let encoding = if zero {
                counts.zero_pages += 1;
                Encoding::Zero
            } else if self.delta(version, choice, counts) {
                counts.delta_pages += 1;
                Encoding::Delta
            } else if choice.pack.is_some() {
                let random = looks_random(content);
                *(if random { &mut counts.random_pages } else { &mut counts.packed_pages }) += 1;
                if random { Encoding::Raw } else { Encoding::Packed }
            } else {
                Encoding::Raw
            };
            counts.raw_pages += u64::from(encoding == Encoding::Raw);
            match self.runs.last_mut() {
                Some(run) if run.encoding == encoding && run.range().end == page => {
                    run.pages += 1;
                    run.content_sum = run.content_sum.wrapping_add(hash);
                }
                _ => self.runs.push(Run { first: page, pages: 1, encoding, content_sum: hash }),
            }
        }
        hashes.add(change);
    }

    /// Appends a delta for the page, if possible. Returns whether it did.
    fn delta(
        &mut self,
        version: PageVersion<'_>,
        choice: Choice,
        counts: &mut FrameCounts,
    ) -> bool {
        let Some(sent_hash) = version.sent_hash.filter(|_| choice.delta == DeltaUse::Make) else {
            return false;
        };
        let continues = self
            .runs
            .last()
            .is_some_and(|run| run.encoding == Encoding::Delta && run.range().end == version.page);
        let before = self.deltas.len();
        if !continues {
            self.deltas.extend_from_slice(&[0; BASE_SUM_BYTES]);
        }
        match self.hot.delta(version, &mut self.deltas, choice.longest_delta()) {
            Delta::Made => {
                if !continues {
                    self.base_sum = BaseSum { at: before, sum: 0 };
                }
                let BaseSum { at, sum } = &mut self.base_sum;
                *sum = sum.wrapping_add(sent_hash.get());
                self.deltas[*at..*at + BASE_SUM_BYTES].copy_from_slice(&sum.to_le_bytes());
                true
            }
            other => {
                let rewritten = other == Delta::TooLong;
                *(if rewritten {
                    &mut counts.rewritten_pages
                } else {
                    &mut counts.unheld_pages
                }) += 1;
                self.deltas.truncate(before);
                false
            }
        }
    }

    /// Compresses packed pages and deltas together. If that does not make them smaller, they are
    /// sent uncompressed.
    fn pack(
        &mut self,
        frame: &mut EncodedFrame,
        batch: Batch<'_>,
        method: Option<Method>,
        counts: &mut FrameCounts,
    ) -> Result<Option<Algorithm>, EncodeError> {
        let pages = counts.packed_pages as usize;
        let worth = pages > 0 || self.deltas.len() >= SHORTEST_PACKED_DELTAS;
        if let Some(method) = method.filter(|_| worth) {
            let length = pages * PAGE_SIZE + self.deltas.len();
            let (copy, packed) = frame.copy_and_packed(length - length / LEAST_GAIN);
            let input = gather(&mut self.gathered, &self.runs, &self.deltas, copy, length);
            let compressed = compressor(&mut self.made, &self.compressors, method)
                .and_then(|compressor| compressor.compress(input, packed));
            match compressed {
                Ok(Some(bytes)) => {
                    frame.packed_bytes = bytes;
                    return Ok(Some(method.algorithm()));
                }
                Ok(None) => {}
                Err(source) => {
                    let first = self
                        .runs
                        .iter()
                        .find(|run| matches!(run.encoding, Encoding::Packed | Encoding::Delta));
                    let page = first.map_or(0, |run| run.first);
                    return Err(EncodeError { slot: batch.slot, page, source });
                }
            }
        }
        if pages > 0 {
            for run in &mut self.runs {
                if run.encoding == Encoding::Packed {
                    run.encoding = Encoding::Raw;
                }
            }
            counts.raw_pages += counts.packed_pages;
            counts.grown_pages = std::mem::take(&mut counts.packed_pages);
        }
        frame.set_deltas(&self.deltas);
        Ok(None)
    }
}

/// The packed pages and the deltas, contiguous, `length` bytes in all.
fn gather<'a>(
    gathered: &'a mut GuestBytes,
    runs: &[Run],
    deltas: &[u8],
    copy: &'a [u8],
    length: usize,
) -> &'a [u8] {
    let mut index = 0;
    let pieces = runs.iter().map(|run| {
        let at = index;
        index += run.content_bytes();
        (run.encoding == Encoding::Packed).then_some((at, index))
    });
    let mut pieces = pieces.flatten();
    match (pieces.next(), deltas) {
        (Some((from, to)), []) if to - from == length => &copy[from..to],
        (first, deltas) => {
            gathered.clear();
            for (from, to) in first.into_iter().chain(pieces) {
                gathered.extend_from_slice(&copy[from..to]);
            }
            gathered.extend_from_slice(deltas);
            gathered
        }
    }
}

/// The compressor for a method, created at first use.
pub(crate) fn compressor<'a>(
    made: &'a mut Made,
    compressors: &Compressors,
    method: Method,
) -> Result<&'a mut dyn Compress, CompressError> {
    let index = match made.iter().position(|(known, _)| *known == method) {
        Some(index) => index,
        None => {
            made.push((method, compressors.make(method)?));
            made.len() - 1
        }
    };
    Ok(made[index].1.as_mut())
}

#[cfg(test)]
mod tests;
