//! A request for pages, which a destination sends on a fetch lane while its guest already runs.
//!
//! ```text
//!  0      2       4        8
//!  +------+-------+--------+------------+
//!  | slot | pages |   0    | first page |
//!  +------+-------+--------+------------+ 16
//! ```
//! The source answers each request with one frame of these pages, in the order of the requests.

use vmferry_memory::{PageRun, SlotId};

use crate::error::WireError;
use crate::field;

/// Length of a request.
pub const PAGE_REQUEST_BYTES: usize = 16;

/// Maximum number of pages of a request, so that its answer is one frame of the usual length.
pub const MAX_REQUEST_PAGES: u16 = 64;

/// A request for a run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRequest {
    run: PageRun,
}

impl PageRequest {
    /// A request for these pages; `None` if there are none of them, or too many.
    #[must_use]
    pub fn new(run: PageRun) -> Option<Self> {
        let fits = (1..=u64::from(MAX_REQUEST_PAGES)).contains(&run.pages);
        (fits && run.first.checked_add(run.pages).is_some()).then_some(Self { run })
    }

    /// The pages.
    #[must_use]
    pub fn run(self) -> PageRun {
        self.run
    }

    /// Encodes the request.
    #[must_use]
    pub fn encode(self) -> [u8; PAGE_REQUEST_BYTES] {
        let mut bytes = [0; PAGE_REQUEST_BYTES];
        bytes[0..2].copy_from_slice(&self.run.slot.0.to_le_bytes());
        bytes[2..4].copy_from_slice(&(self.run.pages as u16).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.run.first.to_le_bytes());
        bytes
    }

    /// Parses a request. Whether the pages exist is for the caller to check.
    ///
    /// # Errors
    /// [`WireError::BadRequest`] for no pages, for too many, and for reserved bytes that are not 0.
    pub fn parse(bytes: &[u8; PAGE_REQUEST_BYTES]) -> Result<Self, WireError> {
        let run = PageRun {
            slot: SlotId(u16::from_le_bytes(field(bytes, 0))),
            first: u64::from_le_bytes(field(bytes, 8)),
            pages: u16::from_le_bytes(field(bytes, 2)).into(),
        };
        let reserved: [u8; 4] = field(bytes, 4);
        if reserved != [0; 4] {
            return Err(WireError::BadRequest("its reserved bytes are not 0".into()));
        }
        let bad = || format!("it asks for {} pages from page {} on", run.pages, run.first);
        Self::new(run).ok_or_else(|| WireError::BadRequest(bad()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u64, pages: u64) -> PageRun {
        PageRun { slot: SlotId(0x0201), first, pages }
    }

    #[test]
    fn golden_bytes_of_a_request() {
        let request = PageRequest::new(run(0x0a09_0807, 3)).unwrap();
        let bytes = [1, 2, 3, 0, 0, 0, 0, 0, 7, 8, 9, 10, 0, 0, 0, 0];
        assert_eq!(request.encode(), bytes);
        assert_eq!(PageRequest::parse(&bytes), Ok(request));
    }

    #[test]
    fn request_outside_its_limits_is_refused() {
        let most = u64::from(MAX_REQUEST_PAGES);
        assert!(PageRequest::new(run(0, most)).is_some());
        for (first, pages) in [(0, 0), (0, most + 1), (u64::MAX, 1)] {
            assert_eq!(PageRequest::new(run(first, pages)), None);
            let mut bytes = PageRequest { run: run(first, pages) }.encode();
            assert!(matches!(PageRequest::parse(&bytes), Err(WireError::BadRequest(_))));
            bytes[2] = 1;
            bytes[4] = 1;
            assert!(matches!(PageRequest::parse(&bytes), Err(WireError::BadRequest(_))));
        }
    }
}
