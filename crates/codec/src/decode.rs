//! Decoding frames into pages.
//!
//! A whole [`Frame`] is decoded and checked outside guest memory before any page is placed: a
//! damaged frame changes nothing in the guest. Frames of raw pages take a shorter path; see
//! `direct.rs`.

use vmferry_memory::{
    GuestBytes, GuestMemory, PAGE_SIZE, PageRun, SlotId, page_hash, zero_page_hash,
};
use vmferry_wire::{Encoding, FrameHeader, FrameKind, Run, RunTable, WireError};

use crate::decompress::Decompressors;
use crate::delta::{DeltaError, apply_delta, check_all_read, take_base_sum};
use crate::error::CodecError;
use crate::hashes::{PageHashes, SumChange};
use crate::received_frame::Frame;

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
        let Some(decoded) = self.decode(frame, memory, hashes, belongs)? else {
            return Ok(PlacedPages::default());
        };
        let slot = decoded.header.slot;
        let mut from = decoded.content;
        for run in decoded.table.runs() {
            place_run(slot, run, from.take(&run), memory, hashes)?;
        }
        Ok(decoded.record(hashes))
    }

    /// Decodes and checks every page of a frame without placing any. `None` for a frame that ends a
    /// round. `memory` has the bases of deltas.
    ///
    /// # Errors
    /// As [`place`](Self::place).
    ///
    /// # Panics
    /// If only the head of the frame was read.
    pub fn decode<'d>(
        &'d mut self,
        frame: &'d Frame,
        memory: &GuestMemory,
        hashes: &PageHashes,
        belongs: impl Fn(&Run) -> bool,
    ) -> Result<Option<DecodedPages<'d>>, CodecError> {
        let header = match frame.header() {
            Some(header) if header.kind == FrameKind::Pages => header,
            Some(header) if header.kind == FrameKind::Stream => {
                let text = "a piece of a stream where pages are due".to_owned();
                return Err(WireError::BadFrame(text).into());
            }
            _ => return Ok(None),
        };
        let table = checked_table(frame, header, memory, belongs)?;
        let (raw, packed) = frame.raw_and_packed(header);
        let unpacked = unpack(&mut self.decompressors, &mut self.unpacked, header, &table, packed)?;
        let (packed, deltas) = unpacked.split_at(table.packed_page_bytes());
        self.changed.clear();
        apply_deltas(&mut self.changed, header, &table, deltas, memory, hashes)?;
        let content = Content { raw, packed, changed: &self.changed };
        check(&mut self.page_hashes, header, &table, content)?;
        Ok(Some(DecodedPages { header, table, content, page_hashes: &self.page_hashes }))
    }
}

/// The pages of a frame, decoded and checked, before they are placed.
pub struct DecodedPages<'d> {
    header: &'d FrameHeader,
    table: RunTable<'d>,
    content: Content<'d>,
    page_hashes: &'d [u64],
}

impl<'d> DecodedPages<'d> {
    /// The runs of pages with their content; `None` for pages of zeros.
    pub fn runs(&self) -> impl Iterator<Item = (PageRun, Option<&'d [u8]>)> + '_ {
        let (slot, mut from) = (self.header.slot, self.content);
        self.table.runs().map(move |run| {
            let content = from.take(&run);
            (run.in_slot(slot), (run.encoding != Encoding::Zero).then_some(content))
        })
    }

    /// Records the hashes of all pages as those of the pages last placed, and counts the pages.
    pub fn record(self, hashes: &PageHashes) -> PlacedPages {
        record(self.page_hashes, self.header, &self.table, hashes)
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
    let (mut change, mut page_hashes) = (SumChange::default(), page_hashes.iter());
    for run in table.runs() {
        match run.encoding {
            Encoding::Zero => counts.zero += u64::from(run.pages),
            _ => counts.content += u64::from(run.pages),
        }
        for (page, hash) in run.range().zip(page_hashes.by_ref()) {
            hashes.replace(header.slot, page, *hash, &mut change);
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
        let expected = take_base_sum(&mut records).map_err(delta_error(header, page))?;
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
            apply_delta(&mut records, content).map_err(delta_error(header, page))?;
        }
    }
    Ok(check_all_read(records)?)
}

/// Adds the frame and the page to the error of a delta.
pub(crate) fn delta_error(
    header: &FrameHeader,
    page: u64,
) -> impl FnOnce(DeltaError) -> CodecError {
    let (sequence, slot) = (header.sequence, header.slot);
    move |source| CodecError::Delta { sequence, slot, page, source }
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
mod tests;
