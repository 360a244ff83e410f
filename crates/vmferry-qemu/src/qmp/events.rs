//! Events that nobody has waited for yet.

use std::collections::VecDeque;

use serde_json::Value;

/// So many are kept, the newest ones: more than QEMU says in a migration.
const MOST_EVENTS: usize = 4096;

/// So long may their lines be together: 256 bytes for each, and few have more. Read, they take a multiple of it.
const MOST_BYTES: usize = 1 << 20;

/// Longer ones are none that anybody waits for, and would push out all others.
const MOST_EVENT_BYTES: usize = 64 << 10;

/// The newest events, as many as there is room for, in the order in which they came.
#[derive(Debug, Default)]
pub struct Events {
    /// Each with the length of its line.
    kept: VecDeque<(Value, usize)>,
    bytes: usize,
}

impl Events {
    /// Keeps one, whose line is so long.
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

    /// The first that is wanted.
    pub fn take(&mut self, wanted: impl Fn(&Value) -> bool) -> Option<Value> {
        self.remove(self.kept.iter().position(|(event, _)| wanted(event))?)
    }

    /// The last that is wanted.
    pub fn take_last(&mut self, wanted: impl Fn(&Value) -> bool) -> Option<Value> {
        self.remove(self.kept.iter().rposition(|(event, _)| wanted(event))?)
    }

    /// All of them.
    pub fn take_all(&mut self) -> Vec<Value> {
        self.bytes = 0;
        self.kept.drain(..).map(|(event, _)| event).collect()
    }

    /// All of them, left where they are.
    pub fn iter(&self) -> impl Iterator<Item = &Value> {
        self.kept.iter().map(|(event, _)| event)
    }

    /// Whether there is none.
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
    fn the_newest_are_kept_however_long_they_are() {
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
    fn one_that_is_too_long_pushes_out_no_other() {
        let mut events = Events::default();
        events.keep(json!("STOP"), 100);
        events.keep(json!("endless"), MOST_EVENT_BYTES + 1);
        assert_eq!(events.take_all(), [json!("STOP")]);
    }
}
