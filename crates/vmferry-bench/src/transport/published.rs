//! The published table, with ours beside it: as each was measured, on machines that have nothing in common. What
//! can be compared is each way with plain.

use serde::Serialize;

use super::DEFAULT_CHANNELS;
use super::case::{Case, Link, Place, Way};
use super::rows::{Cell, Cells};

/// A published way, and ours. The capped columns are at 350 MB/s.
#[derive(Debug, Serialize)]
pub struct Beside {
    /// As published, and what it is here.
    way: &'static str,
    published_s: f64,
    published_over_plain: f64,
    published_idle_percent: &'static str,
    capped_s: f64,
    capped_over_plain: f64,
    capped_idle_percent: String,
    capped_idle_percent_mean: f64,
    uncapped_s: f64,
    uncapped_over_plain: f64,
    uncapped_idle_percent: String,
    uncapped_idle_percent_mean: f64,
}

/// Way, name, seconds and idle per cent of the host.
const PUBLISHED: [(Way, &str, f64, &str); 4] = [
    (Way::Plain, "1 plain: tcp", 29.0, "33-97"),
    (Way::Tls, "2 TLS side channel: tls", 44.0, "about 0"),
    (Way::GrpcAcknowledged, "3 RPC, acknowledged: grpc-ack", 42.0, "12-48"),
    (Way::GrpcStreamed, "4 RPC, fire and forget: grpc", 112.0, "18-50"),
];

/// At the default number of channels. Ways that are not in this program are left out.
pub fn beside(cells: &Cells, place: Place) -> Vec<Beside> {
    let cell = |link, way| cells.get(&Case { place, link, channels: DEFAULT_CHANNELS, way });
    let row = |(way, name, published_s, idle): &(Way, &'static str, f64, &'static str)| {
        let (capped, uncapped) = (cell(Link::Capped, *way)?, cell(Link::Uncapped, *way)?);
        let over_plain = |ours: &Cell, link| Some(ours.total_ms / cell(link, Way::Plain)?.total_ms);
        Some(Beside {
            way: name,
            published_s: *published_s,
            published_over_plain: published_s / PUBLISHED[0].2,
            published_idle_percent: idle,
            capped_s: capped.total_ms / 1e3,
            capped_over_plain: over_plain(capped, Link::Capped)?,
            capped_idle_percent: range(capped),
            capped_idle_percent_mean: capped.idle_cpu_percent_mean,
            uncapped_s: uncapped.total_ms / 1e3,
            uncapped_over_plain: over_plain(uncapped, Link::Uncapped)?,
            uncapped_idle_percent: range(uncapped),
            uncapped_idle_percent_mean: uncapped.idle_cpu_percent_mean,
        })
    };
    PUBLISHED.iter().filter_map(row).collect()
}

fn range(cell: &Cell) -> String {
    format!("{:.0}-{:.0}", cell.idle_cpu_percent_min, cell.idle_cpu_percent_max)
}
