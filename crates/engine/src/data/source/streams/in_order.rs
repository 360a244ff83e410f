//! Puts the pieces of a stream, which are packed in any order, back into the order of the stream.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::data::source::outgoing::Outgoing;
use crate::data::source::pool::Finished;

/// Puts frames into a lane's queue in the order of their tickets.
pub struct InOrder {
    waiting: Mutex<Waiting>,
    outgoing: Arc<Outgoing<Finished>>,
}

#[derive(Default)]
struct Waiting {
    /// The next ticket.
    next: u64,
    /// Frames that wait for their turn, by ticket. The queue's limit bounds their number.
    finished: BTreeMap<u64, Finished>,
}

impl InOrder {
    /// The first ticket is 0.
    pub fn new(outgoing: Arc<Outgoing<Finished>>) -> Self {
        Self { waiting: Mutex::default(), outgoing }
    }

    /// Adds a finished frame.
    pub fn put(&self, ticket: u64, frame: Finished) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.finished.insert(ticket, frame);
        let mut next = waiting.next;
        while let Some(frame) = waiting.finished.remove(&next) {
            self.outgoing.put(frame);
            next += 1;
        }
        waiting.next = next;
    }
}
