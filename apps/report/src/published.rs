//! Published figures that benchmarks repeat, and where ours stand beside them.
//!
//! They are data, in `published.toml`: facts of the publications, and for each figure the columns by which our row for
//! it is found.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value;

use crate::bench::{Results, Row};

/// A published table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// The benchmark that repeats it.
    pub benchmark: String,
    /// What it is about.
    pub title: String,
    /// When it was published.
    pub year: u16,
    /// What was measured, on what, and what ours differs in.
    pub setting: String,
    /// The unit of its figures.
    pub unit: String,
    /// The way that the others are compared with.
    pub base: String,
    /// Whether more is better: a speed, and not a time.
    #[serde(default)]
    pub more_is_better: bool,
    /// The list of our rows.
    #[serde(default = "rows")]
    pub list: String,
    /// Our columns.
    pub ours: Vec<Ours>,
    /// Its figures.
    #[serde(rename = "row")]
    pub figures: Vec<Figure>,
}

/// One of our columns.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ours {
    /// What is special about it.
    pub name: String,
    /// Its unit.
    pub unit: String,
    /// The column of our row; a figure may have another one.
    pub value: String,
}

/// A figure.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// What it is of.
    pub case: String,
    /// What was compared.
    pub way: String,
    /// All that was published, in order; nothing if only ours has this way.
    #[serde(default)]
    pub published: Vec<f64>,
    /// The share of the host's time that its processors were idle, where that was published.
    #[serde(default)]
    pub idle_percent: String,
    /// What our row has in which columns.
    #[serde(rename = "where")]
    pub matching: BTreeMap<String, Value>,
    /// The column of our row, if it is another one than the table's.
    pub value: Option<String>,
}

fn rows() -> String {
    "rows".to_owned()
}

#[derive(Deserialize)]
struct File {
    table: Vec<Table>,
}

static TABLES: LazyLock<Vec<Table>> = LazyLock::new(|| {
    let file: File = toml::from_str(include_str!("published.toml")).expect("a test reads it, too");
    file.table
});

/// Every table.
#[must_use]
pub fn tables() -> &'static [Table] {
    &TABLES
}

/// The tables that a benchmark repeats.
pub fn of_benchmark(name: &str) -> impl Iterator<Item = &'static Table> {
    tables().iter().filter(move |table| table.benchmark == name)
}

impl Table {
    /// Our figure beside a published one.
    #[must_use]
    pub fn beside(&self, figure: &Figure, ours: &Ours, results: &Results) -> Option<f64> {
        let rows =
            if self.list == "rows" { &results.rows } else { results.more.get(&self.list)? };
        let matches =
            |row: &&Row| figure.matching.iter().all(|(name, value)| row.get(name) == Some(value));
        let column = figure.value.as_ref().unwrap_or(&ours.value);
        rows.iter().find(matches)?.get(column)?.as_f64()
    }

    /// How much better a figure is than that of its case's base: 2 is twice as fast.
    #[must_use]
    pub fn gain(&self, figure: f64, base: f64) -> Option<f64> {
        let gain = if self.more_is_better { figure / base } else { base / figure };
        (gain.is_finite() && gain > 0.0).then_some(gain)
    }

    /// The figure that another of the same case is compared with.
    #[must_use]
    pub fn base_of(&self, figure: &Figure) -> Option<&Figure> {
        self.figures.iter().find(|other| other.case == figure.case && other.way == self.base)
    }
}

impl Figure {
    /// The median of what was published.
    #[must_use]
    pub fn median(&self) -> Option<f64> {
        let mut sorted = self.published.clone();
        sorted.sort_by(f64::total_cmp);
        let (least, most) =
            (sorted.get(sorted.len().checked_sub(1)? / 2)?, sorted.get(sorted.len() / 2)?);
        Some(f64::midpoint(*least, *most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_has_its_base_and_is_found_once() {
        assert!(tables().len() >= 6);
        for table in tables() {
            for figure in &table.figures {
                let place = format!("{}: {}, {}", table.title, figure.case, figure.way);
                assert!(table.base_of(figure).is_some(), "{place}");
                let same = |other: &&Figure| other.case == figure.case && other.way == figure.way;
                assert_eq!(table.figures.iter().filter(same).count(), 1, "{place}");
                assert!(figure.published.iter().all(|it| *it > 0.0), "{place}");
            }
        }
        for benchmark in ["dirty-log", "bitmap", "free-pages", "compression", "transport"] {
            assert!(of_benchmark(benchmark).next().is_some(), "{benchmark}");
        }
    }

    #[test]
    fn ours_is_found_by_its_columns() {
        let table = of_benchmark("transport").next().unwrap();
        let text = r#"{"name":"transport","machine":{},"rows":[],"ratios":{},
            "published":[{"way":"1 plain: tcp","capped_s":9.2},{"way":"2 TLS side channel: tls","capped_s":9.4}]}"#;
        let results: Results = serde_json::from_str(text).unwrap();
        let tls = &table.figures[1];
        assert_eq!(table.beside(tls, &table.ours[0], &results), Some(9.4));
        assert_eq!(table.beside(tls, &table.ours[1], &results), None, "that was not measured");
        assert_eq!(tls.median(), Some(44.0));
        let base = table.base_of(tls).unwrap().median().unwrap();
        assert!((table.gain(44.0, base).unwrap() - 0.659).abs() < 0.001);
    }
}
