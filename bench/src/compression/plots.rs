//! Plots of pages per second by link: one plot per content class, one line per method.

use plotters::prelude::SeriesLabelPosition;

use super::Link;
use super::content::Content;
use crate::plot::{Plot, number};
use crate::results::Row;

/// Position of "no cap" on the axis in MB/s, to the right of the caps.
const NO_CAP: f64 = 2800.0;

/// Makes one plot per content class.
pub fn plots(rows: &[Row], contents: &[Content]) -> Vec<Plot> {
    let plot = |content: &Content| {
        let empty = Plot {
            title: format!("Pages with content, {}", content.name()),
            across: "cap on the link, MB/s (at the right: none)",
            upwards: "pages/s",
            legend: SeriesLabelPosition::UpperLeft,
            lines: Vec::new(),
        };
        let wanted = |row: &Row| row.get("content").is_some_and(|class| class == content.name());
        empty.of_rows(rows, "way", 1.0, wanted, |row| {
            let caps = [Link::Mbit350, Link::Mb350];
            let link = caps.iter().find(|link| row.get("link").is_some_and(|is| is == link.name()));
            let cap = link.and_then(|link| link.cap());
            (cap.map_or(NO_CAP, |cap| cap as f64 / 1e6), number(row, "pages_per_s"))
        })
    };
    contents.iter().map(plot).collect()
}
