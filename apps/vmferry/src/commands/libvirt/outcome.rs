//! The final statistics of a guest that libvirt has moved.

use std::fmt::Write;

use bytesize::ByteSize;
use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Value, json};
use vmferry_api::RecordedRound;

use super::carried::Carried;
use super::job::JobStats;
use super::watch::Watch;
use crate::commands::daemon::streams::Carried as OfTarget;
use crate::tables::recorded;

/// Where the final statistics are from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// libvirt's report of the completed job.
    Completed,
    /// The last question before the end: libvirt has not reported more.
    LastPoll,
}

/// The statistics of a guest that has moved, with the members that other guests' statistics have
/// and that libvirt reports.
pub fn statistics(watch: &Watch, origin: Origin, total_ms: f64, about: Value) -> Value {
    let last = watch.last();
    let milliseconds = |name| match origin {
        // During pre-copy, `downtime` is a prediction.
        Origin::LastPoll if name == "downtime" => None,
        _ => last.get(name),
    };
    let mut stats = json!({
        "rounds": watch.rounds(),
        "total_ms": last.get("time_elapsed").map_or(total_ms, |ms| total_ms.max(ms as f64)),
        "downtime_ms": milliseconds("downtime"),
        "predicted_downtime_ms": watch.predicted_downtime_ms(),
        "sent_bytes": last.sent_bytes(),
        "compression_ratio": last.carried.as_ref().map(Carried::compression_ratio),
        "channels": last.carried.as_ref().map(Carried::streams),
        "reconnections": last.carried.as_ref().map(Carried::reconnections),
        "link_down_ms": last.carried.as_ref().map(Carried::link_down_ms),
        "memory_bytes": last.number("memory_total"),
        "libvirt": about,
    });
    stats["libvirt"]["job"] = last.facts();
    stats["libvirt"]["setup_ms"] = json!(milliseconds("setup_time"));
    stats["libvirt"]["iterations"] = json!(last.get("memory_iteration"));
    stats["libvirt"]["postcopy_requests"] = json!(last.get("memory_postcopy_requests"));
    stats["libvirt"]["disk_sent_bytes"] = json!(last.get("disk_processed"));
    stats["libvirt"]["qemu_bytes"] = json!(last.qemu_bytes());
    if let Some(Carried { memory, disks }) = &last.carried {
        stats["libvirt"]["links"] = json!({ "memory": links(memory), "disks": links(disks) });
    }
    stats["libvirt"]["complete"] = json!(origin == Origin::Completed);
    stats
}

/// What the streams of memory, or those of disks, have carried.
fn links(carried: &OfTarget) -> Value {
    json!({
        "streams": carried.streams,
        "read_bytes": carried.read_bytes,
        "sent_bytes": carried.sent_bytes,
        "written_bytes": carried.written_bytes,
        "reconnections": carried.reconnections,
        "link_down_ms": carried.link_down_ms,
    })
}

/// The result as text.
pub fn text(stats: &Value) -> String {
    let read = recorded(stats);
    let bytes = |number: Option<f64>| ByteSize(number.unwrap_or_default() as u64);
    let ms = |number: f64| format!("{number:.1} ms");
    // A guest that moves within a second ends before a round was measured.
    let predicted = read.predicted_downtime_ms;
    let predicted =
        predicted.map_or_else(String::new, |number| format!(", predicted {}", ms(number)));
    let mut text = if read.rounds.is_empty() { String::new() } else { rounds(&read.rounds) };
    let _ = writeln!(
        text,
        "downtime {}{predicted}\ntotal {:.0} ms, {} sent for {} of guest memory",
        read.downtime_ms.map_or_else(|| "unknown".to_owned(), ms),
        read.total_ms.unwrap_or_default(),
        bytes(read.sent_bytes),
        bytes(read.memory_bytes),
    );
    if let Some(disks) = stats["libvirt"]["disk_sent_bytes"].as_f64().filter(|bytes| *bytes > 0.0) {
        let _ = writeln!(text, "  and for {} of disks", bytes(Some(disks)));
    }
    if let (Some(ratio), Some(streams)) = (read.compression_ratio, read.channels) {
        let way = read.compression.as_deref().unwrap_or_default();
        let link = read.transport.as_deref().unwrap_or_default();
        let _ =
            writeln!(text, "  compression {way} ({ratio:.1} to 1), {streams} streams\n  {link}");
    }
    if let Some(again) = read.reconnections.filter(|again| *again > 0.0) {
        let down = read.link_down_ms.unwrap_or_default() / 1e3;
        let _ = writeln!(
            text,
            "the link was lost: {again} streams reconnected, {down:.1} s with streams missing"
        );
    }
    if let Some(requests) = stats["libvirt"]["postcopy_requests"].as_u64().filter(|it| *it > 0) {
        let _ =
            writeln!(text, "  {requests} pages were fetched in post-copy when the guest used them");
    }
    text.push_str("the guest runs at the destination");
    text
}

/// The rounds that were seen, with the columns that libvirt has numbers for.
fn rounds(rounds: &[RecordedRound]) -> String {
    let number = |number: Option<f64>| number.unwrap_or_default();
    let mut table = Table::new();
    table.load_style(presets::ASCII_BORDERS_ONLY_CONDENSED);
    table.set_header(["round", "pages", "zero", "bytes", "ms", "MB/s", "dirty pages/s"]);
    for round in rounds {
        table.add_row([
            number(round.round).to_string(),
            number(round.pages).to_string(),
            number(round.zero_pages).to_string(),
            number(round.bytes).to_string(),
            format!("{:.1}", number(round.ms)),
            format!("{:.0}", number(round.bytes_per_s) / 1e6),
            format!("{:.0}", number(round.dirty_pages_per_s)),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{table}\n")
}

/// Statistics that contain the downtime and not only a prediction.
pub fn is_final(stats: &JobStats) -> bool {
    stats.has_memory() && stats.get("time_elapsed").is_some()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vmferry::config::{Limits, WhenStuck};

    use super::super::watch::{PostCopy, Throttling};
    use super::*;

    fn watch() -> Watch {
        let limits = Limits {
            downtime: Duration::from_millis(300),
            rounds: u32::MAX,
            time: None,
            when_stuck: WhenStuck::Refuse,
        };
        Watch::new(limits, None, PostCopy::Off, Throttling::Off)
    }

    #[test]
    fn downtime_of_the_last_poll_is_unknown() {
        let mut watch = watch();
        let stats = JobStats::parse(
            "Job type: 2\nmemory_total: 409600\nmemory_processed: 9\nmemory_iteration: 2\n\
             downtime: 42\ntime_elapsed: 700\n",
        );
        watch.observe(&stats, 500.0);
        watch.finish(None, 800.0);
        let polled = statistics(&watch, Origin::LastPoll, 800.0, json!({}));
        assert!(polled["downtime_ms"].is_null() && polled["compression_ratio"].is_null());
        assert!(text(&polled).contains("downtime unknown\ntotal"), "{}", text(&polled));
        let known = statistics(&watch, Origin::Completed, 800.0, json!({}));
        assert_eq!((&known["downtime_ms"], &known["total_ms"]), (&42.into(), &800.0.into()));
        assert!(text(&known).ends_with("the guest runs at the destination"));
    }
    #[test]
    fn links_of_the_daemon_are_in_the_statistics_and_the_text() {
        let mut watch = watch();
        let mut stats = JobStats::parse("Job type: 2\nmemory_total: 409600\nmemory_processed: 9\n");
        let memory = OfTarget {
            streams: 2,
            read_bytes: 300_000,
            sent_bytes: 100_000,
            reconnections: 3,
            link_down_ms: 1500.0,
            ..OfTarget::default()
        };
        stats.carried = Some(Carried { memory, ..Carried::default() });
        watch.observe(&stats, 500.0);
        let mut stats = statistics(&watch, Origin::Completed, 800.0, json!({}));
        assert_eq!(
            (&stats["sent_bytes"], &stats["libvirt"]["qemu_bytes"]),
            (&100_000.into(), &9.into())
        );
        assert_eq!(stats["libvirt"]["links"]["memory"]["read_bytes"], 300_000);
        (stats["compression"], stats["transport"]) = ("auto".into(), "tls b:7002".into());
        let shown = text(&stats);
        for words in [
            "compression auto (3.0 to 1), 2 streams\n  tls b:7002",
            "the link was lost: 3 streams reconnected, 1.5 s with streams missing",
        ] {
            assert!(shown.contains(words), "{shown}");
        }
    }
}
