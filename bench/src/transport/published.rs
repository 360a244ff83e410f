//! The published table next to this benchmark's results. The machines have nothing in common, so
//! only the ratio of each method to plain TCP can be compared.

use serde::Serialize;
use vmferry_report::published::{Figure, of_benchmark};

use super::DEFAULT_CHANNELS;
use super::case::{Case, Link, Place, Way};
use super::rows::{Cell, Cells};

/// A row: a published method and vmferry's. The capped columns are at 350 MB/s.
#[derive(Debug, Serialize)]
pub struct ComparedRow {
    /// The published method, and vmferry's name for it.
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

/// The methods in the order of the published table.
const WAYS: [(Way, &str); 4] = [
    (Way::Plain, "1 plain: tcp"),
    (Way::Tls, "2 TLS side channel: tls"),
    (Way::GrpcAcknowledged, "3 RPC, acknowledged: grpc-ack"),
    (Way::GrpcStreamed, "4 RPC, fire and forget: grpc"),
];

/// The published figure for the row with this name.
fn published(name: &str) -> Option<&'static Figure> {
    let mut figures = of_benchmark("transport").flat_map(|table| &table.figures);
    figures.find(|figure| figure.matching.get("way").is_some_and(|way| way == name))
}

/// Makes the rows for the default number of channels. Methods that were not compiled in are
/// skipped.
pub fn compare(cells: &Cells, place: Place) -> Vec<ComparedRow> {
    let cell = |link, way| cells.get(&Case { place, link, channels: DEFAULT_CHANNELS, way });
    let plain_s = published(WAYS[0].1).and_then(Figure::median);
    let row = |(way, name): &(Way, &'static str)| {
        let figure = published(name)?;
        let published_s = figure.median()?;
        let (capped, uncapped) = (cell(Link::Capped, *way)?, cell(Link::Uncapped, *way)?);
        let over_plain = |ours: &Cell, link| Some(ours.total_ms / cell(link, Way::Plain)?.total_ms);
        Some(ComparedRow {
            way: name,
            published_s,
            published_over_plain: published_s / plain_s?,
            published_idle_percent: &figure.idle_percent,
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
    WAYS.iter().filter_map(row).collect()
}

fn range(cell: &Cell) -> String {
    format!("{:.0}-{:.0}", cell.idle_cpu_percent_min, cell.idle_cpu_percent_max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_have_published_figures() {
        let seconds = WAYS.map(|(_, name)| published(name).and_then(Figure::median).unwrap());
        assert_eq!(seconds, [29.0, 44.0, 42.0, 112.0]);
    }
}
