//! Shows a running migration: three lines that are redrawn on a terminal, one line per event
//! elsewhere, and every event as JSON for machines.

use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use bytesize::ByteSize;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use serde_json::{Value, json};
use vmferry::source::Orders;

use crate::exit::Failure;
use crate::output::Output;
use crate::saved_run::SavedRun;

pub mod fetch;
mod words;

pub use words::outlook;
use words::{describe, headline, rates, verdict};

const PAGE_BYTES: u64 = vmferry_memory::PAGE_SIZE as u64;

/// How often the spinner turns.
const TICK: Duration = Duration::from_millis(120);

/// How often progress is shown.
const PERIOD: Duration = Duration::from_millis(200);

/// The events of a migration in JSON output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonEvents {
    /// Every event is printed.
    All,
    /// No event is printed, only the result.
    None,
}

/// The progress of one migration.
pub struct Progress<'a> {
    output: &'a Output,
    json_events: JsonEvents,
    state: Mutex<State>,
}

struct State {
    lines: Option<Lines>,
    saved: Option<SavedRun>,
    seen: Seen,
}

/// What the last events reported.
#[derive(Debug, Default)]
pub struct Seen {
    guest: String,
    to: String,
    downtime_limit_ms: f64,
    progress: Value,
    forecast: Value,
    /// Bytes per second that were sent lately.
    sent_per_s: f64,
    /// An earlier progress event, to compute `sent_per_s`.
    earlier: Option<Sample>,
    /// Whether the last verdict shown was that the migration does not converge.
    advised: bool,
}

/// The time and the sent bytes of a progress event.
#[derive(Clone, Copy, Debug)]
struct Sample {
    ms: f64,
    bytes: f64,
}

/// The lines that are redrawn.
struct Lines {
    all: MultiProgress,
    head: ProgressBar,
    bar: ProgressBar,
    tail: ProgressBar,
}

impl Lines {
    fn new() -> Self {
        let all = MultiProgress::new();
        let style = |template: &str| {
            ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar())
                .progress_chars("=> ")
        };
        let head = all.add(ProgressBar::new_spinner());
        head.set_style(style("{spinner:.cyan} {wide_msg}"));
        let bar = all.add(ProgressBar::new(1));
        bar.set_style(style("  [{wide_bar:.cyan}] {percent:>3} % of {msg}"));
        let tail = all.add(ProgressBar::new_spinner());
        tail.set_style(style("  {wide_msg}"));
        head.enable_steady_tick(TICK);
        Self { all, head, bar, tail }
    }

    fn show(&self, seen: &Seen) {
        let pages = |name: &str| seen.progress[name].as_u64().unwrap_or_default();
        let (all, sent) = (pages("round_pages"), pages("round_sent_pages"));
        self.head.set_message(headline(seen));
        self.bar.set_length(all.max(1));
        self.bar.set_position(sent);
        self.bar.set_message(ByteSize(all * PAGE_BYTES).to_string());
        self.tail.set_message(rates(seen));
    }

    fn say(&self, text: &str) {
        // If the terminal is gone, nobody can read it.
        let _ = self.all.println(text);
    }

    fn clear(&self) {
        for line in [&self.head, &self.bar, &self.tail] {
            line.finish_and_clear();
        }
    }
}

impl<'a> Progress<'a> {
    /// Shows progress on standard error if that is a terminal, and writes a record if there is one.
    pub fn new(output: &'a Output, json_events: JsonEvents, saved: Option<SavedRun>) -> Self {
        let lines = output.is_terminal().then(Lines::new);
        let state = State { lines, saved, seen: Seen::default() };
        Self { output, json_events, state: Mutex::new(state) }
    }

    /// Sets the guest and its destination, which an event "started" would tell.
    pub fn of(mut self, guest: &str, to: &str) -> Self {
        let seen = &mut self.state.get_mut().seen;
        (seen.guest, seen.to) = (guest.to_owned(), to.to_owned());
        self
    }

    /// Shows the progress of a migration while `work` runs.
    pub fn during<R>(&self, orders: &Orders, work: impl FnOnce() -> R) -> R {
        let (over, is_over) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while is_over.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                    let mut event = json!(orders.progress());
                    event["event"] = json!("progress");
                    self.event(&event);
                }
            });
            let result = work();
            drop(over);
            result
        })
    }

    /// Handles an event of the migration.
    pub fn event(&self, event: &Value) {
        let mut state = self.state.lock();
        if let Some(saved) = &mut state.saved {
            saved.event(&self.output.stamped(event));
        }
        if self.json_events == JsonEvents::All && self.output.is_json() {
            self.output.event(event, String::new);
            return;
        }
        state.seen.take(event);
        let State { lines, seen, .. } = &mut *state;
        let said = verdict(event, seen);
        match lines {
            Some(lines) => {
                // The redrawn lines cover the other events.
                let lasting = matches!(
                    event["event"].as_str(),
                    Some(
                        "link-lost"
                            | "link-restored"
                            | "recalled"
                            | "in-doubt"
                            | "witness-decided"
                            | "serving-failed"
                            | "guest-crashed"
                            | "throttled"
                            | "held"
                            | "unknown-fields"
                            | "recording"
                    )
                );
                for text in said.into_iter().chain(describe(event).filter(|_| lasting)) {
                    lines.say(&text);
                }
                lines.show(seen);
            }
            None => {
                for text in describe(event).into_iter().chain(said) {
                    self.output.note(text);
                }
            }
        }
    }

    /// Clears the redrawn lines and completes the record.
    pub fn finish(self, result: Result<&Value, &Failure>) {
        let state = self.state.into_inner();
        if let Some(lines) = &state.lines {
            lines.clear();
        }
        let lost =
            state.saved.and_then(|saved| saved.end(result, |event| self.output.stamped(event)));
        if let Some(text) = lost {
            self.output.note(text);
        }
    }
}

impl Seen {
    fn take(&mut self, event: &Value) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match event["event"].as_str() {
            Some("started") => {
                (self.guest, self.to) = (text(&event["guest"]), text(&event["to"]));
                self.downtime_limit_ms =
                    event["limits"]["downtime_limit_ms"].as_f64().unwrap_or(0.0);
            }
            Some("forecast") => self.forecast = event.clone(),
            Some("progress") => {
                self.progress = event.clone();
                self.measure();
            }
            // Resets the bar before the next progress event.
            Some("round-started") if self.progress.is_object() => {
                self.progress["round"] = event["round"].clone();
                self.progress["round_pages"] = event["pages"].clone();
                self.progress["round_sent_pages"] = 0.into();
            }
            _ => {}
        }
    }

    /// Updates the rate at which bytes were sent during the last second or so.
    fn measure(&mut self) {
        let now = Sample {
            ms: self.progress["elapsed_ms"].as_f64().unwrap_or_default(),
            bytes: self.progress["sent_bytes"].as_f64().unwrap_or_default(),
        };
        let Some(earlier) = self.earlier else {
            self.earlier = Some(now);
            return;
        };
        let passed = now.ms - earlier.ms;
        let rate = (now.bytes - earlier.bytes) * 1e3 / passed;
        if passed >= 900.0 {
            self.sent_per_s = rate;
            self.earlier = Some(now);
        } else if self.sent_per_s == 0.0 && passed > 0.0 {
            self.sent_per_s = rate;
        }
    }
}
