//! Tables and verdicts for people.

use std::fmt::Write;

use bytesize::ByteSize;
use comfy_table::{CellAlignment, Table, presets};
use serde_json::Value;

/// The rounds and the verdict of a migration, from its statistics.
pub fn outcome(stats: &Value) -> String {
    let number = |value: &Value| value.as_f64().unwrap_or_default();
    let mut text = rounds(stats);
    let downtime = &stats["downtime"];
    let _ = writeln!(
        text,
        "downtime {:.1} ms (pause {:.1}, harvest {:.1}, last round {:.1}, ready {:.1}, commit {:.1}); \
         predicted {:.1}",
        number(&stats["downtime_ms"]),
        number(&downtime["pause_ms"]),
        number(&downtime["harvest_ms"]),
        number(&downtime["send_ms"]),
        number(&downtime["ready_ms"]),
        number(&downtime["commit_ms"]),
        number(&stats["predicted_downtime_ms"]),
    );
    let _ = writeln!(
        text,
        "total {:.0} ms, {} sent (compression {}, {:.1} to 1) for {} of guest memory, dirty log {}, {} \
         channels, {}",
        number(&stats["total_ms"]),
        ByteSize(stats["sent_bytes"].as_u64().unwrap_or_default()),
        stats["compression"].as_str().unwrap_or_default(),
        number(&stats["compression_ratio"]),
        ByteSize(stats["memory_bytes"].as_u64().unwrap_or_default()),
        stats["dirty_log"].as_str().unwrap_or_default(),
        number(&stats["channels"]),
        stats["transport"].as_str().unwrap_or_default(),
    );
    if stats["verify_match"] == true {
        let _ = writeln!(
            text,
            "both paused memories hashed whole and equal ({:.0} ms, not counted above)",
            number(&stats["verify_ms"])
        );
    }
    if let Some(again @ 1..) = stats["reconnections"].as_u64() {
        let _ = writeln!(
            text,
            "the link was lost: {again} channels made again, {:.1} s without all of them, {} sent again; the \
             paused guest ran on {} times",
            number(&stats["link_down_ms"]) / 1e3,
            ByteSize(stats["resent_bytes"].as_u64().unwrap_or_default()),
            number(&stats["recalls"]),
        );
    }
    text.push_str("the guest runs at the destination");
    text
}

/// The table of rounds.
pub fn rounds(stats: &Value) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_BORDERS_ONLY_CONDENSED);
    table.set_header([
        "round",
        "pages",
        "zero",
        "free",
        "encoded",
        "bytes",
        "ms",
        "MB/s",
        "dirty pages/s",
        "harvest ms",
        "guest",
    ]);
    for round in stats["rounds"].as_array().into_iter().flatten() {
        let number = |name: &str| round[name].as_f64().unwrap_or_default();
        table.add_row([
            format!("{}", number("round")),
            format!("{}", number("pages")),
            format!("{}", number("zero_pages")),
            format!("{}", number("free_pages")),
            encoded(&round["encoded"]),
            format!("{}", number("bytes")),
            format!("{:.1}", number("ms")),
            format!("{:.0}", number("bytes_per_s") / 1e6),
            format!("{:.0}", number("dirty_pages_per_s")),
            format!("{:.2} ({:.1} %)", number("harvest_ms"), number("harvest_percent")),
            match number("throttle_percent") {
                _ if round["paused"] == true => "paused".to_owned(),
                0.0 => "running".to_owned(),
                lost => format!("running, -{lost} %"),
            },
        ]);
    }
    for (index, column) in table.column_iter_mut().take(10).enumerate() {
        if index != ENCODED_COLUMN {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    format!("{table}\n")
}

const ENCODED_COLUMN: usize = 4;

/// How most pages with content of a round travelled, and how the rest did, such as `lz4 90 %, raw 10 %`.
fn encoded(counts: &Value) -> String {
    let ways = ["raw", "delta", "lz4", "zstd", "zlib"];
    let mut ways = ways.map(|way| (counts[way].as_u64().unwrap_or_default(), way));
    ways.sort_unstable_by(|one, other| other.cmp(one));
    let all: u64 = ways.iter().map(|(pages, _)| pages).sum();
    let part = |pages: u64| (pages as f64 * 100.0 / all as f64).round();
    let shown = ways.iter().filter(|(pages, _)| *pages > 0 && part(*pages) >= 1.0);
    let words: Vec<String> =
        shown.take(3).map(|(pages, way)| format!("{way} {} %", part(*pages))).collect();
    words.join(", ")
}
