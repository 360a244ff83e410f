//! Pages that the destination lacks after a switchover with post-copy, and the lanes on which it
//! fetches them. Eight pages of the guest are modeled, as bits of a byte.

use std::collections::BTreeMap;

use vmferry_memory::SlotId;
use vmferry_wire::ControlMessage;

/// The channels of the fetch lanes, with how often each lane was dialed before.
#[derive(Default)]
pub struct FetchLanes(BTreeMap<u8, u64>);

impl FetchLanes {
    /// Opens a lane's channel. Returns `false` if the lane has a later one.
    pub fn join(&mut self, lane: u8, attempt: u64) -> bool {
        let is_newer = self.0.get(&lane).is_none_or(|present| *present < attempt);
        if is_newer {
            self.0.insert(lane, attempt);
        }
        is_newer
    }

    pub fn lose(&mut self, lane: u8) {
        self.0.remove(&lane);
    }

    pub fn close(&mut self) {
        self.0.clear();
    }

    /// Whether a page can be requested.
    pub fn are_open(&self) -> bool {
        !self.0.is_empty()
    }
}

/// The source's pages.
#[derive(Default)]
pub struct SourcePages {
    /// Pages that were harvested and not sent.
    pending: u8,
    /// Pages that only this side has, from FINAL with post-copy on.
    only_here: u8,
    /// Requests are answered.
    pub are_served: bool,
}

impl SourcePages {
    pub fn harvest(&mut self, pages: u8) {
        self.pending |= pages;
    }

    pub fn send(&mut self) {
        self.pending = 0;
    }

    /// The message that names the pending pages.
    pub fn lacking(&self) -> Option<ControlMessage> {
        let bits = vec![self.pending];
        (self.pending != 0).then_some(ControlMessage::Lacking { slot: SlotId(0), first: 0, bits })
    }

    /// FINAL with post-copy is sent.
    pub fn keep(&mut self) {
        self.only_here = self.pending;
    }

    /// Whether the destination knows all pages that only this side has.
    pub fn are_known_to(&self, destination: &MissingPages) -> bool {
        destination.named.is_none_or(|named| self.only_here & !named == 0)
    }
}

/// The pages that the destination's guest lacks.
#[derive(Default)]
pub struct MissingPages {
    /// Pages that were missing when fetching began.
    named: Option<u8>,
    left: u8,
    /// The guest has ended, and needs no pages.
    guest_ended: bool,
}

impl MissingPages {
    /// These pages are fetched from now on.
    pub fn begin(&mut self, pages: u8) {
        assert!(self.named.is_none(), "pages begin to be missing twice");
        (self.named, self.left) = (Some(pages), pages);
    }

    /// Whether this is a switchover with post-copy.
    pub fn are_fetched(&self) -> bool {
        self.named.is_some()
    }

    /// Whether the guest lacks pages, which it gets from the source only.
    pub fn are_left(&self) -> bool {
        self.left != 0 && !self.guest_ended
    }

    /// Places a page. Returns whether it was the last one.
    pub fn place_one(&mut self) -> bool {
        self.left &= self.left.wrapping_sub(1);
        self.left == 0
    }

    /// The guest's VMM has ended.
    pub fn end_the_guest(&mut self) {
        self.guest_ended = true;
    }

    pub fn has_guest(&self) -> bool {
        !self.guest_ended
    }

    /// The number of pages that the guest lacks.
    pub fn count(&self) -> u64 {
        self.left.count_ones().into()
    }
}
