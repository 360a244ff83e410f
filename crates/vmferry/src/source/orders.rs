//! What the user can do to a migration under way, and see of it, from any thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::Sender;
use serde::Serialize;

use vmferry_codec::FrameCounts;

use super::io::Input;
use crate::config::{ConfigError, check_bandwidth};
use crate::handover::{OperatorWord, SourceState};

/// A handle on one migration. Orders given before it starts are kept.
///
/// ```
/// use vmferry::source::Orders;
///
/// let orders = Orders::new();
/// let handle = orders.clone(); // For another thread, such as a control socket's.
/// handle.set_max_bandwidth(Some(500 << 20))?;
/// assert!(handle.set_max_bandwidth(Some(1)).is_err(), "no migration ends under such a cap");
/// assert!(!handle.progress().in_doubt);
/// handle.cancel();
/// # Ok::<(), vmferry::config::ConfigError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Orders(Arc<Shared>);

/// What the lanes have handed to their channels so far.
#[derive(Debug, Default)]
pub(super) struct SentCounters {
    bytes: AtomicU64,
    frames: AtomicU64,
    content_pages: AtomicU64,
    zero_pages: AtomicU64,
}

impl SentCounters {
    pub(super) fn frame(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.frames.fetch_add(1, Ordering::Relaxed);
    }

    /// Bytes and frames so far.
    pub(super) fn so_far(&self) -> (u64, u64) {
        (self.bytes.load(Ordering::Relaxed), self.frames.load(Ordering::Relaxed))
    }

    pub(super) fn pages(&self, counts: &FrameCounts) {
        self.content_pages.fetch_add(counts.content_pages(), Ordering::Relaxed);
        self.zero_pages.fetch_add(counts.zero_pages, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    sent: Arc<SentCounters>,
    progress: Mutex<Progress>,
}

#[derive(Debug, Default)]
struct Inbox {
    sender: Option<Sender<Input>>,
    cancelled: bool,
    /// The cap that was asked for, if any was.
    cap: Option<Option<u64>>,
}

/// A glance at a migration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Progress {
    /// What it is doing, in words.
    pub phase: &'static str,
    /// The round under way, from 1; 0 before the first.
    pub round: u32,
    /// Pages of that round.
    pub round_pages: u64,
    /// Bytes handed to the data channels since the start.
    pub sent_bytes: u64,
    /// Pages with content handed to the data channels since the start.
    pub sent_content_pages: u64,
    /// Pages of zeros announced on them.
    pub sent_zero_pages: u64,
    /// COMMIT is journalled and nothing is known of the destination: the guest is paused.
    pub in_doubt: bool,
}

impl Orders {
    /// A handle on a migration to come.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the migration; the guest stays at the source. After COMMIT it has no effect.
    pub fn cancel(&self) {
        let mut inbox = self.inbox();
        inbox.cancelled = true;
        if let Some(sender) = &inbox.sender {
            let _ = sender.send(Input::Cancel);
        }
    }

    /// Caps all data channels together from now on, in bytes per second; `None` takes the cap back.
    ///
    /// # Errors
    /// A cap that no migration ends under.
    pub fn set_max_bandwidth(&self, cap: Option<u64>) -> Result<(), ConfigError> {
        check_bandwidth(cap)?;
        let mut inbox = self.inbox();
        inbox.cap = Some(cap);
        if let Some(sender) = &inbox.sender {
            let _ = sender.send(Input::MaxBandwidth(cap));
        }
        Ok(())
    }

    /// Decides a hand-over that is in doubt; whether there is one.
    pub fn decide(&self, word: OperatorWord) -> bool {
        if !self.progress().in_doubt {
            return false;
        }
        self.inbox()
            .sender
            .as_ref()
            .is_some_and(|sender| sender.send(Input::Operator(word)).is_ok())
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let mut progress = self.0.progress.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let sent = &self.0.sent;
        progress.sent_bytes = sent.bytes.load(Ordering::Relaxed);
        progress.sent_content_pages = sent.content_pages.load(Ordering::Relaxed);
        progress.sent_zero_pages = sent.zero_pages.load(Ordering::Relaxed);
        progress
    }

    /// Connects the handle to the migration that starts now; whether it is cancelled already.
    pub(super) fn attach(&self, sender: Sender<Input>) -> bool {
        let mut inbox = self.inbox();
        if let Some(cap) = inbox.cap {
            let _ = sender.send(Input::MaxBandwidth(cap));
        }
        inbox.sender = Some(sender);
        inbox.cancelled
    }

    pub(super) fn detach(&self) {
        self.inbox().sender = None;
    }

    pub(super) fn sent(&self) -> Arc<SentCounters> {
        Arc::clone(&self.0.sent)
    }

    pub(super) fn publish(&self, phase: &'static str, state: SourceState) {
        let mut progress = self.0.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.phase = phase;
        progress.in_doubt = matches!(state, SourceState::InDoubt { .. });
    }

    pub(super) fn publish_round(&self, round: u32, pages: u64) {
        let mut progress = self.0.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.round = round;
        progress.round_pages = pages;
    }

    fn inbox(&self) -> std::sync::MutexGuard<'_, Inbox> {
        self.0.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
