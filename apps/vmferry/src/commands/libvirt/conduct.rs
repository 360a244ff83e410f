//! Conducts a migration while `virsh migrate` runs: asks for statistics, and aborts.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use serde_json::json;

use super::carried::{Carried, DaemonStreams};
use super::failure::AbortReason;
use super::job::JobStats;
use super::outcome::{Origin, is_final};
use super::service::{Input, LibvirtService, POSTCOPY, set_downtime_limit};
use super::virsh::{Running, VirshError};
use super::watch::Watch;
use crate::args::{MigrationOptions, WhenStuck};
use crate::output::Output;
use crate::progress::Progress;

/// How often libvirt is asked. A question costs some 30 ms of a processor.
const POLL_PERIOD: Duration = Duration::from_millis(500);

/// The same until libvirt's job has begun: a downtime limit is for a job, and a small guest's takes
/// a second.
const FIRST_POLL_PERIOD: Duration = Duration::from_millis(100);

/// libvirt has accepted an abort and the migration goes on: ask again after this time.
const ABORT_PERIOD: Duration = Duration::from_secs(5);

/// How long the event of a completed migration may take after the migration.
const EVENT_PATIENCE: Duration = Duration::from_secs(3);

/// A migration that runs.
pub struct Conductor<'a> {
    service: &'a LibvirtService,
    progress: &'a Progress<'a>,
    output: &'a Output,
    options: &'a MigrationOptions,
    watch: Watch,
    streams: &'a DaemonStreams,
    /// What the daemon said last.
    carried: Option<Carried>,
    began: Instant,
    /// A downtime limit that libvirt has not accepted so far.
    unset_limit: Option<Duration>,
    is_suspended: bool,
    has_begun: bool,
    abort: Option<Abort>,
    is_too_late: bool,
}

/// An order to abort.
struct Abort {
    reason: AbortReason,
    /// When libvirt is asked next.
    next: Instant,
}

impl<'a> Conductor<'a> {
    /// For a migration that begins now.
    pub fn new(
        service: &'a LibvirtService,
        progress: &'a Progress<'a>,
        output: &'a Output,
        options: &'a MigrationOptions,
        watch: Watch,
        streams: &'a DaemonStreams,
    ) -> Self {
        Self {
            service,
            progress,
            output,
            options,
            watch,
            streams,
            carried: None,
            began: Instant::now(),
            unset_limit: None,
            is_suspended: false,
            has_begun: false,
            abort: None,
            is_too_late: false,
        }
    }

    /// Tells libvirt the downtime limit that the user chose, if any, when its job has begun.
    pub fn set_downtime_limit(&mut self, limit: Option<Duration>) {
        self.unset_limit = limit;
    }

    /// Waits for the end of the migration.
    pub fn run(&mut self, inputs: &Receiver<Input>) -> Result<(), VirshError> {
        let mut next = Instant::now() + FIRST_POLL_PERIOD;
        loop {
            // The service keeps a sender, so the channel stays open.
            match inputs.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(Input::Ended(result)) => return result,
                Ok(Input::Cancel) => self.begin_abort(AbortReason::Cancelled),
                Ok(Input::DowntimeLimit(limit)) => {
                    self.watch.set_downtime_limit(limit);
                    self.unset_limit = None;
                }
                Ok(Input::Cap(cap)) => self.watch.set_cap(cap),
                Err(_) => {
                    self.poll();
                    let period = if self.has_begun { POLL_PERIOD } else { FIRST_POLL_PERIOD };
                    next = Instant::now() + period;
                }
            }
        }
    }

    /// Why the migration was aborted, if it was.
    pub fn abort_reason(&self) -> Option<&AbortReason> {
        self.abort.as_ref().map(|abort| &abort.reason)
    }

    /// Takes the final statistics of a guest that has moved: of the event, of the completed job, or
    /// of the last question.
    pub fn finish(mut self, event: Option<Running>) -> (Watch, Origin, f64) {
        let total_ms = self.elapsed_ms();
        if self.unset_limit.is_some() {
            self.output.note("the guest moved before libvirt took the downtime limit");
        }
        let of_event = event.and_then(|event| event.output_within(EVENT_PATIENCE));
        let mut last = of_event.map(|text| JobStats::parse(&text)).filter(is_final);
        if last.is_none() {
            // A transient guest is gone here.
            let uuid = &self.service.uuid;
            let asked = ["domjobinfo", "--domain", uuid, "--rawstats", "--completed"];
            let text = self.service.virsh.run(&asked).ok();
            last = text.map(|text| JobStats::parse(&text)).filter(is_final);
        }
        let origin = if last.is_some() { Origin::Completed } else { Origin::LastPoll };
        let mut last = last.unwrap_or_else(|| self.watch.last().clone());
        last.carried = self.streams.carried_in_all().or(self.carried);
        if let Some(done) = self.watch.finish(Some(&last), total_ms) {
            self.progress.event(&done);
        }
        (self.watch, origin, total_ms)
    }

    fn elapsed_ms(&self) -> f64 {
        self.began.elapsed().as_secs_f64() * 1e3
    }

    fn poll(&mut self) {
        let service = self.service;
        let asked = ["domjobinfo", "--domain", &service.uuid, "--rawstats"];
        // A domain that can't be asked has just moved or ended; `virsh migrate` reports it.
        let Ok(text) = service.virsh.run(&asked) else { return };
        let mut stats = JobStats::parse(&text);
        self.has_begun |= stats.is_active;
        if stats.is_active
            && let Some(limit) = self.unset_limit
            && set_downtime_limit(&service.virsh, &service.uuid, limit).is_ok()
        {
            self.unset_limit = None;
        }
        if let Some(now) = self.streams.carried() {
            let before = self.carried.take().unwrap_or_default();
            for event in now.events_since(&before) {
                self.progress.event(&event);
            }
            self.carried = Some(now);
        }
        stats.carried.clone_from(&self.carried);
        let now = self.elapsed_ms();
        for event in self.watch.observe(&stats, now) {
            self.progress.event(&event);
        }
        *service.progress.lock() = self.watch.progress(&stats, now);
        if self.abort.as_ref().is_some_and(|abort| abort.next <= Instant::now()) {
            self.try_abort();
        }
        self.check_timeout(&stats, now);
    }

    fn check_timeout(&mut self, stats: &JobStats, now_ms: f64) {
        let Some(timeout) = self.options.timeout else { return };
        let is_over = self.watch.copying_ms(now_ms) >= timeout.as_secs_f64() * 1e3;
        if !is_over || !stats.is_active || self.watch.is_postcopy(stats) || self.is_too_late {
            return;
        }
        match self.options.when_stuck {
            WhenStuck::Refuse if self.abort.is_none() => {
                let expected = self.watch.predicted_downtime_ms().map_or_else(String::new, |ms| {
                    format!(", and a switchover would pause the guest for {ms:.0} ms")
                });
                let why = format!("its rounds have taken {timeout:?}{expected}");
                self.begin_abort(AbortReason::NotConverging(why));
            }
            WhenStuck::SwitchOver if !self.is_suspended => {
                // libvirt resumes the guest where it ends up, because it was running before.
                let service = self.service;
                self.is_suspended =
                    service.virsh.run(&["suspend", "--domain", &service.uuid]).is_ok();
                if self.is_suspended {
                    let expected = self.watch.predicted_downtime_ms();
                    let paused = json!({ "event": "paused", "predicted_downtime_ms": expected });
                    self.progress.event(&paused);
                }
            }
            WhenStuck::Refuse | WhenStuck::SwitchOver | WhenStuck::PostCopy => {}
        }
    }

    fn begin_abort(&mut self, reason: AbortReason) {
        self.abort = Some(Abort { reason, next: Instant::now() });
        self.try_abort();
    }

    /// Asks libvirt to abort. Before libvirt's job begins there is nothing to abort, so it is asked
    /// again.
    fn try_abort(&mut self) {
        let service = self.service;
        let Some(abort) = &mut self.abort else { return };
        match service.virsh.run(&["domjobabort", "--domain", &service.uuid]) {
            Ok(_) => abort.next = Instant::now() + ABORT_PERIOD,
            Err(VirshError::Failed { message, .. }) if message.contains("post-copy") => {
                self.abort = None;
                self.is_too_late = true;
                let event = json!({ "event": "too-late-to-cancel", "reason": POSTCOPY });
                self.progress.event(&event);
                self.output.note(POSTCOPY);
            }
            Err(_) => {}
        }
    }
}
