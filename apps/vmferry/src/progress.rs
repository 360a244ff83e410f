//! How a migration is shown while it goes on: three lines that are redrawn on a terminal, a line for what happens
//! elsewhere, every event for machines.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytesize::ByteSize;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde_json::Value;

use crate::exit::Failure;
use crate::output::Output;
use crate::saved_run::SavedRun;

mod words;

pub use words::outlook;
use words::{describe, headline, rates, verdict};

const PAGE_BYTES: u64 = vmferry_memory::PAGE_SIZE as u64;

/// How often the spinner turns.
const TICK: Duration = Duration::from_millis(120);

/// The progress of one migration.
pub struct Progress<'a> {
    output: &'a Output,
    /// Whether machines want every event, or one object at the end.
    events: bool,
    state: Mutex<State>,
}

struct State {
    lines: Option<Lines>,
    saved: Option<SavedRun>,
    seen: Seen,
}

/// What the last events have said.
#[derive(Debug, Default)]
pub struct Seen {
    guest: String,
    to: String,
    downtime_limit_ms: f64,
    progress: Value,
    forecast: Value,
    /// Bytes per second that left lately, and what that is reckoned from: time and bytes of an earlier progress.
    sent_per_s: f64,
    before: Option<(f64, f64)>,
    /// The advice that stands on the screen.
    advised: bool,
}

/// What is redrawn.
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
        // Without a terminal any more, there is nobody to read it.
        let _ = self.all.println(text);
    }

    fn clear(&self) {
        for line in [&self.head, &self.bar, &self.tail] {
            line.finish_and_clear();
        }
    }
}

impl<'a> Progress<'a> {
    /// A progress on standard error if that is a terminal, of which a record is kept as well if there is one.
    pub fn new(output: &'a Output, events: bool, saved: Option<SavedRun>) -> Self {
        let lines = output.is_terminal().then(Lines::new);
        Self { output, events, state: Mutex::new(State { lines, saved, seen: Seen::default() }) }
    }

    /// Takes an event of the migration.
    pub fn event(&self, event: &Value) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(saved) = &mut state.saved {
            saved.event(&self.output.stamped(event));
        }
        if self.events && self.output.is_json() {
            self.output.event(event, String::new);
            return;
        }
        state.seen.take(event);
        let State { lines, seen, .. } = &mut *state;
        let said = verdict(event, seen);
        match lines {
            Some(lines) => {
                // What is redrawn says the rest.
                let lasting = matches!(
                    event["event"].as_str(),
                    Some(
                        "link-lost"
                            | "link-restored"
                            | "recalled"
                            | "in-doubt"
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

    /// Removes what is redrawn, and ends the record.
    pub fn finish(self, result: Result<&Value, &Failure>) {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
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
            // The bar begins anew before the next progress says so.
            Some("round-started") if self.progress.is_object() => {
                self.progress["round"] = event["round"].clone();
                self.progress["round_pages"] = event["pages"].clone();
                self.progress["round_sent_pages"] = 0.into();
            }
            _ => {}
        }
    }

    /// What left in the last second or so.
    fn measure(&mut self) {
        let now = self.progress["elapsed_ms"].as_f64().unwrap_or_default();
        let bytes = self.progress["sent_bytes"].as_f64().unwrap_or_default();
        match self.before {
            Some((then, sent)) if now - then >= 900.0 => {
                self.sent_per_s = (bytes - sent) * 1e3 / (now - then);
                self.before = Some((now, bytes));
            }
            Some((then, sent)) if self.sent_per_s == 0.0 && now > then => {
                self.sent_per_s = (bytes - sent) * 1e3 / (now - then);
            }
            None => self.before = Some((now, bytes)),
            Some(_) => {}
        }
    }
}
