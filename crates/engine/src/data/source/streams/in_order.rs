//! Puts the pieces of a stream, which are packed in any order, back into the order of the stream.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::data::source::lane::{QueuedFrame, SourceLane};

/// Puts frames into a lane's queue in the order of their tickets.
pub struct InOrder {
    waiting: Mutex<Waiting>,
    lane: Arc<SourceLane>,
}

#[derive(Default)]
struct Waiting {
    /// The next ticket.
    next: u64,
    /// Frames that wait for their turn, by ticket. The queue's limit bounds their number.
    finished: BTreeMap<u64, QueuedFrame>,
}

impl InOrder {
    /// The first ticket is 0.
    pub fn new(lane: Arc<SourceLane>) -> Self {
        Self { waiting: Mutex::default(), lane }
    }

    /// Adds a finished frame.
    pub fn put(&self, ticket: u64, frame: QueuedFrame) {
        let mut waiting = self.waiting.lock();
        waiting.finished.insert(ticket, frame);
        let mut next = waiting.next;
        while let Some(frame) = waiting.finished.remove(&next) {
            self.lane.enqueue(frame);
            next += 1;
        }
        waiting.next = next;
    }
}
