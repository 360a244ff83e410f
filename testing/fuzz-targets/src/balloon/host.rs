//! The balloon's host, which checks the device's calls and records them.

use std::collections::HashSet;
use std::io;
use std::mem::discriminant;
use std::sync::{Arc, Mutex};

use vmferry_balloon::{BalloonHost, CommandId, GuestRange, Interrupt, QueueKind, Warning};

use super::twin::{Event, PAGE, REGIONS};

/// The host of the balloon. Clones are the same host.
#[derive(Clone, Default)]
pub(super) struct Host(Arc<Mutex<Seen>>);

/// The calls that the host has received, and its settings.
#[derive(Default)]
pub(super) struct Seen {
    pub events: Vec<Event>,
    pub warnings: HashSet<std::mem::Discriminant<Warning>>,
    /// The queues that may be in use, if they are known.
    pub queue: Option<QueueKind>,
    pub keeps_poison: bool,
    pub discards_fail: bool,
}

impl Host {
    pub fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.0.lock().unwrap()
    }

    fn expect(&self, kinds: &[QueueKind]) {
        let seen = self.seen();
        assert!(seen.queue.is_none_or(|kind| kinds.contains(&kind)), "amid {:?}", seen.queue);
    }
}

/// Checks for whole pages that belong to the guest.
fn check(range: GuestRange) {
    let (start, end) = (range.start.0, range.start.0 + range.bytes);
    assert!(
        range.bytes > 0 && start.is_multiple_of(PAGE) && range.bytes.is_multiple_of(PAGE),
        "{range:?}"
    );
    let within = |(first, bytes): &(u64, u64)| *first <= start && end <= first + bytes;
    assert!(REGIONS.iter().any(within), "{range:?} is not in guest memory");
}

impl BalloonHost for Host {
    fn discard(&mut self, range: GuestRange) -> io::Result<()> {
        check(range);
        self.expect(&[QueueKind::Inflate, QueueKind::Reporting]);
        let seen = self.seen();
        assert!(!(seen.keeps_poison && seen.queue == Some(QueueKind::Reporting)));
        if seen.discards_fail { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
    }

    fn hint(&mut self, range: GuestRange, id: CommandId, poison: Option<u32>) {
        self.expect(&[QueueKind::FreePage]);
        let hint = |page| Event::Hint { page, id: id.number(), poison };
        check(range);
        let pages = (range.start.0..range.start.0 + range.bytes).step_by(PAGE as usize);
        self.seen().events.extend(pages.map(hint));
    }

    fn hints_complete(&mut self, id: CommandId) {
        self.seen().events.push(Event::Complete(id.number()));
    }

    fn deflated(&mut self, range: GuestRange) {
        check(range);
        self.expect(&[QueueKind::Deflate]);
    }

    fn warning(&mut self, warning: Warning) {
        assert!(!warning.to_string().is_empty());
        assert!(self.seen().warnings.insert(discriminant(&warning)), "again: {warning}");
    }
}

impl Interrupt for Host {
    fn used_buffers(&mut self, queue: u16) {
        assert!(queue < 5);
    }

    fn config_changed(&mut self) {}
}
