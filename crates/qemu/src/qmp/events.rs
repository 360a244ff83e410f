//! Events that no caller has taken yet.

use std::collections::VecDeque;

use serde_json::Value;

/// How many of the newest events are kept: more than QEMU sends in a migration.
const MOST_EVENTS: usize = 4096;

/// The total length of their lines: 256 bytes for each, which few exceed. Parsed, they take a
/// multiple of it.
const MOST_BYTES: usize = 1 << 20;

/// Longer events are of no use to any caller, and would evict all others.
const MOST_EVENT_BYTES: usize = 64 << 10;

/// The newest events, as many as fit, in the order in which they came.
#[derive(Debug, Default)]
pub struct Events {
    /// Each with the length of its line.
    kept: VecDeque<(Value, usize)>,
    bytes: usize,
}

impl Events {
    /// Keeps an event whose line had this length.
    pub fn keep(&mut self, event: Value, bytes: usize) {
        if bytes > MOST_EVENT_BYTES {
            return;
        }
        self.kept.push_back((event, bytes));
        self.bytes += bytes;
        while self.kept.len() > MOST_EVENTS || self.bytes > MOST_BYTES {
            self.remove(0);
        }
    }

    /// Takes the first event that is wanted.
    pub fn take(&mut self, wanted: impl Fn(&Value) -> bool) -> Option<Value> {
        self.remove(self.kept.iter().position(|(event, _)| wanted(event))?)
    }

    /// Takes the last event that is wanted.
    pub fn take_last(&mut self, wanted: impl Fn(&Value) -> bool) -> Option<Value> {
        self.remove(self.kept.iter().rposition(|(event, _)| wanted(event))?)
    }

    /// Takes all events.
    pub fn take_all(&mut self) -> Vec<Value> {
        self.bytes = 0;
        self.kept.drain(..).map(|(event, _)| event).collect()
    }

    /// All events, without taking them.
    pub fn iter(&self) -> impl Iterator<Item = &Value> {
        self.kept.iter().map(|(event, _)| event)
    }

    /// Whether there are no events.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    fn remove(&mut self, at: usize) -> Option<Value> {
        let (event, bytes) = self.kept.remove(at)?;
        self.bytes -= bytes;
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn newest_events_are_kept_whatever_their_length() {
        for (bytes, fit) in [(0, MOST_EVENTS), (256, MOST_EVENTS), (MOST_EVENT_BYTES, 16)] {
            let mut events = Events::default();
            for number in 0..2 * MOST_EVENTS {
                events.keep(json!(number), bytes);
            }
            let first = 2 * MOST_EVENTS - fit;
            assert!(
                events
                    .iter()
                    .eq((first..2 * MOST_EVENTS).map(|n| json!(n)).collect::<Vec<_>>().iter())
            );
            assert_eq!(events.bytes, fit * bytes);
            assert_eq!(events.take(|event| event.as_u64() > Some(7)), Some(json!(first)));
            assert_eq!(events.take_last(|_| true), Some(json!(2 * MOST_EVENTS - 1)));
            assert_eq!(events.bytes, (fit - 2) * bytes);
            assert_eq!(events.take_all().len(), fit - 2);
            assert!(events.is_empty() && events.bytes == 0);
        }
    }

    #[test]
    fn oversized_event_displaces_no_other() {
        let mut events = Events::default();
        events.keep(json!("STOP"), 100);
        events.keep(json!("endless"), MOST_EVENT_BYTES + 1);
        assert_eq!(events.take_all(), [json!("STOP")]);
    }
}
