//! The key numbers of a migration, with their units and which direction is better.

use crate::human;
use crate::run::{Fetch, Number, PAGE_BYTES, Run};

/// The unit of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Milliseconds.
    Ms,
    /// Bytes on a link.
    Bytes,
    /// Bytes of a guest's memory.
    Memory,
    /// Bytes per second.
    Rate,
    /// CPU seconds.
    CpuSeconds,
    /// CPU seconds per GB.
    CpuSecondsPerGb,
    /// A ratio to 1.
    Ratio,
    /// Percent.
    Percent,
    /// A count.
    Count,
}

impl Unit {
    /// Formats a number with the unit.
    pub fn text(self, number: f64) -> String {
        match self {
            Self::Ms => human::ms(number),
            Self::Bytes => human::bytes(number),
            Self::Memory => human::memory(number),
            Self::Rate => human::rate(number),
            Self::CpuSeconds => format!("{} s", human::digits(number)),
            Self::CpuSecondsPerGb => format!("{} s/GB", human::digits(number)),
            Self::Ratio => format!("{} : 1", human::digits(number)),
            Self::Percent => format!("{} %", human::digits(number)),
            Self::Count => human::digits(number),
        }
    }
}

/// Which of two numbers is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// The smaller one.
    Less,
    /// The larger one.
    More,
    /// Neither.
    Neither,
}

/// A key number.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// The name in JSON, with the unit.
    pub key: &'static str,
    /// The name on the page.
    pub label: &'static str,
    /// The value, if it is known.
    pub value: Number,
    /// The unit.
    pub unit: Unit,
    /// Which direction is better.
    pub better: Better,
}

impl Metric {
    /// Formats the value with its unit, or a dash if it is not known.
    pub fn text(&self) -> String {
        self.value.map_or_else(|| "–".to_owned(), |value| self.unit.text(value))
    }
}

/// All key numbers of a run.
pub fn of(run: &Run) -> Vec<Metric> {
    use Better::{Less, More, Neither};
    let stats = &run.stats;
    let metric = |key, label, value, unit, better| Metric { key, label, value, unit, better };
    let content_gb = content_bytes(run).map(|bytes| bytes / 1e9);
    vec![
        metric(
            "downtime_ms",
            "Downtime",
            stats.downtime_ms.filter(|_| was_paused(run)),
            Unit::Ms,
            Less,
        ),
        metric("predicted_downtime_ms", "Downtime, predicted", predicted(run), Unit::Ms, Neither),
        metric("downtime_limit_ms", "Downtime, limit", run.downtime_limit_ms(), Unit::Ms, Neither),
        metric("total_ms", "Total time", total_ms(run), Unit::Ms, Less),
        metric("sent_bytes", "Sent", sent_bytes(run), Unit::Bytes, Less),
        metric("throughput_bytes_per_s", "Throughput", throughput(run), Unit::Rate, Neither),
        metric("compression_ratio", "Compression", stats.compression_ratio, Unit::Ratio, More),
        metric("rounds", "Rounds", Some(run.rounds.len() as f64), Unit::Count, Less),
        metric("memory_bytes", "Guest memory", memory_bytes(run), Unit::Memory, Neither),
        metric("page_bytes", "Pages with content", content_bytes(run), Unit::Bytes, Less),
        metric("free_pages", "Free pages skipped", stats.free_pages, Unit::Count, Neither),
        metric("engine_cpu_s", "CPU at the source", stats.engine_cpu_s, Unit::CpuSeconds, Less),
        metric("planning_cpu_s", "CPU for planning", stats.planning_cpu_s, Unit::CpuSeconds, Less),
        metric(
            "destination_cpu_s",
            "CPU at the destination",
            run.destination_cpu_s,
            Unit::CpuSeconds,
            Less,
        ),
        metric(
            "engine_cpu_s_per_gb",
            "CPU per GB of pages",
            over(stats.engine_cpu_s, content_gb),
            Unit::CpuSecondsPerGb,
            Less,
        ),
        metric("throttle_percent", "Maximum throttle", throttle(run), Unit::Percent, Less),
        metric("round_trip_ms", "Round trip", run.round_trip_ms, Unit::Ms, Neither),
        metric(
            "state_bytes",
            "State of vCPUs and devices",
            stats.state_bytes,
            Unit::Bytes,
            Neither,
        ),
        metric("reconnections", "Reconnections", stats.reconnections, Unit::Count, Less),
        metric("resent_bytes", "Resent", stats.resent_bytes, Unit::Bytes, Less),
        metric("link_down_ms", "Time with channels missing", stats.link_down_ms, Unit::Ms, Less),
        metric("recalls", "Recalls after link loss", stats.recalls, Unit::Count, Less),
    ]
    .into_iter()
    .chain(of_fetch(run))
    .collect()
}

/// The key numbers of post-copy, which have no value without it.
fn of_fetch(run: &Run) -> [Metric; 6] {
    use Better::{Less, Neither};
    let metric = |key, label, value, unit, better| Metric { key, label, value, unit, better };
    let fetch = run.fetch.as_ref();
    let number = |read: fn(&Fetch) -> Number| fetch.and_then(read);
    let serving_ms = run.stats.serving_ms.filter(|ms| *ms > 0.0);
    let fetch_ms = serving_ms.or(number(|fetch| fetch.fetch_ms));
    let p99_ms = number(|fetch| fetch.wait_p99_us).map(|us| us / 1e3);
    [
        metric("missing_pages", "Pages fetched later", run.missing_pages(), Unit::Count, Neither),
        metric("fetch_ms", "Time of fetching", fetch_ms, Unit::Ms, Less),
        metric("faults", "Faults", number(|fetch| fetch.faults), Unit::Count, Less),
        metric("fault_pages", "Pages waited for", number(|it| it.fault_pages), Unit::Count, Less),
        metric("waited_ms", "All waits for pages", number(|it| it.waited_ms), Unit::Ms, Less),
        metric("wait_p99_ms", "99 % of waits, at most", p99_ms, Unit::Ms, Less),
    ]
}

/// Finds a number by its name in JSON.
pub fn find<'a>(metrics: &'a [Metric], key: &str) -> Option<&'a Metric> {
    metrics.iter().find(|metric| metric.key == key)
}

/// Whether the guest was paused for its switchover.
pub fn was_paused(run: &Run) -> bool {
    run.stats.downtime_ms.is_some_and(|ms| ms > 0.0)
}

fn over(number: Number, by: Number) -> Number {
    let quotient = number.zip(by.filter(|by| *by > 0.0)).map(|(number, by)| number / by);
    quotient.filter(|quotient| quotient.is_finite())
}

fn predicted(run: &Run) -> Number {
    let last = run.forecasts.iter().rev().find_map(|forecast| forecast.predicted_downtime_ms);
    run.stats.predicted_downtime_ms.filter(|ms| *ms > 0.0).or(last)
}

fn total_ms(run: &Run) -> Number {
    let rounds = run.spans().last().map(|span| span.1);
    let samples = run.samples.last().map(|sample| sample.at_ms);
    run.stats.total_ms.or(samples.into_iter().chain(rounds).reduce(f64::max))
}

fn sent_bytes(run: &Run) -> Number {
    let rounds = run.rounds.iter().filter_map(|round| round.bytes).reduce(|a, b| a + b);
    let samples = run.samples.iter().map(|sample| sample.sent_bytes).reduce(f64::max);
    run.stats.sent_bytes.or(rounds.into_iter().chain(samples).reduce(f64::max))
}

fn throughput(run: &Run) -> Number {
    over(sent_bytes(run), total_ms(run).map(|ms| ms / 1e3))
}

fn memory_bytes(run: &Run) -> Number {
    run.stats.memory_bytes.or(run.started.memory_bytes)
}

/// Bytes of the pages that had to be sent, without zero and free pages.
fn content_bytes(run: &Run) -> Number {
    let pages = run.rounds.iter().filter_map(|round| {
        let less = round.zero_pages.unwrap_or_default() + round.free_pages.unwrap_or_default();
        round.pages.map(|pages| (pages - less).max(0.0))
    });
    pages.reduce(|a, b| a + b).map(|pages| pages * PAGE_BYTES)
}

fn throttle(run: &Run) -> Number {
    run.rounds.iter().filter_map(|round| round.throttle_percent).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::{Round, Sample, Stats};

    #[test]
    fn metrics_fall_back_to_rounds_and_samples() {
        let round = |ms, bytes, pages| Round {
            ms: Some(ms),
            bytes: Some(bytes),
            pages: Some(pages),
            zero_pages: Some(10.0),
            ..Round::default()
        };
        let run = Run {
            rounds: vec![round(100.0, 4e6, 1000.0), round(50.0, 1e6, 260.0)],
            samples: vec![Sample { at_ms: 400.0, sent_bytes: 6e6 }],
            ..Run::default()
        };
        let metrics = of(&run);
        let value = |key| find(&metrics, key).unwrap().value;
        assert_eq!(value("total_ms"), Some(400.0), "it continued after its last round");
        assert_eq!(value("sent_bytes"), Some(6e6));
        assert_eq!(value("throughput_bytes_per_s"), Some(15e6));
        assert_eq!(value("page_bytes"), Some(1240.0 * PAGE_BYTES));
        assert_eq!(value("downtime_ms"), None);
        let stats = Stats { engine_cpu_s: Some(0.5), total_ms: Some(1000.0), ..Stats::default() };
        let metrics = of(&Run { stats, ..run });
        let metric = find(&metrics, "engine_cpu_s_per_gb").unwrap();
        assert!((metric.value.unwrap() - 98.4).abs() < 0.1, "{metric:?}");
        assert_eq!(find(&metrics, "total_ms").unwrap().text(), "1.00 s");
        assert_eq!(find(&metrics, "downtime_ms").unwrap().text(), "–");
    }
}
