//! Plots of pages per second by link: one plot per content class, one line per method.

use vmferry_report::{Curves, Legend};

use super::Link;
use super::content::Content;
use crate::results::{Row, curves_of, number};

/// Position of "no cap" on the axis in MB/s, to the right of the caps.
const NO_CAP: f64 = 2800.0;

/// Makes one plot per content class.
pub fn plots(rows: &[Row], contents: &[Content]) -> Vec<Curves> {
    let plot = |content: &Content| {
        let wanted = |row: &Row| row.get("content").is_some_and(|class| class == content.name());
        let point = |row: &Row| {
            let caps = [Link::Mbit350, Link::Mb350];
            let link = caps.iter().find(|link| row.get("link").is_some_and(|is| is == link.name()));
            let cap = link.and_then(|link| link.cap());
            (cap.map_or(NO_CAP, |cap| cap as f64 / 1e6), number(row, "pages_per_s"))
        };
        Curves {
            title: format!("Pages with content, {}", content.name()),
            across: "cap on the link, MB/s (at the right: none)",
            upwards: "pages/s",
            legend: Legend::UpperLeft,
            lines: curves_of(rows, "way", 1.0, wanted, point),
        }
    };
    contents.iter().map(plot).collect()
}
