//! Decoding frames into pages.
//!
//! A whole frame is read into a [`Frame`], and it is decoded and checked outside guest memory
//! before any page is placed: a damaged frame changes nothing in the guest. Frames of raw pages
//! take a shorter path; see `direct.rs`.

use std::io::{self, Read};

use vmferry_memory::{
    GuestBytes, GuestMemory, MemoryError, PAGE_SIZE, SlotId, page_hash, zero_page_hash,
};
use vmferry_wire::{
    Encoding, FRAME_HEADER_BYTES, FrameHeader, FrameKind, Run, RunTable, WireError,
};

use crate::decompress::{DecompressError, Decompressors};
use crate::delta::{DeltaError, apply_delta};
use crate::hashes::PageHashes;

/// Why a frame cannot be placed.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// The frame breaks the protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The packed part cannot be decompressed to the expected length.
    #[error("frame {sequence}: page {page} of {slot} and those behind it can't be decompressed")]
    Unpack {
        /// The frame's number on its lane.
        sequence: u64,
        /// The slot.
        slot: SlotId,
        /// The first packed page.
        page: u64,
        /// The error of the decompressor.
        #[source]
        source: DecompressError,
    },
    /// A delta cannot be decoded.
    #[error("frame {sequence}: the changes of page {page} of {slot} are damaged")]
    Delta {
        /// The frame's number on its lane.
        sequence: u64,
        /// The slot.
        slot: SlotId,
        /// The page.
        page: u64,
        /// The error in the delta.
        #[source]
        source: DeltaError,
    },
    /// The pages at the destination are not the base of the deltas.
    #[error(
        "frame {sequence} changes {pages} pages from page {page} of {slot} that are not here: they hash to \
         {found:#018x}, the source changed {expected:#018x}"
    )]
    DeltaBase {
        /// The frame's number on its lane.
        sequence: u64,
        /// The slot.
        slot: SlotId,
        /// First page of the run.
        page: u64,
        /// Number of pages in the run.
        pages: u32,
        /// Sum of the hashes of the source's base pages.
        expected: u64,
        /// Sum of the hashes of the pages at the destination.
        found: u64,
    },
    /// The decoded pages are not the pages that were sent.
    #[error(
        "frame {sequence}: {pages} pages from page {page} of {slot} hash to {found:#018x}, the source sent \
         {expected:#018x}"
    )]
    ContentSum {
        /// The frame's number on its lane.
        sequence: u64,
        /// The slot.
        slot: SlotId,
        /// First page of the run.
        page: u64,
        /// Number of pages in the run.
        pages: u32,
        /// The sum that the source sent.
        expected: u64,
        /// The sum of the decoded pages.
        found: u64,
    },
    /// A slot that the guest does not have. The frame is at fault, not the memory.
    #[error("frame {sequence} is for {slot}, and the guest has {slots} slots")]
    NoSuchSlot {
        /// The frame's number on its lane.
        sequence: u64,
        /// The slot.
        slot: SlotId,
        /// Number of slots of the guest.
        slots: usize,
    },
    /// Pages that do not belong on the frame's lane.
    #[error("frame {sequence} holds page {page} of {slot}, which does not belong on this lane")]
    Stray {
        /// The frame's number on its lane.
        sequence: u64,
        /// The slot.
        slot: SlotId,
        /// First page of the stray run.
        page: u64,
    },
    /// The guest memory does not accept the pages.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The packed part of a stream piece cannot be decompressed to the expected length.
    #[error("frame {sequence}: the stream's bytes from {offset} on can't be decompressed")]
    PieceUnpack {
        /// The frame's number on its lane.
        sequence: u64,
        /// Offset of the piece in its stream.
        offset: u64,
        /// The error of the decompressor.
        #[source]
        source: DecompressError,
    },
    /// A delta against a kept page cannot be decoded.
    #[error("frame {sequence}: the changes of the page that is kept in entry {entry} are damaged")]
    PieceDelta {
        /// The frame's number on its lane.
        sequence: u64,
        /// The entry.
        entry: u32,
        /// The error in the delta.
        #[source]
        source: DeltaError,
    },
    /// A delta against a page that was never kept.
    #[error("frame {sequence} changes the page in entry {entry}, and none is kept there")]
    NotKept {
        /// The frame's number on its lane.
        sequence: u64,
        /// The entry.
        entry: u32,
    },
    /// The decoded piece of a stream is not the piece that was sent.
    #[error(
        "frame {sequence}: {bytes} bytes of the stream from {offset} on hash to {found:#018x}, the source sent \
         {expected:#018x}"
    )]
    PieceHash {
        /// The frame's number on its lane.
        sequence: u64,
        /// Offset of the piece in its stream.
        offset: u64,
        /// Its length.
        bytes: usize,
        /// The hash that the source sent.
        expected: u64,
        /// The hash of the decoded piece.
        found: u64,
    },
}

/// A received frame and its buffers, reused from frame to frame.
#[derive(Debug, Default)]
pub struct Frame {
    header: Option<FrameHeader>,
    /// The run table, followed by the payload.
    bytes: GuestBytes,
}

/// Why no frame was read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The channel failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The bytes received are not a frame.
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl Frame {
    /// A frame without buffers; they grow at first use.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads a whole frame and returns its header, or `Ok(None)` if the channel ends between two
    /// frames. Allocations are bounded by the limits of the wire format.
    ///
    /// # Errors
    /// The channel's error, the end of the channel within a frame, or an invalid header.
    pub fn read_from(&mut self, reader: &mut impl Read) -> Result<Option<FrameHeader>, ReadError> {
        let header = self.read_head(reader)?;
        if header.is_some() {
            self.read_payload(reader)?;
        }
        Ok(header)
    }

    /// Reads a frame's header and run table, and returns the header. The payload is next on the
    /// channel. `Ok(None)` as in [`read_from`](Self::read_from).
    ///
    /// # Errors
    /// As [`read_from`](Self::read_from).
    pub fn read_head(&mut self, reader: &mut impl Read) -> Result<Option<FrameHeader>, ReadError> {
        self.header = None;
        let mut header = [0; FRAME_HEADER_BYTES];
        let first = loop {
            match reader.read(&mut header) {
                Ok(0) => return Ok(None),
                Ok(read) => break read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        };
        reader.read_exact(&mut header[first..])?;
        let header = FrameHeader::parse(&header)?;
        self.read_to(header.table_bytes(), 0, reader)?;
        self.header = Some(header);
        Ok(Some(header))
    }

    /// Reads the payload of the frame whose head was read.
    ///
    /// # Errors
    /// The channel's error, or the end of the channel.
    pub fn read_payload(&mut self, reader: &mut impl Read) -> io::Result<()> {
        let Some(header) = self.header else { return Ok(()) };
        let table = header.table_bytes();
        self.read_to(table + header.payload_bytes as usize, table, reader)
    }

    /// Reads into the buffer from offset `from`, until it holds `bytes` bytes.
    fn read_to(&mut self, bytes: usize, from: usize, reader: &mut impl Read) -> io::Result<()> {
        self.bytes.extend_to(bytes);
        reader.read_exact(&mut self.bytes[from..bytes])
    }

    /// The header of the last frame that was read.
    #[must_use]
    pub fn header(&self) -> Option<&FrameHeader> {
        self.header.as_ref()
    }

    /// The bytes of the frame's table. `header` must be this frame's header.
    #[must_use]
    pub fn table(&self, header: &FrameHeader) -> &[u8] {
        &self.bytes[..header.table_bytes()]
    }

    pub(crate) fn payload(&self, header: &FrameHeader) -> &[u8] {
        &self.bytes[header.table_bytes()..][..header.payload_bytes as usize]
    }
}

/// Counts of the placed pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlacedPages {
    /// Pages with content.
    pub content: u64,
    /// Zero pages.
    pub zero: u64,
}

/// Decodes, checks and places frames. It has a worker's contexts and buffers and is kept for the
/// whole migration.
#[derive(Default)]
pub struct Decoder {
    pub(crate) decompressors: Decompressors,
    /// The packed part, decompressed: packed pages, then records of delta runs.
    pub(crate) unpacked: GuestBytes,
    /// The pages of the delta runs.
    changed: GuestBytes,
    /// Hashes of the frame's pages, kept from the check until they are recorded.
    pub(crate) page_hashes: Vec<u64>,
    /// A copy of one guest page, for hashing.
    pub(crate) page: GuestBytes,
}

impl Decoder {
    /// A decoder with these decompressors.
    #[must_use]
    pub fn new(decompressors: Decompressors) -> Self {
        Self { decompressors, ..Self::default() }
    }

    /// Decodes and checks every page of a frame, then places them all and records their hashes. A
    /// frame that ends a round has no pages to place. `belongs` returns whether a run may be in
    /// this frame.
    ///
    /// # Errors
    /// A frame that breaks a rule or is damaged; none of its pages has been placed. A page outside
    /// memory cannot occur after the checks.
    ///
    /// # Panics
    /// If only the head of the frame was read.
    pub fn place(
        &mut self,
        frame: &Frame,
        memory: &GuestMemory,
        hashes: &PageHashes,
        belongs: impl Fn(&Run) -> bool,
    ) -> Result<PlacedPages, CodecError> {
        let header = match frame.header() {
            Some(header) if header.kind == FrameKind::Pages => header,
            Some(header) if header.kind == FrameKind::Stream => {
                let text = "a piece of a stream where pages are due".to_owned();
                return Err(WireError::BadFrame(text).into());
            }
            _ => return Ok(PlacedPages::default()),
        };
        let table = checked_table(frame, header, memory, belongs)?;
        let payload = frame.payload(header);
        let (raw, packed) = payload.split_at(payload.len() - header.packed_bytes as usize);
        let unpacked = unpack(&mut self.decompressors, &mut self.unpacked, header, &table, packed)?;
        let (packed, deltas) = unpacked.split_at(table.packed_page_bytes());
        self.changed.clear();
        apply_deltas(&mut self.changed, header, &table, deltas, memory, hashes)?;
        let content = Content { raw, packed, changed: &self.changed };
        check(&mut self.page_hashes, header, &table, content)?;
        let mut from = content;
        for run in table.runs() {
            place_run(header.slot, run, from.take(&run), memory, hashes)?;
        }
        Ok(record(&self.page_hashes, header, &table, hashes))
    }
}

/// The run table of a frame, after all checks that do not need the content. `belongs` returns
/// whether a run may be in this frame.
pub(crate) fn checked_table<'f>(
    frame: &'f Frame,
    header: &FrameHeader,
    memory: &GuestMemory,
    belongs: impl Fn(&Run) -> bool,
) -> Result<RunTable<'f>, CodecError> {
    let (sequence, slot) = (header.sequence, header.slot);
    let Ok(known) = memory.slot(slot) else {
        let slots = memory.slots().len();
        return Err(CodecError::NoSuchSlot { sequence, slot, slots });
    };
    let table = RunTable::parse(header, frame.table(header), known.pages())?;
    match table.runs().find(|run| !belongs(run)) {
        Some(stray) => Err(CodecError::Stray { sequence, slot, page: stray.first }),
        None => Ok(table),
    }
}

/// Records the hashes of a frame's placed pages, and counts the pages.
pub(crate) fn record(
    page_hashes: &[u64],
    header: &FrameHeader,
    table: &RunTable<'_>,
    hashes: &PageHashes,
) -> PlacedPages {
    let mut counts = PlacedPages::default();
    let (mut change, mut page_hashes) = (0_u64, page_hashes.iter());
    for run in table.runs() {
        match run.encoding {
            Encoding::Zero => counts.zero += u64::from(run.pages),
            _ => counts.content += u64::from(run.pages),
        }
        for (page, hash) in run.range().zip(page_hashes.by_ref()) {
            change = change.wrapping_add(hashes.replace(header.slot, page, *hash));
        }
    }
    hashes.add(change);
    counts
}

/// The decoded pages of a frame's runs, by encoding, each in the order of the run table.
#[derive(Clone, Copy)]
struct Content<'a> {
    raw: &'a [u8],
    packed: &'a [u8],
    changed: &'a [u8],
}

impl<'a> Content<'a> {
    /// Returns the pages of the next run. The lengths have been checked.
    fn take(&mut self, run: &Run) -> &'a [u8] {
        let from = match run.encoding {
            Encoding::Zero => return &[],
            Encoding::Raw => &mut self.raw,
            Encoding::Packed => &mut self.packed,
            Encoding::Delta => &mut self.changed,
        };
        let (pages, rest) = from.split_at(run.content_bytes());
        *from = rest;
        pages
    }
}

/// The packed part of the payload before compression.
pub(crate) fn unpack<'a>(
    decompressors: &mut Decompressors,
    unpacked: &'a mut GuestBytes,
    header: &FrameHeader,
    table: &RunTable<'_>,
    packed: &'a [u8],
) -> Result<&'a [u8], CodecError> {
    let Some(algorithm) = header.algorithm else { return Ok(packed) };
    let bytes = table.packed_page_bytes() + header.delta_bytes as usize;
    if bytes == 0 {
        return Ok(&[]);
    }
    unpacked.extend_to(bytes);
    let into = &mut unpacked[..bytes];
    decompressors.decompress(algorithm, packed, into).map_err(|source| {
        let packed = |run: &Run| matches!(run.encoding, Encoding::Packed | Encoding::Delta);
        let page = table.runs().find(packed).map_or(0, |run| run.first);
        CodecError::Unpack { sequence: header.sequence, slot: header.slot, page, source }
    })?;
    Ok(into)
}

/// Computes the pages of all delta runs from the pages in guest memory.
fn apply_deltas(
    changed: &mut GuestBytes,
    header: &FrameHeader,
    table: &RunTable<'_>,
    mut records: &[u8],
    memory: &GuestMemory,
    hashes: &PageHashes,
) -> Result<(), CodecError> {
    let (sequence, slot) = (header.sequence, header.slot);
    for run in table.runs().filter(|run| run.encoding == Encoding::Delta) {
        let (page, pages) = (run.first, run.pages);
        let Some((expected, rest)) = records.split_first_chunk::<8>() else {
            let source = DeltaError::Cut { needed: 8, left: records.len() };
            return Err(CodecError::Delta { sequence, slot, page, source });
        };
        records = rest;
        let expected = u64::from_le_bytes(*expected);
        let sum = |sum: u64, page| sum.wrapping_add(hashes.get(slot, page).unwrap_or_default());
        let found = run.range().fold(0, sum);
        if found != expected || run.range().any(|page| !hashes.knows(slot, page)) {
            return Err(CodecError::DeltaBase { sequence, slot, page, pages, expected, found });
        }
        let at = changed.len();
        changed.extend_to(at + run.content_bytes());
        let run_pages = &mut changed[at..];
        memory.copy_out(run.in_slot(slot), run_pages)?;
        for (page, content) in run.range().zip(run_pages.chunks_exact_mut(PAGE_SIZE)) {
            apply_delta(&mut records, content).map_err(|source| CodecError::Delta {
                sequence,
                slot,
                page,
                source,
            })?;
        }
    }
    if records.is_empty() {
        Ok(())
    } else {
        let left = records.len();
        Err(WireError::BadFrame(format!("{left} bytes are left over after all deltas")).into())
    }
}

/// Hashes all pages, and compares each run's sum with the source's.
fn check(
    page_hashes: &mut Vec<u64>,
    header: &FrameHeader,
    table: &RunTable<'_>,
    mut content: Content<'_>,
) -> Result<(), CodecError> {
    let slot = header.slot;
    page_hashes.clear();
    for run in table.runs() {
        let from = page_hashes.len();
        if run.encoding == Encoding::Zero {
            page_hashes.extend(run.range().map(|page| zero_page_hash(slot, page)));
        } else {
            let pages = run.range().zip(content.take(&run).chunks_exact(PAGE_SIZE));
            page_hashes.extend(pages.map(|(page, content)| page_hash(content, slot, page)));
        }
        check_sum(&page_hashes[from..], header, &run)?;
    }
    Ok(())
}

/// Compares the sum of a run's hashes with the source's.
pub(crate) fn check_sum(
    page_hashes: &[u64],
    header: &FrameHeader,
    run: &Run,
) -> Result<(), CodecError> {
    let found = page_hashes.iter().fold(0_u64, |sum, hash| sum.wrapping_add(*hash));
    if found == run.content_sum {
        return Ok(());
    }
    Err(CodecError::ContentSum {
        sequence: header.sequence,
        slot: header.slot,
        page: run.first,
        pages: run.pages,
        expected: run.content_sum,
        found,
    })
}

fn place_run(
    slot: SlotId,
    run: Run,
    content: &[u8],
    memory: &GuestMemory,
    hashes: &PageHashes,
) -> Result<(), CodecError> {
    if run.encoding != Encoding::Zero {
        // The pages of a run mostly have the same history, and both calls are correct for any page.
        if hashes.knows(slot, run.first) {
            memory.copy_in(run.in_slot(slot), content)?;
        } else {
            memory.copy_in_new(run.in_slot(slot), content)?;
        }
        return Ok(());
    }
    place_zeros(slot, run, memory, hashes)
}

/// Writes a run of zero pages where other content may be. Memory starts as zeros: a page that was
/// never placed is already zero, and writing it would populate it.
pub(crate) fn place_zeros(
    slot: SlotId,
    run: Run,
    memory: &GuestMemory,
    hashes: &PageHashes,
) -> Result<(), CodecError> {
    for page in run.range() {
        if hashes.knows(slot, page) {
            let one = Run { first: page, pages: 1, ..run };
            memory.zero(one.in_slot(slot))?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
