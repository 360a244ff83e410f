//! Listens for the events of a QEMU that migrates.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmferry::vmm::streamed::{StreamEvent, StreamEvents};
use vmferry_memory::PAGE_SIZE;

use super::monitor::Monitor;
use crate::error::QemuError;
use crate::proc_stat;
use crate::process::{END_TIMEOUT, has_ended_within, pidfd};
use crate::qmp::{Qmp, QmpError};
use crate::state;

/// How long QEMU's process may be stopped while it streams. It must be less than the 30 s for which
/// the engine waits for a frame: after these it would blame the destination.
pub const STOPPED_TIMEOUT: Duration = Duration::from_secs(20);

/// How often the wait checks whether the end of the stream still matters.
const LOOK_PERIOD: Duration = Duration::from_millis(500);

/// A thread that reports QEMU's migration events to the engine, until the migration has ended.
#[derive(Debug)]
pub struct Watch {
    over: Arc<AtomicBool>,
}

/// A migration that QEMU was told to start.
#[derive(Debug)]
pub struct Begun {
    /// When QEMU was told.
    pub at: Instant,
    /// When the guest was paused, if that was before QEMU began.
    pub stopped: Option<Instant>,
    /// Pages of all blocks.
    pub pages: u64,
    /// Receives whether the guest was already paused when QEMU stopped it, once the stream has said
    /// so.
    pub paused: Receiver<bool>,
}

/// The state of the thread.
struct Watcher {
    over: Arc<AtomicBool>,
    begun: Begun,
    /// Since when vmferry or QEMU's migration has paused the guest.
    stopped: Option<Instant>,
    /// QEMU has stopped the guest.
    held: bool,
    /// The guest runs at the destination, or is about to, and lacks pages.
    post_copy: bool,
    /// QEMU's process, if it is visible.
    process: Option<OwnedFd>,
    /// Since when QEMU's process is known to be stopped.
    asleep: Option<Instant>,
    /// That it is stopped was reported.
    told: bool,
}

impl Begun {
    /// The time of an event, by the clock that QEMU stamps events with, which can be set meanwhile.
    fn since(&self, timestamp: &Value) -> Instant {
        let age = state::age(timestamp).unwrap_or_default();
        Instant::now().checked_sub(age).map_or(self.at, |since| since.max(self.at))
    }
}

impl Watch {
    /// Starts listening.
    ///
    /// # Errors
    /// System call errors.
    pub fn start(
        monitor: Arc<Monitor>,
        begun: Begun,
        tell: StreamEvents,
    ) -> Result<Self, QemuError> {
        let over = Arc::new(AtomicBool::new(false));
        let mut watcher = Watcher {
            over: Arc::clone(&over),
            stopped: begun.stopped,
            begun,
            held: false,
            post_copy: false,
            process: monitor.pid().and_then(|pid| pidfd(pid).ok()),
            asleep: None,
            told: false,
        };
        std::thread::Builder::new()
            .name("qemu-events".into())
            .spawn(move || watcher.listen(&monitor, &tell))
            .map_err(|source| QemuError::Local { action: "start a thread", source })?;
        Ok(Self { over })
    }

    /// Stops reporting. May be called from within a report.
    pub fn end(&self, monitor: &Monitor) {
        self.over.store(true, Ordering::Release);
        monitor.wake();
    }
}

impl Watcher {
    fn listen(&mut self, monitor: &Monitor, tell: &StreamEvents) {
        loop {
            // The lock must be free when the engine is notified: the engine may send commands
            // itself.
            let news = self.news(&mut monitor.orders());
            let is_heard = news.is_ok();
            for event in news.unwrap_or_else(|error| vec![self.failure(error)]) {
                if matches!(event, StreamEvent::Completed) {
                    self.learn_from_stream(monitor);
                }
                if self.is_over() {
                    return;
                }
                let last = match event {
                    StreamEvent::Completed | StreamEvent::Ended(_) => true,
                    // The memory of a QEMU whose post-copy has failed is still needed.
                    StreamEvent::Failed(_) => !(self.post_copy && is_heard),
                    _ => false,
                };
                tell(event);
                if last {
                    return;
                }
            }
            if self.is_over() {
                return;
            }
            let listened = monitor
                .listen()
                .map_err(|source| QemuError::Local { action: "listen to QEMU", source });
            match listened.and_then(|()| self.must_not_sleep(monitor.pid())) {
                Ok(()) => {}
                // The guest can't be resumed here, so QEMU is waited for.
                Err(error @ QemuError::Stopped { .. }) if self.post_copy => {
                    if !std::mem::replace(&mut self.told, true) {
                        tell(StreamEvent::Failed(error.into()));
                    }
                }
                Err(error) => {
                    tell(StreamEvent::Failed(error.into()));
                    return;
                }
            }
        }
    }

    /// QEMU can't be listened to any more.
    fn failure(&self, error: QemuError) -> StreamEvent {
        let has_ended = |process| has_ended_within(process, END_TIMEOUT).unwrap_or(false);
        if self.post_copy && self.process.as_ref().is_some_and(has_ended) {
            return StreamEvent::Ended(error.into());
        }
        StreamEvent::Failed(error.into())
    }

    /// Learns from the stream, all of which has left QEMU, whether the guest was already paused
    /// when QEMU stopped it. Events can't tell: by the time the pause is noticed QEMU may have
    /// stopped the guest too, and reports only its own run state from then on.
    fn learn_from_stream(&self, monitor: &Monitor) {
        loop {
            match self.begun.paused.recv_timeout(LOOK_PERIOD) {
                Ok(true) => return monitor.orders().was_paused(),
                Ok(false) | Err(RecvTimeoutError::Disconnected) => return,
                // The reader of the stream is waiting for the link.
                Err(RecvTimeoutError::Timeout) if self.is_over() => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// A QEMU whose process is stopped reports nothing, and sends nothing.
    fn must_not_sleep(&mut self, pid: Option<u32>) -> Result<(), QemuError> {
        let Some(pid) = pid else { return Ok(()) };
        if !proc_stat::is_stopped(pid) {
            (self.asleep, self.told) = (None, false);
        } else if self.asleep.get_or_insert_with(Instant::now).elapsed() >= STOPPED_TIMEOUT {
            return Err(QemuError::Stopped { pid, after: STOPPED_TIMEOUT });
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// The events since the last call, in order.
    fn news(&mut self, qmp: &mut Qmp) -> Result<Vec<StreamEvent>, QemuError> {
        if self.is_over() {
            return Ok(Vec::new());
        }
        let events = qmp.events();
        // A QEMU that ends with its guest gives its migration up, which is not the cause.
        qmp.must_be_alive()?;
        let events = events?;
        let last_pass = events.iter().rposition(|event| event["event"] == "MIGRATION_PASS");
        let mut news = Vec::new();
        for (at, event) in events.iter().enumerate() {
            match event["event"].as_str() {
                Some("STOP") => {
                    // QEMU does not answer while it sends the last pages.
                    if !self.held {
                        qmp.heard_stop()?;
                    }
                    if !qmp.is_paused_by_others() {
                        self.stopped.get_or_insert(self.begun.since(&event["timestamp"]));
                    }
                }
                Some("RESUME") => self.stopped = None,
                // The last pass is not queried: QEMU does not answer until it is done.
                Some("MIGRATION_PASS") if Some(at) == last_pass && !self.held => {
                    news.extend(self.pass(qmp, &event["data"]["pass"])?);
                }
                Some("MIGRATION") => match event["data"]["status"].as_str() {
                    Some("pre-switchover") => news.push(self.stopped(qmp)?),
                    Some("postcopy-active") => self.post_copy = true,
                    Some("completed") => news.push(StreamEvent::Completed),
                    // The guest stays paused.
                    Some("failed" | "cancelled") if self.post_copy => {
                        news.push(StreamEvent::Failed(state::post_copy_failed(qmp)?.into()));
                    }
                    Some("failed" | "cancelled") => {
                        news.push(StreamEvent::Failed(state::given_up(qmp)?.into()));
                    }
                    _ => {}
                },
                _ => {}
            }
        }
        Ok(news)
    }

    /// A pass over memory begins.
    fn pass(&self, qmp: &mut Qmp, number: &Value) -> Result<Option<StreamEvent>, QmpError> {
        let Some(number) = number.as_u64().and_then(|number| u32::try_from(number).ok()) else {
            return Ok(None);
        };
        let migration = qmp.execute("query-migrate", json!({}))?;
        let ram = &migration["ram"];
        // The first pass sends everything, and QEMU may have no figures yet.
        let pages =
            ram["remaining"].as_u64().filter(|_| number > 1).map(|left| left / PAGE_SIZE as u64);
        let dirty_pages_per_s = ram["dirty-pages-rate"].as_f64().unwrap_or_default();
        let pages = pages.unwrap_or(self.begun.pages);
        Ok(Some(StreamEvent::Pass { number, pages, dirty_pages_per_s }))
    }

    /// QEMU has paused the guest, or has found it paused.
    fn stopped(&mut self, qmp: &mut Qmp) -> Result<StreamEvent, QmpError> {
        self.held = true;
        let migration = qmp.execute("query-migrate", json!({}))?;
        let expected = migration["expected-downtime"].as_u64().unwrap_or_default();
        let left = migration["ram"]["remaining"].as_u64().unwrap_or_default();
        Ok(StreamEvent::Stopped {
            stood_still: self.stopped.map_or(Duration::ZERO, |since| since.elapsed()),
            expected_downtime: Duration::from_millis(expected),
            pages: left / PAGE_SIZE as u64,
        })
    }
}
