//! The user's control over a running migration, and its progress, from any thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crossbeam_channel::Sender;
use parking_lot::Mutex;
use serde::Serialize;

use crate::data::source::sent::SentCounters;
use crate::machine::source::change::Change;
use crate::machine::source::io::{Input, Report};
use crate::stats::forecast::Forecast;
use vmferry_handover::{OperatorWord, SourceState};

/// A handle to one migration. Orders given before it starts are kept.
///
/// ```
/// use vmferry::config::BandwidthCap;
/// use vmferry::source::{Change, Orders};
///
/// let orders = Orders::new();
/// let handle = orders.clone(); // For another thread, such as a control socket's.
/// let cap = BandwidthCap::new(500 << 20)?;
/// handle.change(Change { max_bandwidth: Some(Some(cap)), ..Change::default() });
/// assert!(!handle.progress().in_doubt);
/// handle.cancel();
/// # Ok::<(), vmferry::config::ConfigError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Orders(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    sent: Arc<SentCounters>,
    progress: Mutex<Shown>,
}

/// The progress shown, and the values that it is computed from.
#[derive(Debug, Default)]
struct Shown {
    progress: Progress,
    began: Option<Instant>,
    /// Pages that were sent before the present round.
    sent_before: u64,
}

#[derive(Debug, Default)]
struct Inbox {
    sender: Option<Sender<Input>>,
    cancelled: bool,
    /// Changes requested before the migration starts.
    change: Change,
    /// The hold was released before the migration starts.
    released: bool,
}

/// The progress of a migration.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Progress {
    /// The phase in words.
    pub phase: &'static str,
    /// The present round, from 1; 0 before the first.
    pub round: u32,
    /// Pages of that round.
    pub round_pages: u64,
    /// Of these, pages that were passed to the data channels. Neither number includes pages that
    /// the guest hinted free.
    pub round_sent_pages: u64,
    /// Time since the migration began, in milliseconds.
    pub elapsed_ms: f64,
    /// Bytes passed to the data channels since the start.
    pub sent_bytes: u64,
    /// Pages with content passed to the data channels since the start.
    pub sent_content_pages: u64,
    /// Zero pages announced on them.
    pub sent_zero_pages: u64,
    /// COMMIT is journaled and the destination's answer is unknown: the guest is paused.
    pub in_doubt: bool,
    /// The destination runs the guest, and fetches pages of its memory from here. `round_pages` are
    /// the pages that it lacked, and `round_sent_pages` those that were sent to it.
    pub serving: bool,
    /// With `serving`: the guest has crashed at the destination, and what it lacked is kept until
    /// an operator gives it up.
    pub crashed: bool,
    /// The destination's address.
    pub destination: String,
    /// Everything except the switchover is done, and the migration is held.
    pub held: bool,
    /// The forecast after the last harvest.
    pub forecast: Option<Forecast>,
}

impl Orders {
    /// A handle to a future migration.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Cancels the migration; the guest stays at the source. Has no effect after COMMIT.
    pub fn cancel(&self) {
        let mut inbox = self.0.inbox.lock();
        inbox.cancelled = true;
        if let Some(sender) = &inbox.sender {
            let _ = sender.send(Input::Cancel);
        }
    }

    /// Changes settings from now on.
    pub fn change(&self, change: Change) {
        let mut inbox = self.0.inbox.lock();
        inbox.change.join(&change);
        if let Some(sender) = &inbox.sender {
            let _ = sender.send(Input::Change(change));
        }
    }

    /// Releases a migration that is held before its switchover
    /// ([`pause_before_switchover`](crate::SourceConfig::pause_before_switchover)).
    pub fn switch_over(&self) {
        let mut inbox = self.0.inbox.lock();
        inbox.released = true;
        self.0.progress.lock().progress.held = false;
        if let Some(sender) = &inbox.sender {
            let _ = sender.send(Input::SwitchOver);
        }
    }

    /// Resolves a handover that is in doubt. Returns whether there is one.
    pub fn decide(&self, word: OperatorWord) -> bool {
        if !self.progress().in_doubt {
            return false;
        }
        self.0
            .inbox
            .lock()
            .sender
            .as_ref()
            .is_some_and(|sender| sender.send(Input::Operator(word)).is_ok())
    }

    /// Gives up a guest that the destination runs and of whose memory it still lacks pages: the
    /// destination is lost permanently. Returns whether this side serves pages now.
    pub fn give_up(&self) -> bool {
        if !self.progress().serving {
            return false;
        }
        let inbox = self.0.inbox.lock();
        inbox.sender.as_ref().is_some_and(|sender| sender.send(Input::GiveUp).is_ok())
    }

    /// The progress so far.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let (mut progress, began, before) = {
            let shown = self.0.progress.lock();
            (shown.progress.clone(), shown.began, shown.sent_before)
        };
        let sent = &self.0.sent;
        progress.elapsed_ms = began.map_or(0.0, |began| began.elapsed().as_secs_f64() * 1e3);
        progress.sent_bytes = sent.bytes.load(Ordering::Relaxed);
        progress.sent_content_pages = sent.content_pages.load(Ordering::Relaxed);
        progress.sent_zero_pages = sent.zero_pages.load(Ordering::Relaxed);
        let round_sent = match progress.serving {
            true => sent.served_pages.load(Ordering::Relaxed),
            false => {
                (progress.sent_content_pages + progress.sent_zero_pages).saturating_sub(before)
            }
        };
        progress.round_sent_pages = round_sent.min(progress.round_pages);
        progress
    }

    /// Connects the handle to the migration that starts now. Returns whether it is already
    /// canceled.
    pub(crate) fn attach(&self, sender: Sender<Input>) -> bool {
        let mut inbox = self.0.inbox.lock();
        if inbox.change != Change::default() {
            let _ = sender.send(Input::Change(inbox.change));
        }
        if inbox.released {
            let _ = sender.send(Input::SwitchOver);
        }
        inbox.sender = Some(sender);
        inbox.cancelled
    }

    pub(crate) fn detach(&self) {
        self.0.inbox.lock().sender = None;
    }

    pub(crate) fn sent(&self) -> Arc<SentCounters> {
        Arc::clone(&self.0.sent)
    }

    pub(crate) fn publish_destination(&self, destination: String) {
        self.0.progress.lock().progress.destination = destination;
    }

    pub(crate) fn publish(&self, phase: &'static str, state: SourceState) {
        let mut shown = self.0.progress.lock();
        shown.began.get_or_insert_with(Instant::now);
        shown.progress.phase = phase;
        shown.progress.in_doubt = matches!(state, SourceState::InDoubt { .. });
        shown.progress.serving = matches!(state, SourceState::Serving | SourceState::Ended);
        shown.progress.crashed = state == SourceState::Ended;
    }

    /// Updates the progress from a report.
    pub(crate) fn publish_report(&self, report: &Report) {
        let mut shown = self.0.progress.lock();
        let progress = &mut shown.progress;
        match report {
            Report::RoundStarted { round, pages, .. } | Report::PostCopy { round, pages } => {
                (progress.round, progress.round_pages) = (*round, *pages);
                let sent = &self.0.sent;
                shown.sent_before = sent.content_pages.load(Ordering::Relaxed)
                    + sent.zero_pages.load(Ordering::Relaxed);
            }
            Report::Forecast(forecast) => progress.forecast = Some(forecast.clone()),
            Report::Held { .. } => progress.held = true,
            Report::Paused { .. } => progress.held = false,
            _ => {}
        }
    }
}
