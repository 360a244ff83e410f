//! Records for tests.

#![allow(dead_code, reason = "each test program uses a part")]

use serde_json::{Value, json};
use vmferry_report::{Document, Run, bench};

/// Number of rounds of a guest that is throttled until it converges.
const ROUNDS: u64 = 6;

/// A complete record as `send --save-run` writes it. A larger `speed` makes the migration faster.
pub fn record(guest: &str, speed: f64) -> Vec<Value> {
    let mut lines = vec![json!({
        "event": "started", "guest": guest, "to": "tls:b:7001", "memory_bytes": 1_u64 << 30,
        "release": "0.1.0",
        "limits": {
            "downtime_limit_ms": 300.0, "max_bandwidth": 64_000_000_u64, "max_rounds": 30,
            "throttle": 80,
        },
        "compression": "auto", "channels": 2,
    })];
    lines.push(json!({
        "event": "connected", "round_trip_ms": 0.2, "protocol": 2,
        "destination": { "vmferry": "0.1.0", "vmm": null },
    }));
    let (mut at_ms, mut sent, mut rounds) = (40.0, 0.0, Vec::new());
    for round in 1..=ROUNDS {
        let last = round == ROUNDS;
        let pages = 60_000.0 / round as f64;
        let bytes = pages * 1800.0;
        let ms = bytes / (64_000.0 * speed);
        if last {
            lines.push(json!({ "event": "paused", "predicted_downtime_ms": 210.0 }));
        }
        lines.push(
            json!({ "event": "round-started", "round": round, "pages": pages, "paused": last }),
        );
        let steps = (ms / 200.0) as u64;
        for step in 1..=steps {
            let elapsed_ms = at_ms + step as f64 * 200.0;
            let sent_bytes = sent + bytes * step as f64 / (steps + 1) as f64;
            lines.push(json!({
                "event": "progress", "phase": "pre-copy", "round": round,
                "sent_bytes": sent_bytes, "elapsed_ms": elapsed_ms,
            }));
        }
        at_ms += ms;
        sent += bytes;
        let stats = json!({
            "round": round, "pages": pages, "zero_pages": pages * 0.1, "free_pages": pages * 0.05,
            "encoded": {
                "zero": pages * 0.1, "raw": pages * 0.2, "delta": pages * 0.1,
                "lz4": pages * 0.2, "zstd": pages * 0.3, "zlib": pages * 0.05,
            },
            "bytes": bytes, "ms": ms, "harvest_ms": 0.7, "harvest_percent": 0.3,
            "dirty_pages_per_s": 9000.0, "bytes_per_s": 9e7,
            "throttle_percent": 20 * round / 2, "paused": last,
        });
        let mut event = stats.clone();
        event["event"] = "round-done".into();
        lines.push(event);
        rounds.push(stats);
        lines.push(json!({
            "event": "forecast", "round": round, "elapsed_ms": at_ms,
            "pending_pages": pages / 2.0, "dirty_bytes_per_s": 4.1e7,
            "link_bytes_per_s": 6.4e7, "compression_ratio": 2.2,
            "predicted_downtime_ms": 1500.0 / round as f64, "downtime_limit_ms": 300.0,
            "verdict": "converging", "advice": null,
        }));
    }
    lines.push(json!({ "event": "ready" }));
    lines.push(json!({ "event": "committed" }));
    lines.push(json!({ "event": "done", "stats": {
        "rounds": rounds, "total_ms": at_ms, "downtime_ms": 212.0 / speed,
        "predicted_downtime_ms": 210.0,
        "downtime": {
            "pause_ms": 0.4, "harvest_ms": 1.1, "save_ms": 3.0, "send_ms": 190.0 / speed,
            "ready_ms": 12.0, "commit_ms": 5.0,
        },
        "sent_bytes": sent, "memory_bytes": 1_u64 << 30, "state_bytes": 5000,
        "digest_match": true, "verify_match": true, "verify_ms": 80.0,
        "engine_cpu_s": 2.4, "planning_cpu_s": 0.1, "compression": "auto", "free_pages": 3000,
        "compression_ratio": 2.2, "dirty_log": "clear", "channels": 2, "transport": "tls b:7001",
        "protocol": 2, "round_trip_ms": 0.2, "reconnections": 0, "resent_bytes": 0,
        "link_down_ms": 0.0, "recalls": 0,
    } }));
    let second = 1_000_000_000;
    let begun = 1_790_000_000_i64;
    for (index, line) in lines.iter_mut().enumerate() {
        let elapsed = line["elapsed_ms"].as_f64().unwrap_or(index as f64 * 20.0);
        let nanos = (elapsed * 1e6) as i64;
        line["time"] = stamp(begun + nanos / second, nanos % second / 1_000_000).into();
        line["run"] = "05050505-0505-0505-0505-050505050505".into();
    }
    lines
}

/// Formats a time within one hour of a day.
fn stamp(seconds: i64, ms: i64) -> String {
    format!("2026-09-21T14:{:02}:{:02}.{ms:03}Z", seconds / 60 % 60, seconds % 60)
}

/// The lines as the content of a file.
pub fn file(lines: &[Value]) -> Vec<u8> {
    lines.iter().map(|line| format!("{line}\n")).collect::<String>().into_bytes()
}

/// Reads a run.
pub fn run(bytes: &[u8]) -> Run {
    match vmferry_report::read("run.json", bytes).unwrap() {
        Document::Run(run) => *run,
        Document::Benchmark(_) => panic!("not a run"),
    }
}

/// The record of a migration that failed.
pub fn failed(guest: &str) -> Vec<Value> {
    let mut lines = record(guest, 1.0);
    lines.truncate(lines.len() - 3);
    let message = "the guest writes 410 MB/s and the link carries 64 MB/s of it";
    let last = lines.last_mut().unwrap();
    last["advice"] = "give it --throttle 80, or --downtime-limit 2s".into();
    last["verdict"] = "not-converging".into();
    let error = json!({ "code": "not-converging", "exit": 10, "message": message });
    lines.push(json!({ "event": "failed", "error": error, "stats": null }));
    lines
}

/// What `receive --json` prints for a guest that fetches pages while it runs.
pub fn destination(guest: &str) -> Vec<Value> {
    let stats = json!({
        "missing_pages": 4096, "fault_pages": 512, "background_pages": 3584, "again_pages": 0,
        "faults": 700, "zero_faults": 188, "fetch_ms": 2345.6, "waited_ms": 654.3,
        "wait_mean_us": 1278.0, "wait_p50_us": 950, "wait_p99_us": 7300, "wait_max_us": 45_678,
        "reconnections": 1, "link_down_ms": 321.0,
    });
    let mut progress = stats.clone();
    progress["event"] = "fetch-progress".into();
    progress["remaining_pages"] = 1000.into();
    let mut lines = vec![
        json!({ "event": "accepted", "name": guest, "memory_bytes": 1_u64 << 28, "lanes": 2 }),
        json!({ "event": "ready" }),
        json!({ "event": "running" }),
        json!({ "event": "fetching", "pages": 4096 }),
        progress,
        json!({ "event": "fetched" }),
        json!({ "event": "received", "stats": { "fetch": stats, "engine_cpu_s": 0.5 } }),
        json!({ "event": "serving", "name": guest, "pid": 7 }),
    ];
    for line in &mut lines {
        line["run"] = "05050505-0505-0505-0505-050505050505".into();
    }
    lines
}

/// Results of a benchmark with published figures.
pub fn benchmark() -> bench::Results {
    let row = |value: Value| value.as_object().unwrap().clone();
    let cell = |guest: &str, hints: &str, ms: f64| {
        row(json!({ "guest": guest, "hints": hints, "total_ms": ms, "runs": 3 }))
    };
    let value = json!({
        "name": "free-pages",
        "machine": {
            "cpu": "A processor", "cores": 2, "kernel": "6.18", "kvm": "kvm_intel", "tcp": "cubic",
        },
        "rows": [
            cell("idle_8g", "no", 3774.0), cell("idle_8g", "yes", 111.0),
            cell("busy_8g", "no", 3793.0), cell("busy_8g", "yes", 322.0),
        ],
        "aims": [{
            "ratio": "idle_8g_reduction", "value": 0.971, "aim": ">= 0.92", "met": "yes",
            "meaning": "of the total time, by hints",
        }],
        "yardsticks": { "copy_mb_per_s": 4309.0 }, "ratios": { "idle_8g_reduction": 0.971 },
    });
    serde_json::from_value(value).unwrap()
}
