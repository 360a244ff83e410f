//! A channel, and a message on it.

use std::time::Duration;

use crate::plan::Where;

/// Both ends of a channel.
#[derive(Debug, Default)]
pub(super) struct Channel {
    /// The time of the cut: nothing arrives after it.
    pub(super) cut: Option<Duration>,
    /// The ends that have closed it.
    pub(super) closed: [bool; 2],
    /// When the last byte for each host arrives.
    pub(super) last: [Duration; 2],
}

/// A message that is being sent.
pub(super) struct Message {
    pub(super) bytes: Vec<u8>,
    pub(super) delay: Duration,
    pub(super) copies: u32,
    pub(super) cut: Option<(Where, bool)>,
    /// It is a request for pages, or a page, which nobody sends again on the same channel.
    pub(super) fetches: bool,
}
