//! The receiving half of a stream: frames in order, from when they arrive until their bytes are
//! written to the local process.

use std::collections::VecDeque;

use super::{MAX_WINDOW_BYTES, MAX_WINDOW_FRAMES};

/// A frame that breaks the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InboxError {
    /// Not the next number.
    #[error("frame {found} came where frame {expected} is due")]
    OutOfOrder {
        /// The number that was due.
        expected: u64,
        /// The number that came.
        found: u64,
    },
    /// More than a peer may send before it is placed.
    #[error(
        "{frames} frames of {bytes} bytes wait to be placed, which is more than a peer may send"
    )]
    TooMuch {
        /// Frames that wait.
        frames: usize,
        /// Their bytes on the wire.
        bytes: usize,
    },
}

/// Received frames that wait to be written.
#[derive(Debug)]
pub struct Inbox<F> {
    waiting: VecDeque<(F, usize)>,
    bytes: usize,
    received: u64,
    placed: u64,
}

impl<F> Default for Inbox<F> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), bytes: 0, received: 0, placed: 0 }
    }
}

impl<F> Inbox<F> {
    /// The last frame that was received.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// The last frame whose bytes were written.
    pub fn placed(&self) -> u64 {
        self.placed
    }

    /// Adds a frame with this number and this length on the wire.
    ///
    /// # Errors
    /// Frames that no peer may send now.
    pub fn push(&mut self, number: u64, frame: F, bytes: usize) -> Result<(), InboxError> {
        let expected = self.received + 1;
        if number != expected {
            return Err(InboxError::OutOfOrder { expected, found: number });
        }
        let (frames, all) = (self.waiting.len() + 1, self.bytes + bytes);
        // A peer counts at least the bytes on the wire, and sends one frame whatever its size.
        if frames > MAX_WINDOW_FRAMES || frames > 1 && all > MAX_WINDOW_BYTES {
            return Err(InboxError::TooMuch { frames, bytes: all });
        }
        (self.received, self.bytes) = (number, all);
        self.waiting.push_back((frame, bytes));
        Ok(())
    }

    /// Whether a frame waits.
    pub fn has_next(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The next frame to write. [`wrote`](Self::wrote) must follow.
    pub fn pop(&mut self) -> Option<F> {
        self.waiting.pop_front().map(|(frame, bytes)| {
            self.bytes -= bytes;
            frame
        })
    }

    /// The bytes of the last frame that was popped are written.
    pub fn wrote(&mut self) {
        self.placed += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_in_order() {
        let mut inbox = Inbox::default();
        inbox.push(1, 'a', 5).unwrap();
        let wrong = InboxError::OutOfOrder { expected: 2, found: 3 };
        assert_eq!(inbox.push(3, 'c', 5), Err(wrong));
        assert_eq!(inbox.push(1, 'a', 5), Err(InboxError::OutOfOrder { expected: 2, found: 1 }));
        inbox.push(2, 'b', 5).unwrap();
        assert_eq!((inbox.pop(), inbox.received(), inbox.placed()), (Some('a'), 2, 0));
        inbox.wrote();
        assert_eq!((inbox.placed(), inbox.pop(), inbox.has_next()), (1, Some('b'), false));
    }

    #[test]
    fn peer_that_ignores_the_window_is_refused() {
        let mut inbox = Inbox::default();
        inbox.push(1, (), MAX_WINDOW_BYTES + 1).unwrap();
        assert!(matches!(inbox.push(2, (), 1), Err(InboxError::TooMuch { frames: 2, .. })));
        let mut inbox = Inbox::default();
        for number in 1..=MAX_WINDOW_FRAMES as u64 {
            inbox.push(number, (), 1).unwrap();
        }
        let last = inbox.push(MAX_WINDOW_FRAMES as u64 + 1, (), 1);
        assert!(matches!(last, Err(InboxError::TooMuch { .. })));
    }
}
