//! The page of one migration.

use maud::{Markup, html};
use serde_json::json;

use super::metrics::{self, Metric, find};
use super::plots::{self, Named};
use super::{facts, fetch, page, table, verdict};
use crate::error::ReportError;
use crate::human;
use crate::run::{Ending, Event, Run};

/// Makes the page.
///
/// # Errors
/// A plot cannot be drawn.
pub fn run(run: &Run) -> Result<String, ReportError> {
    let metrics = metrics::of(run);
    let verdict = verdict::of(run, &metrics);
    let plots = plots::all(&[Named { name: "", run }])?;
    let content = html! {
        header class=(verdict.mood.class()) {
            p.kind {
                span.sign { (verdict.mood.sign()) } " Migration report"
                @if let Some(to) = &run.started.to { " for the destination " (to) }
            }
            h1 { (verdict.headline) }
            @for sentence in &verdict.sentences { p { (sentence) } }
        }
        (tiles(run, &metrics))
        // A destination's record has nothing to plot.
        @if !plots.0.is_empty() {
            section {
                h2 { "Plots" }
                div.plots { (plots) }
            }
        }
        @if !run.rounds.is_empty() {
            section {
                h2 { "Rounds" }
                (table::rounds(&run.rounds))
            }
        }
        @if let Some(section) = fetch::section(run) { (section) }
        @if !run.events.is_empty() {
            section {
                h2 { "Events" }
                (events(&run.events))
            }
        }
        section {
            h2 { "Details" }
            (details(run))
            (facts(&machine_readable(run, &metrics, &verdict.headline)))
        }
    };
    Ok(page(&format!("{} – vmferry report", verdict.headline), &content))
}

/// The tiles with the most important numbers.
fn tiles(run: &Run, metrics: &[Metric]) -> Markup {
    let text = |key| find(metrics, key).filter(|metric| metric.value.is_some()).map(Metric::text);
    let note =
        |key, before: &str, after: &str| text(key).map(|text| format!("{before}{text}{after}"));
    let downtime =
        [note("downtime_limit_ms", "limit ", ""), note("predicted_downtime_ms", "predicted ", "")];
    let downtime = downtime.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let tiles = [
        ("downtime_ms", downtime),
        ("total_ms", note("rounds", "in ", " rounds").unwrap_or_default()),
        ("sent_bytes", note("memory_bytes", "of ", " of memory").unwrap_or_default()),
        ("throughput_bytes_per_s", note("round_trip_ms", "round trip ", "").unwrap_or_default()),
        ("compression_ratio", run.stats.compression.clone().unwrap_or_default()),
        ("engine_cpu_s", text("engine_cpu_s_per_gb").unwrap_or_default()),
    ];
    html! {
        div.tiles {
            @for (key, note) in tiles {
                @if let Some(metric) = find(metrics, key).filter(|metric| metric.value.is_some()) {
                    div.tile {
                        p.label { (metric.label) }
                        p.value { (metric.text()) }
                        p.beside { (note) }
                    }
                }
            }
        }
    }
}

fn events(events: &[Event]) -> Markup {
    html! {
        ol.events {
            @for event in events {
                li class=(event.name) {
                    span.time {
                        @if let Some(at) = event.at_ms {
                            @if event.is_about { "≈ " }
                            (offset(at))
                        }
                    }
                    span { (event.text) }
                }
            }
        }
    }
}

fn offset(at_ms: f64) -> String {
    if at_ms.abs() < 600_000.0 { format!("{:.3} s", at_ms / 1e3) } else { human::ms(at_ms) }
}

/// The table of settings and results that are not key numbers.
fn details(run: &Run) -> Markup {
    let (stats, started) = (&run.stats, &run.started);
    let whole = |number: Option<f64>| number.map(human::count);
    let equal = |is: Option<bool>| is.map(|is| if is { "equal" } else { "DIFFERENT" }.to_owned());
    let rows: Vec<(&str, Option<String>)> = vec![
        ("File", Some(run.file.clone())),
        ("Session", run.id.clone()),
        ("Guest", started.guest.clone()),
        ("Started", run.begun.clone()),
        ("To", started.to.clone()),
        ("Link", stats.transport.clone()),
        ("Channels", whole(stats.channels.or(started.channels))),
        ("Compression", stats.compression.clone().or_else(|| started.compression.clone())),
        ("Dirty log", stats.dirty_log.clone()),
        ("Protocol", whole(stats.protocol)),
        ("vmferry release of the source", started.release.clone()),
        ("Downtime limit", run.downtime_limit_ms().map(human::ms)),
        ("Bandwidth cap", started.limits.max_bandwidth.map(human::rate)),
        ("Round limit", whole(started.limits.max_rounds)),
        ("Throttle limit", started.limits.throttle.map(|percent| format!("{percent} %"))),
        ("State of vCPUs and devices", stats.state_bytes.map(human::bytes)),
        ("Digests of sent and placed pages", equal(stats.digest_match)),
        ("Hashes of both memories", equal(stats.verify_match)),
        ("Time for hashing", stats.verify_match.and(stats.verify_ms).map(human::ms)),
    ];
    html! {
        table.circumstances {
            tbody {
                @for (name, value) in rows {
                    @if let Some(value) = value { tr { th scope="row" { (name) } td { (value) } } }
                }
            }
        }
    }
}

fn machine_readable(run: &Run, metrics: &[Metric], headline: &str) -> serde_json::Value {
    let outcome = match &run.ending {
        Ending::Moved => "moved",
        Ending::Failed(failure) if failure.is_in_doubt() => "in-doubt",
        Ending::Failed(failure) if run.has_unknown_owner(failure) => "unknown",
        Ending::Failed(failure) if run.has_lost_pages(failure) => "lost",
        Ending::Failed(_) => "stayed",
        Ending::Unknown => "unknown",
    };
    let numbers: serde_json::Map<_, _> = metrics
        .iter()
        .filter_map(|metric| Some((metric.key.to_owned(), json!(metric.value?))))
        .collect();
    json!({
        "kind": "run",
        "file": run.file,
        "run": run.id,
        "guest": run.started.guest,
        "outcome": outcome,
        "headline": headline,
        "cut_off": run.cut_off,
        "numbers": numbers,
    })
}
