//! Turns the statistics that libvirt is asked for twice a second into the events that every
//! migration has. Rounds that pass between two questions are reported as one. The forecast is the
//! engine's, from these rounds.

use std::time::Duration;

use serde_json::{Value, json};
use vmferry::config::Limits;
use vmferry::rounds::convergence::{Harvest, Predictor};

use super::job::JobStats;

/// QEMU throttles vCPUs up to this percentage (`max-cpu-throttle`).
const MOST_THROTTLE: u64 = 99;

/// What was seen of a migration.
#[derive(Debug)]
pub struct Watch {
    limits: Limits,
    predictor: Predictor,
    postcopy: PostCopy,
    throttling: Throttling,
    round: Option<Round>,
    rounds: Vec<Value>,
    throttle: u64,
    /// The last statistics with memory in them.
    last: JobStats,
    /// Since when memory is copied.
    copying_since_ms: Option<f64>,
    /// When no memory was copied yet.
    before_copying_ms: f64,
    predicted_downtime_ms: Option<f64>,
    forecast: Value,
}

/// Whether the migration goes on as post-copy after the first round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostCopy {
    /// It does.
    AfterFirstRound,
    /// It does not.
    Off,
}

/// Whether QEMU may take time from the vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Throttling {
    /// It may (`--auto-converge`).
    Allowed,
    /// It may not.
    Off,
}

/// A round that is being sent.
#[derive(Clone, Debug)]
struct Round {
    number: u64,
    began_ms: f64,
    /// Pages that were left when it was first seen.
    pages: u64,
    /// The statistics of that moment.
    at_start: JobStats,
}

impl Watch {
    /// Nothing was seen so far. `cap` is the limit in bytes per second.
    pub fn new(
        limits: Limits,
        cap: Option<u64>,
        postcopy: PostCopy,
        throttling: Throttling,
    ) -> Self {
        Self {
            limits,
            predictor: Predictor::new(limits, cap),
            postcopy,
            throttling,
            round: None,
            rounds: Vec::new(),
            throttle: 0,
            last: JobStats::default(),
            copying_since_ms: None,
            before_copying_ms: 0.0,
            predicted_downtime_ms: None,
            forecast: Value::Null,
        }
    }

    /// The user has changed the limit.
    pub fn set_downtime_limit(&mut self, limit: Duration) {
        self.limits.downtime = limit;
        self.predictor.set_limits(self.limits);
    }

    /// The user has changed the cap, in bytes per second.
    pub fn set_cap(&mut self, cap: Option<u64>) {
        self.predictor.set_cap(cap);
    }

    /// Takes the statistics of a moment. Returns the events.
    pub fn observe(&mut self, stats: &JobStats, now_ms: f64) -> Vec<Value> {
        let mut events = Vec::new();
        if stats.has_memory() {
            self.copying_since_ms.get_or_insert(now_ms);
            let number = stats.number("memory_iteration");
            // Nothing is left once the last round, with the guest paused, is sent.
            let is_new = self
                .round
                .as_ref()
                .is_none_or(|round| round.number != number && stats.pending_pages() > 0);
            if number > 0 && is_new {
                let is_first = self.round.is_none();
                events.extend(self.end_round(stats, now_ms));
                if !is_first && !self.is_postcopy(stats) {
                    events.push(self.forecast(stats, now_ms));
                }
                events.push(self.begin_round(stats, number, now_ms));
            }
            let throttle = stats.number("auto_converge_throttle");
            if throttle != self.throttle {
                self.throttle = throttle;
                self.predictor.throttled(u8::try_from(throttle).unwrap_or(u8::MAX));
                events.push(json!({ "event": "throttled", "percent": throttle }));
            }
            if !self.rounds.is_empty() && stats.pending_pages() > 0 {
                let predicted = self.predictor.predict(stats.pending_pages());
                self.predicted_downtime_ms = Some(predicted.as_secs_f64() * 1e3);
            }
            self.last = stats.clone();
        } else {
            self.before_copying_ms = now_ms;
        }
        let mut progress = self.progress(stats, now_ms);
        progress["event"] = json!("progress");
        events.push(progress);
        events
    }

    /// The migration has ended. `last` are its final statistics, if they are known. Returns the
    /// last round's event.
    pub fn finish(&mut self, last: Option<&JobStats>, now_ms: f64) -> Option<Value> {
        if let Some(last) = last.filter(|last| last.has_memory()) {
            self.last = last.clone();
        }
        let last = self.last.clone();
        self.end_round(&last, now_ms)
    }

    /// The progress, with the members that every migration's progress has.
    pub fn progress(&self, stats: &JobStats, now_ms: f64) -> Value {
        let (mut pages, mut sent) = (0, 0);
        if let Some(round) = self.round.as_ref() {
            pages = round.pages;
            sent = pages.saturating_sub(stats.pending_pages());
        }
        let (disk, copied) = (stats.number("disk_total"), stats.number("disk_processed"));
        let number = |name| self.last.number(name);
        json!({
            "phase": self.phase(stats),
            "round": self.round.as_ref().map_or(0, |round| round.number),
            "round_pages": pages,
            "round_sent_pages": sent,
            "elapsed_ms": now_ms,
            "sent_bytes": stats.sent_bytes(),
            "sent_content_pages": number("memory_normal"),
            "sent_zero_pages": number("memory_constant"),
            "disk_bytes": disk,
            "disk_sent_bytes": copied,
            "in_doubt": false,
            "held": false,
            "forecast": self.forecast,
        })
    }

    /// The phase in words.
    pub fn phase(&self, stats: &JobStats) -> &'static str {
        if self.is_postcopy(stats) {
            "post-copy"
        } else if stats.has_memory() && (stats.pending_pages() > 0 || self.round.is_none()) {
            "pre-copy"
        } else if stats.number("disk_total") > 0 {
            "the copy of disks"
        } else if self.last.has_memory() {
            "the handover"
        } else {
            "the preparation"
        }
    }

    /// Whether the guest runs at the destination while its memory follows.
    pub fn is_postcopy(&self, stats: &JobStats) -> bool {
        let number = |name| stats.number(name).max(self.last.number(name));
        number("memory_postcopy_requests") > 0
            || self.postcopy == PostCopy::AfterFirstRound && number("memory_iteration") > 1
    }

    /// For how long memory has been copied.
    pub fn copying_ms(&self, now_ms: f64) -> f64 {
        self.copying_since_ms.map_or(0.0, |since| now_ms - since)
    }

    /// The rounds that were seen.
    pub fn rounds(&self) -> &[Value] {
        &self.rounds
    }

    /// The last statistics with memory in them.
    pub fn last(&self) -> &JobStats {
        &self.last
    }

    /// The last prediction of the downtime; `None` until a round was measured.
    pub fn predicted_downtime_ms(&self) -> Option<f64> {
        self.predicted_downtime_ms
    }

    fn begin_round(&mut self, stats: &JobStats, number: u64, now_ms: f64) -> Value {
        // The first round has all pages. Some of them are sent already when it is first seen, and
        // other rounds may have passed too.
        let is_first = self.rounds.is_empty();
        let round = if is_first {
            let pages = stats.number("memory_total") / stats.page_bytes();
            let began_ms = self.before_copying_ms.min(now_ms);
            Round { number, began_ms, pages, at_start: JobStats::default() }
        } else {
            let pages = stats.pending_pages();
            Round { number, began_ms: now_ms, pages, at_start: stats.clone() }
        };
        let pages = round.pages;
        self.round = Some(round);
        json!({ "event": "round-started", "round": number, "pages": pages, "paused": false })
    }

    fn end_round(&mut self, stats: &JobStats, now_ms: f64) -> Option<Value> {
        let Round { number, began_ms, at_start, .. } = self.round.take()?;
        let since = |of: fn(&JobStats) -> u64| of(stats).saturating_sub(of(&at_start));
        let ms = now_ms - began_ms;
        let content_pages = since(|stats| stats.number("memory_normal"));
        let bytes = since(JobStats::sent_memory_bytes);
        let content = content_pages * stats.page_bytes();
        let took = Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
        self.predictor.measured_round(content_pages, bytes, took);
        let mut done = json!({
            "round": number,
            "pages": since(JobStats::sent_pages),
            "zero_pages": since(|stats| stats.number("memory_constant")),
            "bytes": bytes,
            "ms": ms,
            "bytes_per_s": if ms > 0.0 { content as f64 * 1e3 / ms } else { 0.0 },
            "dirty_pages_per_s": at_start.number("memory_dirty_rate"),
            "throttle_percent": self.throttle,
            "paused": false,
        });
        self.rounds.push(done.clone());
        done["event"] = json!("round-done");
        Some(done)
    }

    /// The engine's forecast, as after a harvest of the pages that are left.
    fn forecast(&mut self, stats: &JobStats, now_ms: f64) -> Value {
        let pending_pages = stats.pending_pages();
        // QEMU measures how many pages the guest writes in a second.
        let dirtied_s = pending_pages as f64 / stats.number("memory_dirty_rate") as f64;
        let harvest = Harvest {
            rounds: u32::try_from(stats.number("memory_iteration") - 1).unwrap_or(u32::MAX),
            elapsed: Duration::try_from_secs_f64(self.copying_ms(now_ms) / 1e3).unwrap_or_default(),
            pending_pages,
            dirtied_in: Duration::try_from_secs_f64(dirtied_s).unwrap_or(Duration::MAX),
        };
        let may_throttle = self.throttling == Throttling::Allowed && self.throttle < MOST_THROTTLE;
        self.forecast = json!(self.predictor.forecast(harvest, may_throttle));
        let mut event = self.forecast.clone();
        event["event"] = json!("forecast");
        event
    }
}

#[cfg(test)]
mod tests {
    use vmferry::config::WhenStuck;

    use super::super::carried::Carried;
    use super::*;

    fn watch(postcopy: PostCopy) -> Watch {
        let limits = Limits {
            downtime: Duration::from_millis(300),
            rounds: u32::MAX,
            time: None,
            when_stuck: WhenStuck::Refuse,
        };
        Watch::new(limits, None, postcopy, Throttling::Off)
    }

    /// The statistics of a guest with 400 MiB that writes 20,000 pages a second.
    fn stats(iteration: u64, sent_pages: u64, pending_pages: u64) -> JobStats {
        JobStats::parse(&format!(
            "Job type: 2\nmemory_total: 419430400\nmemory_processed: {}\nmemory_page_size: 4096\n\
             memory_remaining: {}\nmemory_iteration: {iteration}\nmemory_normal: {sent_pages}\n\
             memory_dirty_rate: 20000\nmemory_bps: 100000\ndowntime: 900\n",
            sent_pages * 4096,
            pending_pages * 4096,
        ))
    }

    fn names(events: &[Value]) -> Vec<&str> {
        events.iter().filter_map(|event| event["event"].as_str()).collect()
    }

    #[test]
    fn rounds_are_reported_when_the_iteration_changes() {
        let mut watch = watch(PostCopy::Off);
        let nothing = JobStats::parse("Job type: 2\nmemory_total: 0\ndisk_total: 0\n");
        assert_eq!(names(&watch.observe(&nothing, 100.0)), ["progress"]);
        let first = watch.observe(&stats(1, 10_000, 92_400), 500.0);
        assert_eq!(names(&first), ["round-started", "progress"]);
        assert_eq!(first[0]["pages"], 102_400);
        assert_eq!(first[1]["round_sent_pages"], 10_000);
        assert_eq!(names(&watch.observe(&stats(1, 20_000, 82_400), 1000.0)), ["progress"]);
        assert_eq!(watch.predicted_downtime_ms(), None, "no round was measured");
        let later = watch.observe(&stats(3, 110_000, 20_000), 10_500.0);
        assert_eq!(names(&later), ["round-done", "forecast", "round-started", "progress"]);
        assert_eq!(later[3]["round_sent_pages"], 0);
        assert_eq!((&later[0]["round"], &later[0]["pages"]), (&1.into(), &110_000.into()));
        let end = watch.finish(Some(&stats(4, 115_000, 0)), 11_000.0).unwrap();
        assert_eq!((&end["round"], &end["pages"]), (&3.into(), &5000.into()));
        assert_eq!(watch.rounds().len(), 2);
    }

    /// Three rounds have passed when libvirt reports memory for the first time.
    #[test]
    fn rounds_before_the_first_answer_count_as_one() {
        let mut watch = watch(PostCopy::Off);
        watch.observe(&JobStats::parse("Job type: 2\nmemory_total: 0\n"), 200.0);
        let first = watch.observe(&stats(3, 110_000, 1000), 700.0);
        assert_eq!(names(&first), ["round-started", "progress"]);
        assert_eq!((&first[0]["round"], &first[0]["pages"]), (&3.into(), &102_400.into()));
        let end = watch.finish(Some(&stats(4, 111_000, 0)), 1200.0).unwrap();
        assert_eq!((&end["pages"], &end["bytes"]), (&111_000.into(), &(111_000 * 4096).into()));
        assert_eq!(end["ms"], 1000.0);
    }

    #[test]
    fn forecast_is_the_engines() {
        let mut watch = watch(PostCopy::Off);
        watch.observe(&stats(1, 0, 102_400), 0.0);
        // 100,000 pages in ten seconds, and the guest writes twice as many.
        let events = watch.observe(&stats(2, 100_000, 20_000), 10_000.0);
        let forecast = &events[1];
        assert_eq!(forecast["verdict"], "not-converging", "{forecast}");
        assert_eq!((&forecast["round"], &forecast["pending_pages"]), (&1.into(), &20_000.into()));
        assert_eq!(forecast["dirty_bytes_per_s"], 20_000.0 * 4096.0);
        assert_eq!(forecast["link_bytes_per_s"], 10_000.0 * 4096.0);
        assert_eq!(forecast["predicted_downtime_ms"], 2004.0);
        assert!(forecast["advice"].as_str().unwrap().contains("2405 ms"), "{forecast}");
        assert_eq!(watch.predicted_downtime_ms(), Some(2004.0));
        watch.set_downtime_limit(Duration::from_secs(3));
        let events = watch.observe(&stats(3, 120_000, 20_000), 12_000.0);
        assert_eq!(events[1]["verdict"], "fits", "{}", events[1]);
        assert_eq!(watch.progress(&stats(3, 120_000, 20_000), 12_000.0)["forecast"]["round"], 2);
    }

    #[test]
    fn bytes_are_those_on_the_links() {
        let mut watch = watch(PostCopy::Off);
        let with = |mut stats: JobStats, sent_bytes| {
            let mut carried = Carried::default();
            carried.memory.sent_bytes = sent_bytes;
            stats.carried = Some(carried);
            stats
        };
        watch.observe(&with(stats(1, 0, 102_400), 0), 0.0);
        let events = watch.observe(&with(stats(2, 100_000, 20_000), 102_400_000), 10_000.0);
        assert_eq!(events[0]["bytes"], 102_400_000);
        assert_eq!(events[1]["compression_ratio"], 4.0);
        assert_eq!(events[3]["sent_bytes"], 102_400_000);
    }

    #[test]
    fn guest_that_writes_nothing_converges() {
        let mut watch = watch(PostCopy::Off);
        let idle = |iteration, sent, pending| {
            let printed = format!(
                "Job type: 2\nmemory_total: 419430400\nmemory_remaining: {}\n\
                 memory_iteration: {iteration}\nmemory_normal: {sent}\n",
                pending * 4096
            );
            JobStats::parse(&printed)
        };
        watch.observe(&idle(1, 0, 102_400), 0.0);
        let events = watch.observe(&idle(2, 100_000, 20_000), 10_000.0);
        assert_eq!(events[1]["dirty_bytes_per_s"].as_f64().map(|rate| rate < 1.0), Some(true));
        assert_eq!(events[1]["verdict"], "converging", "{}", events[1]);
    }

    #[test]
    fn phase_follows_the_statistics() {
        let mut watch = watch(PostCopy::AfterFirstRound);
        let disks = JobStats::parse("Job type: 2\ndisk_total: 9\nmemory_total: 0\n");
        assert_eq!(watch.phase(&JobStats::default()), "the preparation");
        assert_eq!(watch.phase(&disks), "the copy of disks");
        assert_eq!(watch.phase(&stats(1, 0, 9)), "pre-copy");
        assert!(watch.is_postcopy(&stats(2, 0, 9)));
        watch.observe(&stats(2, 0, 9), 1.0);
        assert_eq!(watch.phase(&JobStats::default()), "post-copy");
    }

    #[test]
    fn timeout_counts_from_the_first_round() {
        let mut watch = watch(PostCopy::Off);
        assert!(!watch.is_postcopy(&stats(2, 0, 9)));
        watch.observe(&JobStats::default(), 5000.0);
        assert_eq!(watch.copying_ms(6000.0), 0.0);
        watch.observe(&stats(1, 1, 1), 6000.0);
        assert_eq!(watch.copying_ms(7500.0), 1500.0);
    }
}
