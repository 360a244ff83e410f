//! The tables of the results.

use std::collections::BTreeMap;

use serde::Serialize;
use vmferry_memory::PAGE_SIZE;

use super::lab::Place;
use super::outlet::Notices;
use super::way::{WAYS, Way};
use super::{Sample, Samples};
use crate::results::{Results, Row, median, row};

/// A row: one method in one place.
#[derive(Serialize)]
struct SocketRow {
    place: &'static str,
    way: &'static str,
    mb_per_s: Option<f64>,
    total_ms: Option<f64>,
    total_ms_min: Option<f64>,
    total_ms_max: Option<f64>,
    /// CPU seconds of the whole process, which has both sides.
    cpu_s_per_gib: Option<f64>,
    /// Throughput relative to the first method, or to the first encrypting method for those that
    /// encrypt.
    speed_of_first: Option<f64>,
    /// CPU time relative to the same method.
    cpu_of_first: Option<f64>,
    /// Mean number of unacknowledged frames over all channels.
    frames_out: Option<f64>,
    /// Mean `SO_SNDBUF` of a channel at the end.
    send_buffer_kib: Option<f64>,
    /// Mean `SO_RCVBUF` of a channel at the end.
    receive_buffer_kib: Option<f64>,
    runs: usize,
    note: String,
}

/// A row: one place.
#[derive(Serialize)]
struct PlaceRow {
    place: &'static str,
    congestion_control: String,
    send_limit_kib: Option<u64>,
    receive_limit_kib: Option<u64>,
}

/// Selects the quantity for a median.
type Part = fn(&Sample) -> f64;

const TOTAL_S: Part = |sample| sample.total_s;
const CPU_S: Part = |sample| sample.cpu_s;

/// Makes all rows, yardsticks and ratios. `missing` has the reason why a method was skipped;
/// `limits` has the times of the raw socket.
///
/// # Errors
/// A row does not serialize.
pub fn results(
    samples: &Samples,
    missing: &[Option<String>],
    limits: &BTreeMap<Place, Vec<f64>>,
    pages: u64,
    copy_mb_per_s: f64,
) -> anyhow::Result<Results> {
    let bytes = pages as f64 * PAGE_SIZE as f64;
    let mb_per_s = |total_s: f64| bytes / total_s / 1e6;
    let mut rows = Vec::new();
    let mut ratios = BTreeMap::new();
    let mut yardsticks = BTreeMap::from([("memory_copy_mb_per_s".to_owned(), copy_mb_per_s)]);
    for (place, times) in limits {
        let name = place.name();
        let limit = mb_per_s(median(times.clone()));
        yardsticks.insert(format!("raw_socket_{name}_mb_per_s"), limit);
        for (number, way) in WAYS.iter().enumerate() {
            let runs = samples.get(&(*place, number)).map_or(&[][..], Vec::as_slice);
            let of = |part: Part| middle(runs, part);
            let first = first(samples, *place, way);
            let total_s = of(TOTAL_S);
            let speed_of_first = ratio(middle(first, TOTAL_S), total_s);
            let note = missing.get(number).cloned().flatten().or_else(|| notices(runs));
            let ms = |time: f64| time * 1e3;
            let times = || {
                runs.iter()
                    .map(TOTAL_S)
                    .reduce(f64::min)
                    .zip(runs.iter().map(TOTAL_S).reduce(f64::max))
            };
            rows.push(row(&SocketRow {
                place: name,
                way: way.name,
                mb_per_s: total_s.map(mb_per_s),
                total_ms: total_s.map(ms),
                total_ms_min: times().map(|(least, _)| ms(least)),
                total_ms_max: times().map(|(_, most)| ms(most)),
                cpu_s_per_gib: of(CPU_S).map(|cpu_s| cpu_s * f64::from(1 << 30) / bytes),
                speed_of_first,
                cpu_of_first: ratio(of(CPU_S), middle(first, CPU_S)),
                frames_out: of(|sample| sample.frames_out),
                send_buffer_kib: of(|sample| sample.buffers.send / 1024.0),
                receive_buffer_kib: of(|sample| sample.buffers.receive / 1024.0),
                runs: runs.len(),
                note: note.unwrap_or_default(),
            })?);
        }
        if let Some(plain) = middle(first(samples, *place, &WAYS[0]), TOTAL_S).map(mb_per_s) {
            ratios.insert(format!("writev_of_raw_socket_{name}"), plain / limit);
        }
    }
    Ok(Results::new("socket", rows, yardsticks, ratios))
}

/// Makes the row of a place whose sockets use this congestion control.
///
/// # Errors
/// The row does not serialize.
pub fn place(place: Place, congestion_control: String) -> anyhow::Result<Row> {
    let limit = |name| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?;
        Some(text.trim().parse::<u64>().ok()? >> 10)
    };
    row(&PlaceRow {
        place: place.name(),
        congestion_control,
        send_limit_kib: limit("wmem_max"),
        receive_limit_kib: limit("rmem_max"),
    })
}

/// The runs of the method that this one is compared with.
fn first<'s>(samples: &'s Samples, place: Place, way: &Way) -> &'s [Sample] {
    let number = WAYS.iter().position(|other| other.is_tls() == way.is_tls());
    number.and_then(|number| samples.get(&(place, number))).map_or(&[], Vec::as_slice)
}

fn middle(runs: &[Sample], part: Part) -> Option<f64> {
    (!runs.is_empty()).then(|| median(runs.iter().map(part)))
}

fn ratio(number: Option<f64>, of: Option<f64>) -> Option<f64> {
    Some(number? / of?)
}

/// Describes the kernel's notifications over all runs.
fn notices(runs: &[Sample]) -> Option<String> {
    let mut sum: Option<Notices> = None;
    for notices in runs.iter().filter_map(|run| run.notices) {
        *sum.get_or_insert_default() += notices;
    }
    let Notices { all, copied } = sum?;
    Some(format!("{copied} of {all} completions say copied"))
}
