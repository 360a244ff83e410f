//! Rate limit for notices about connections that were turned away: one for each address and second.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::room::Origin;
use crate::driver::destination::notice::Notice;

/// Interval between two notices about one address.
const PERIOD: Duration = Duration::from_secs(1);

/// The most addresses that are tracked individually. All others are reported together.
const MOST_ORIGINS: usize = 64;

/// The notices that were sent, and what was not reported yet.
#[derive(Debug, Default)]
pub struct Complaints {
    /// By address. `None` is for addresses that are not tracked individually.
    by_origin: BTreeMap<Option<Origin>, Record>,
}

#[derive(Debug)]
struct Record {
    said: Instant,
    /// Number of events since the last notice, and the most recent of them.
    since: u64,
    last: Option<(String, String)>,
}

impl Complaints {
    /// Records a connection that was turned away. Returns the notice to send at once, if any.
    pub fn note(
        &mut self,
        origin: Origin,
        peer: String,
        reason: String,
        now: Instant,
    ) -> Option<Notice> {
        self.by_origin.retain(|_, record| record.since > 0 || now < record.said + PERIOD);
        let known = self.by_origin.contains_key(&Some(origin));
        let key = (known || self.by_origin.len() < MOST_ORIGINS).then_some(origin);
        if let Some(record) = self.by_origin.get_mut(&key) {
            record.since += 1;
            record.last = Some((peer, reason));
            return None;
        }
        self.by_origin.insert(key, Record { said: now, since: 0, last: None });
        Some(Notice::TurnedAway { peer, reason })
    }

    /// The notices that have become due.
    pub fn due(&mut self, now: Instant) -> Vec<Notice> {
        let mut notices = Vec::new();
        for (origin, record) in &mut self.by_origin {
            if now < record.said + PERIOD {
                continue;
            }
            let Some((peer, mut reason)) = record.last.take() else { continue };
            let more = std::mem::take(&mut record.since) - 1;
            record.said = now;
            if more > 0 {
                let from = origin.map_or("other addresses".into(), |origin| origin.to_string());
                reason.push_str(&format!(" (and {more} more connections from {from})"));
            }
            notices.push(Notice::TurnedAway { peer, reason });
        }
        notices
    }

    /// When the next notice is due.
    pub fn next_due(&self) -> Option<Instant> {
        let waiting = self.by_origin.values().filter(|record| record.since > 0);
        waiting.map(|record| record.said + PERIOD).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(number: u32) -> Origin {
        Origin::of(Some(std::net::Ipv4Addr::from(number).into()))
    }

    #[test]
    fn complaints_are_limited_per_address_and_second() {
        let now = Instant::now();
        let mut complaints = Complaints::default();
        let note = |complaints: &mut Complaints, origin, reason: &str, at| {
            complaints.note(from(origin), format!("peer {origin}"), reason.into(), at)
        };
        assert!(note(&mut complaints, 1, "first", now).is_some());
        assert!(note(&mut complaints, 2, "first", now).is_some(), "another address");
        assert_eq!(complaints.next_due(), None);
        for reason in ["second", "third", "fourth"] {
            assert!(note(&mut complaints, 1, reason, now).is_none());
        }
        assert!(complaints.due(now).is_empty());
        let then = complaints.next_due().unwrap();
        assert_eq!(then, now + PERIOD);
        let said = complaints.due(then);
        let reason = "fourth (and 2 more connections from 0.0.0.1)".to_owned();
        assert_eq!(said, [Notice::TurnedAway { peer: "peer 1".into(), reason }]);
        // A notice that was just sent delays the next one too.
        assert!(note(&mut complaints, 1, "fifth", then).is_none());
        assert!(note(&mut complaints, 1, "later", then + 3 * PERIOD).is_none(), "not said yet");
        assert_eq!(complaints.due(then + 3 * PERIOD).len(), 1);
        assert!(note(&mut complaints, 1, "much later", then + 5 * PERIOD).is_some());
    }

    #[test]
    fn complaints_stay_small_for_any_number_of_addresses() {
        let now = Instant::now();
        let mut complaints = Complaints::default();
        let said = (0..10_000)
            .filter_map(|number| complaints.note(from(number), String::new(), "x".into(), now))
            .count();
        assert_eq!(said, MOST_ORIGINS + 1);
        assert_eq!(complaints.by_origin.len(), MOST_ORIGINS + 1);
        let due = complaints.due(now + PERIOD);
        let Notice::TurnedAway { reason, .. } = &due[0] else { panic!("{due:?}") };
        assert!(reason.contains("from other addresses"), "{reason}");
    }
}
