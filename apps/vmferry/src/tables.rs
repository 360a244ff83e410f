//! Tables and results as text.

use std::fmt::Write;

use bytesize::ByteSize;
use comfy_table::{CellAlignment, Table, presets};
use serde::Deserialize;
use serde_json::Value;
use vmferry_api::{RecordedPages, RecordedRound, RecordedSource};

/// The statistics in the answer of a VMM, which may be of another release.
pub fn recorded(stats: &Value) -> RecordedSource {
    // Numbers that an older release does not report are shown as 0.
    RecordedSource::deserialize(stats).unwrap_or_default()
}

/// The rounds and the result of a migration, from its statistics.
pub fn outcome(stats: &RecordedSource) -> String {
    let bytes = |bytes: Option<f64>| ByteSize(number(bytes) as u64);
    let mut text = rounds(&stats.rounds);
    let downtime = &stats.downtime;
    let _ = writeln!(
        text,
        "downtime {:.1} ms, predicted {:.1}\n  \
         pause {:.1}, harvest {:.1}, last round {:.1}, ready {:.1}, commit {:.1}",
        number(stats.downtime_ms),
        number(stats.predicted_downtime_ms),
        number(downtime.pause_ms),
        number(downtime.harvest_ms),
        number(downtime.send_ms),
        number(downtime.ready_ms),
        number(downtime.commit_ms),
    );
    let _ = writeln!(
        text,
        "total {:.0} ms, {} sent for {} of guest memory\n  \
         compression {} ({:.1} to 1), dirty log {}, {} channels\n  {}",
        number(stats.total_ms),
        bytes(stats.sent_bytes),
        bytes(stats.memory_bytes),
        stats.compression.as_deref().unwrap_or_default(),
        number(stats.compression_ratio),
        stats.dirty_log.as_deref().unwrap_or_default(),
        number(stats.channels),
        stats.transport.as_deref().unwrap_or_default(),
    );
    if stats.verify_match == Some(true) {
        let _ = writeln!(
            text,
            "verified: all guest memory hashes to the same value on both sides ({:.0} ms, not \
             counted above)",
            number(stats.verify_ms)
        );
    }
    let again = number(stats.reconnections);
    if again > 0.0 {
        let _ = writeln!(
            text,
            "the link was lost: {again} channels reconnected, {:.1} s with channels missing, {} \
             resent; the paused guest was resumed {} times",
            number(stats.link_down_ms) / 1e3,
            bytes(stats.resent_bytes),
            number(stats.recalls),
        );
    }
    text.push_str("the guest runs at the destination");
    text
}

/// A column of the table of rounds.
struct Column {
    name: &'static str,
    is_number: bool,
    cell: fn(&RecordedRound) -> String,
}

/// A number of the statistics, 0 if it is missing.
fn number(number: Option<f64>) -> f64 {
    number.unwrap_or_default()
}

const COLUMNS: [Column; 11] = [
    Column { name: "round", is_number: true, cell: |it| number(it.round).to_string() },
    Column { name: "pages", is_number: true, cell: |it| number(it.pages).to_string() },
    Column { name: "zero", is_number: true, cell: |it| number(it.zero_pages).to_string() },
    Column { name: "free", is_number: true, cell: |it| number(it.free_pages).to_string() },
    Column { name: "encoded", is_number: false, cell: |it| encoded(&it.encoded) },
    Column { name: "bytes", is_number: true, cell: |it| number(it.bytes).to_string() },
    Column { name: "ms", is_number: true, cell: |it| format!("{:.1}", number(it.ms)) },
    Column {
        name: "MB/s",
        is_number: true,
        cell: |it| format!("{:.0}", number(it.bytes_per_s) / 1e6),
    },
    Column {
        name: "dirty pages/s",
        is_number: true,
        cell: |it| format!("{:.0}", number(it.dirty_pages_per_s)),
    },
    Column {
        name: "harvest ms",
        is_number: true,
        cell: |it| format!("{:.2} ({:.1} %)", number(it.harvest_ms), number(it.harvest_percent)),
    },
    Column {
        name: "guest",
        is_number: false,
        cell: |it| match number(it.throttle_percent) {
            _ if it.paused => "paused".to_owned(),
            0.0 => "running".to_owned(),
            lost => format!("running, -{lost} %"),
        },
    },
];

/// Columns that are left out on a narrow terminal, in this order.
const DISPENSABLE: [&str; 4] = ["harvest ms", "free", "zero", "encoded"];

/// The table of rounds, with the columns that fit the width of standard output.
pub fn rounds(rounds: &[RecordedRound]) -> String {
    rounds_within(rounds, crate::output::columns().unwrap_or(usize::MAX))
}

fn rounds_within(rounds: &[RecordedRound], width: usize) -> String {
    let mut columns: Vec<&Column> = COLUMNS.iter().collect();
    let mut dispensable = DISPENSABLE.into_iter();
    loop {
        let text = rounds_in(rounds, &columns);
        let fits = text.lines().all(|line| line.chars().count() <= width);
        match dispensable.next() {
            Some(name) if !fits => columns.retain(|column| column.name != name),
            _ => return text,
        }
    }
}

fn rounds_in(rounds: &[RecordedRound], columns: &[&Column]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_BORDERS_ONLY_CONDENSED);
    table.set_header(columns.iter().map(|column| column.name));
    for round in rounds {
        table.add_row(columns.iter().map(|column| (column.cell)(round)));
    }
    for (column, shown) in columns.iter().zip(table.column_iter_mut()) {
        if column.is_number {
            shown.set_cell_alignment(CellAlignment::Right);
        }
    }
    format!("{table}\n")
}

/// The most frequent encodings of a round's pages with content, such as `lz4 90 %, raw 10 %`.
fn encoded(counts: &RecordedPages) -> String {
    let RecordedPages { raw, delta, lz4, zstd, zlib, .. } = *counts;
    let ways = [(raw, "raw"), (delta, "delta"), (lz4, "lz4"), (zstd, "zstd"), (zlib, "zlib")];
    let mut ways = ways.map(|(pages, way)| (number(pages) as u64, way));
    ways.sort_unstable_by(|one, other| other.cmp(one));
    let all: u64 = ways.iter().map(|(pages, _)| pages).sum();
    let part = |pages: u64| (pages as f64 * 100.0 / all as f64).round();
    let shown = ways.iter().filter(|(pages, _)| *pages > 0 && part(*pages) >= 1.0);
    let words: Vec<String> =
        shown.take(3).map(|(pages, way)| format!("{way} {} %", part(*pages))).collect();
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rounds_within_a_narrow_terminal_leave_out_columns() {
        let round = json!({
            "round": 12, "pages": 262_144, "bytes": 1_073_741_824, "ms": 12345.6,
            "bytes_per_s": 350e6, "dirty_pages_per_s": 12345.6, "harvest_ms": 12.34,
            "harvest_percent": 1.0,
            "encoded": { "delta": 58, "raw": 21, "zstd": 21 },
        });
        let stats = recorded(&json!({ "rounds": [round] })).rounds;
        let wide = rounds_within(&stats, usize::MAX);
        assert!(wide.contains("harvest ms") && wide.contains("delta 58 %"), "{wide}");
        let narrow = rounds_within(&stats, 80);
        assert!(narrow.lines().all(|line| line.len() <= 80), "{narrow}");
        assert!(narrow.contains("dirty pages/s") && !narrow.contains("harvest ms"), "{narrow}");
    }
}
