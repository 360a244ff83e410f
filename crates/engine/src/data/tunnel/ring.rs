//! A buffer of bytes between two threads.

use vmferry_memory::GuestBytes;

/// A ring of bytes. Memory is taken when it is needed first.
pub struct Ring {
    bytes: GuestBytes,
    capacity: usize,
    /// Where the first byte is.
    start: usize,
    filled: usize,
}

impl Ring {
    /// An empty ring of this capacity in bytes.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { bytes: GuestBytes::new(), capacity, start: 0, filled: 0 }
    }

    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.filled
    }

    /// Number of bytes that fit.
    #[must_use]
    pub fn room(&self) -> usize {
        self.capacity - self.filled
    }

    /// Appends bytes, of which there must not be more than [`room`](Self::room).
    pub fn push(&mut self, bytes: &[u8]) {
        if self.bytes.len() < self.capacity {
            self.bytes.extend_to(self.capacity);
        }
        let at = (self.start + self.filled) % self.capacity;
        let (first, rest) = bytes.split_at(bytes.len().min(self.capacity - at));
        self.bytes[at..at + first.len()].copy_from_slice(first);
        self.bytes[..rest.len()].copy_from_slice(rest);
        self.filled += bytes.len();
    }

    /// Bytes that are stored together, `skip` bytes after the first one.
    #[must_use]
    pub fn peek(&self, skip: usize, most: usize) -> &[u8] {
        let left = self.filled.saturating_sub(skip);
        let at = (self.start + skip) % self.capacity;
        let together = left.min(self.capacity - at).min(most);
        if together == 0 { &[] } else { &self.bytes[at..at + together] }
    }

    /// Removes this number of bytes at the front.
    pub fn consume(&mut self, bytes: usize) {
        let bytes = bytes.min(self.filled);
        self.start = (self.start + bytes) % self.capacity;
        self.filled -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_leave_in_order_across_the_end() {
        let mut ring = Ring::new(10);
        let (mut pushed, mut seen) = (0_u8, Vec::new());
        for round in 0..50 {
            let count = (round * 7 % 11).min(ring.room());
            let bytes: Vec<u8> = (0..count).map(|at| pushed.wrapping_add(at as u8)).collect();
            ring.push(&bytes);
            pushed = pushed.wrapping_add(count as u8);
            let skipped = ring.peek(1, 3).to_vec();
            let front = ring.peek(0, 4).to_vec();
            assert!(front.len() < 2 || skipped.first() == front.get(1));
            ring.consume(front.len());
            seen.extend(front);
        }
        assert!(seen.len() > 50);
        assert!(seen.iter().enumerate().all(|(at, byte)| *byte == at as u8), "{seen:?}");
        assert_eq!(ring.len() + ring.room(), 10);
        assert!(ring.peek(10, 5).is_empty());
    }
}
