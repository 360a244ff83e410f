//! Dividing a piece of a stream into parts, and the deltas of its pages.

use vmferry_memory::{GuestBytes, PAGE_SIZE, SlotId};

use crate::encode::{Choice, DeltaUse, FrameCounts};
use crate::frame::EncodedFrame;
use crate::hot_pages::{Exchange, HotPages};

/// A whole page of guest memory within a piece of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageMark {
    /// Offset of its 4096 bytes in the piece.
    pub at: usize,
    /// The memory slot, as the guest's description numbers it.
    pub slot: SlotId,
    /// The page's index in the slot.
    pub page: u64,
}

/// A piece of a stream. Its bytes are at the beginning of [`EncodedFrame::bytes_mut`].
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Its offset in the stream.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: usize,
    /// The pages that were recognized in it, in order.
    pub pages: &'a [PageMark],
    /// Number of pages that the piece declares as zero.
    pub zero_pages: u64,
    /// The pass over memory that it belongs to, from 1.
    pub round: u32,
}

/// The kind of a part of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Bytes.
    Bytes,
    /// A page that is not kept.
    Page,
    /// A page that both sides keep in this entry, sent whole.
    Kept(u32),
    /// A page sent as a delta against this entry.
    Delta(u32),
}

/// The division of a piece.
#[derive(Debug, Default)]
pub(crate) struct Division {
    pub(super) offset: u64,
    pub(super) bytes: usize,
    pub(super) round: u32,
    /// The parts and their lengths, which cover the whole piece.
    pub(super) parts: Vec<(Part, usize)>,
    /// Records of the parts that are deltas.
    pub(super) deltas: GuestBytes,
    pub(super) counts: FrameCounts,
}

impl Division {
    fn push(&mut self, part: Part, bytes: usize) {
        match self.parts.last_mut() {
            Some((Part::Bytes, length)) if part == Part::Bytes => *length += bytes,
            _ if bytes > 0 => self.parts.push((part, bytes)),
            _ => {}
        }
    }
}

impl EncodedFrame {
    /// Divides the piece that is in the buffer. Pages that were kept become deltas if `choice`
    /// enables them. The pieces of a stream must be divided in stream order, all with the same
    /// `kept`. Marks that overlap or are not within the piece are treated as bytes.
    ///
    /// # Panics
    /// If the buffer has fewer bytes than the piece.
    pub fn divide(&mut self, piece: Piece<'_>, kept: &HotPages, choice: Choice) {
        let mut division = std::mem::take(&mut self.division);
        division.parts.clear();
        division.deltas.clear();
        division.counts = FrameCounts { zero_pages: piece.zero_pages, ..FrameCounts::default() };
        (division.offset, division.bytes, division.round) =
            (piece.offset, piece.bytes, piece.round);
        let bytes = self.bytes(piece.bytes);
        let mut at = 0;
        for mark in piece.pages {
            let Some(content) =
                mark.at.checked_add(PAGE_SIZE).and_then(|end| bytes.get(mark.at..end))
            else {
                continue;
            };
            if mark.at < at {
                continue;
            }
            division.push(Part::Bytes, mark.at - at);
            at = mark.at + PAGE_SIZE;
            let exchanged = if choice.delta == DeltaUse::Make {
                let (round, into) = (piece.round, &mut division.deltas);
                kept.exchange(mark.slot, mark.page, round, content, into, choice.longest_delta())
            } else {
                Exchange::NotHeld
            };
            let part = match exchanged {
                Exchange::Delta(entry) => {
                    division.counts.delta_pages += 1;
                    Part::Delta(entry)
                }
                Exchange::Kept(entry) => {
                    division.counts.unheld_pages += 1;
                    Part::Kept(entry)
                }
                Exchange::NotHeld => Part::Page,
            };
            division.push(part, PAGE_SIZE);
        }
        division.push(Part::Bytes, piece.bytes - at);
        division.counts.delta_bytes = division.deltas.len() as u64;
        self.division = division;
    }
}
