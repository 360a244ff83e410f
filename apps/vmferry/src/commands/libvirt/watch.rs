//! Turns the statistics that libvirt is asked for twice a second into the events that every
//! migration has. Rounds that pass between two questions are reported as one.

use serde_json::{Value, json};

use super::job::JobStats;

/// Rounds hardly get shorter once the guest writes at this share of the link's rate.
const HOPELESS_SHARE: f64 = 0.95;

/// What was seen of a migration.
#[derive(Debug)]
pub struct Watch {
    downtime_limit_ms: f64,
    postcopy: PostCopy,
    round: Option<Round>,
    rounds: Vec<Value>,
    throttle: u64,
    /// The last statistics with memory in them.
    last: JobStats,
    /// Since when memory is copied.
    copying_since_ms: Option<f64>,
    predicted_downtime_ms: Option<f64>,
}

/// Whether the migration goes on as post-copy after the first round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostCopy {
    /// It does.
    AfterFirstRound,
    /// It does not.
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
    /// Nothing was seen so far.
    pub fn new(downtime_limit_ms: f64, postcopy: PostCopy) -> Self {
        Self {
            downtime_limit_ms,
            postcopy,
            round: None,
            rounds: Vec::new(),
            throttle: 0,
            last: JobStats::default(),
            copying_since_ms: None,
            predicted_downtime_ms: None,
        }
    }

    /// The user has changed the limit.
    pub fn set_downtime_limit(&mut self, ms: f64) {
        self.downtime_limit_ms = ms;
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
                    let rate = events.last().and_then(|done| done["bytes_per_s"].as_f64());
                    events.push(self.forecast(stats, rate.unwrap_or_default(), now_ms));
                }
                events.push(self.begin_round(stats, number, now_ms));
            }
            let throttle = stats.number("auto_converge_throttle");
            if throttle != self.throttle {
                self.throttle = throttle;
                events.push(json!({ "event": "throttled", "percent": throttle }));
            }
            self.predicted_downtime_ms = predicted(stats).or(self.predicted_downtime_ms);
            self.last = stats.clone();
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

    /// The last prediction of the downtime.
    pub fn predicted_downtime_ms(&self) -> Option<f64> {
        self.predicted_downtime_ms
    }

    fn begin_round(&mut self, stats: &JobStats, number: u64, now_ms: f64) -> Value {
        // The first round has all pages, some of which are sent already.
        let is_first = number == 1;
        let pages = match is_first {
            true => stats.number("memory_total") / stats.page_bytes(),
            false => stats.pending_pages(),
        };
        let at_start = if is_first { JobStats::default() } else { stats.clone() };
        self.round = Some(Round { number, began_ms: now_ms, pages, at_start });
        json!({ "event": "round-started", "round": number, "pages": pages, "paused": false })
    }

    fn end_round(&mut self, stats: &JobStats, now_ms: f64) -> Option<Value> {
        let Round { number, began_ms, at_start, .. } = self.round.take()?;
        let since = |of: fn(&JobStats) -> u64| of(stats).saturating_sub(of(&at_start));
        let ms = now_ms - began_ms;
        let bytes = since(|stats| stats.number("memory_processed"));
        let mut done = json!({
            "round": number,
            "pages": since(JobStats::sent_pages),
            "zero_pages": since(|stats| stats.number("memory_constant")),
            "bytes": bytes,
            "ms": ms,
            "bytes_per_s": if ms > 0.0 { bytes as f64 * 1e3 / ms } else { 0.0 },
            "dirty_pages_per_s": at_start.number("memory_dirty_rate"),
            "throttle_percent": self.throttle,
            "paused": false,
        });
        self.rounds.push(done.clone());
        done["event"] = json!("round-done");
        Some(done)
    }

    /// `round_bytes_per_s` is the rate of the round that has just ended.
    fn forecast(&self, stats: &JobStats, round_bytes_per_s: f64, now_ms: f64) -> Value {
        let dirty = (stats.number("memory_dirty_rate") * stats.page_bytes()) as f64;
        // QEMU measures over a tenth of a second, which may have been between two rounds.
        let link = round_bytes_per_s.max(stats.number("memory_bps") as f64);
        let predicted = predicted(stats).unwrap_or_default();
        let limit = self.downtime_limit_ms;
        let (mut verdict, mut advice) = ("converging", None);
        if predicted <= limit {
            verdict = "fits";
        } else if link > 0.0 && dirty >= HOPELESS_SHARE * link {
            verdict = "not-converging";
            advice = Some(format!(
                "the guest writes {:.0} MB/s, and {:.0} MB/s are sent: a downtime limit of {} ms \
                 (`vmferry set --downtime-limit`) would let it switch over; --auto-converge slows \
                 the guest down, and --postcopy needs no convergence",
                dirty / 1e6,
                link / 1e6,
                predicted,
            ));
        }
        json!({
            "event": "forecast",
            "round": stats.number("memory_iteration") - 1,
            "elapsed_ms": self.copying_ms(now_ms),
            "pending_pages": stats.pending_pages(),
            "dirty_bytes_per_s": dirty,
            "link_bytes_per_s": link,
            "compression_ratio": 1.0,
            "throttle_percent": stats.number("auto_converge_throttle"),
            "predicted_downtime_ms": predicted,
            "downtime_limit_ms": limit,
            "verdict": verdict,
            "eta_ms": null,
            "advice": advice,
        })
    }
}

/// The downtime of a switchover now, in milliseconds: QEMU's prediction, or before it has one, the
/// time that the rest would take.
fn predicted(stats: &JobStats) -> Option<f64> {
    if stats.number("memory_iteration") > 1 {
        return stats.get("downtime").map(|ms| ms as f64);
    }
    let rate = stats.get("memory_bps").filter(|rate| *rate > 0)?;
    Some((stats.number("memory_remaining") as f64 * 1e3 / rate as f64).round())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(iteration: u64, processed: u64, remaining: u64) -> JobStats {
        JobStats::parse(&format!(
            "Job type: 2\nmemory_total: 409600\nmemory_processed: {processed}\nmemory_page_size: \
             4096\nmemory_remaining: {remaining}\nmemory_iteration: {iteration}\nmemory_normal: \
             {}\nmemory_dirty_rate: 120\nmemory_bps: 100000\ndowntime: 900\n",
            processed / 4096
        ))
    }

    fn names(events: &[Value]) -> Vec<&str> {
        events.iter().filter_map(|event| event["event"].as_str()).collect()
    }

    #[test]
    fn rounds_are_reported_when_the_iteration_changes() {
        let mut watch = Watch::new(300.0, PostCopy::Off);
        let nothing = JobStats::parse("Job type: 2\nmemory_total: 0\ndisk_total: 0\n");
        assert_eq!(names(&watch.observe(&nothing, 100.0)), ["progress"]);
        let first = watch.observe(&stats(1, 40_960, 368_640), 500.0);
        assert_eq!(names(&first), ["round-started", "progress"]);
        assert_eq!((&first[0]["pages"], &first[1]["round_sent_pages"]), (&100.into(), &10.into()));
        assert_eq!(names(&watch.observe(&stats(1, 81_920, 327_680), 600.0)), ["progress"]);
        let later = watch.observe(&stats(3, 450_560, 20_480), 1500.0);
        assert_eq!(names(&later), ["round-done", "forecast", "round-started", "progress"]);
        assert_eq!(later[3]["round_sent_pages"], 0);
        assert_eq!((&later[0]["round"], &later[0]["bytes"]), (&1.into(), &450_560.into()));
        assert_eq!(later[0]["bytes_per_s"], 450_560.0);
        assert_eq!(later[1]["verdict"], "not-converging");
        assert!(later[1]["advice"].as_str().unwrap().contains("900 ms"));
        let paused = stats(4, 471_040, 0);
        assert_eq!(names(&watch.observe(&paused, 1550.0)), ["progress"]);
        assert_eq!(watch.phase(&paused), "the handover");
        let end = watch.finish(Some(&stats(4, 471_040, 0)), 1600.0).unwrap();
        assert_eq!((&end["round"], &end["pages"]), (&3.into(), &5.into()));
        assert_eq!((watch.rounds().len(), watch.predicted_downtime_ms()), (2, Some(900.0)));
    }

    #[test]
    fn phase_follows_the_statistics() {
        let mut watch = Watch::new(300.0, PostCopy::AfterFirstRound);
        let disks = JobStats::parse("Job type: 2\ndisk_total: 9\nmemory_total: 0\n");
        assert_eq!(watch.phase(&JobStats::default()), "the preparation");
        assert_eq!(watch.phase(&disks), "the copy of disks");
        assert_eq!(watch.phase(&stats(1, 0, 9)), "pre-copy");
        assert!(watch.is_postcopy(&stats(2, 0, 9)));
        watch.observe(&stats(2, 0, 9), 1.0);
        assert_eq!(watch.phase(&JobStats::default()), "post-copy");
        let watch = Watch::new(300.0, PostCopy::Off);
        assert!(!watch.is_postcopy(&stats(2, 0, 9)));
    }

    #[test]
    fn timeout_counts_from_the_first_round() {
        let mut watch = Watch::new(300.0, PostCopy::Off);
        watch.observe(&JobStats::default(), 5000.0);
        assert_eq!(watch.copying_ms(6000.0), 0.0);
        watch.observe(&stats(1, 1, 1), 6000.0);
        assert_eq!(watch.copying_ms(7500.0), 1500.0);
    }
}
