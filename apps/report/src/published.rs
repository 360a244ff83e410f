//! Published figures that the benchmarks repeat, and how to find the measured values for them.
//!
//! The data is in `published.toml`: facts of the publications, and for each figure the columns that
//! identify the measured row.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value;

use crate::bench::{Results, Row};

/// A published table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// The benchmark that repeats the measurement.
    pub benchmark: String,
    /// The title.
    pub title: String,
    /// The year of publication.
    pub year: u16,
    /// The setting of the published measurement, and how this benchmark differs.
    pub setting: String,
    /// The unit of the figures.
    pub unit: String,
    /// The method that the others are compared with.
    pub base: String,
    /// Whether larger figures are better, as for a speed.
    #[serde(default)]
    pub more_is_better: bool,
    /// The table of the results that has the measured rows.
    #[serde(default = "rows")]
    pub list: String,
    /// The columns of the measured values.
    pub ours: Vec<Ours>,
    /// The figures.
    #[serde(rename = "row")]
    pub figures: Vec<Figure>,
}

/// A column of measured values.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ours {
    /// The name of the column.
    pub name: String,
    /// The unit.
    pub unit: String,
    /// The column of the measured row. A figure may override it.
    pub value: String,
}

/// A published figure.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// The case.
    pub case: String,
    /// The method.
    pub way: String,
    /// All published figures in order. Empty if only this benchmark has the method.
    #[serde(default)]
    pub published: Vec<f64>,
    /// The published idle time of the host's processors, if there is one.
    #[serde(default)]
    pub idle_percent: String,
    /// The values that identify the measured row, by column.
    #[serde(rename = "where")]
    pub matching: BTreeMap<String, Value>,
    /// The column of the measured row, if it is not that of the table.
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
    let file: File =
        toml::from_str(include_str!("published.toml")).expect("a test parses the file");
    file.table
});

/// All tables.
#[must_use]
pub fn tables() -> &'static [Table] {
    &TABLES
}

/// The tables that a benchmark repeats.
pub fn of_benchmark(name: &str) -> impl Iterator<Item = &'static Table> {
    tables().iter().filter(move |table| table.benchmark == name)
}

impl Table {
    /// The measured value for a published figure.
    #[must_use]
    pub fn measured(&self, figure: &Figure, ours: &Ours, results: &Results) -> Option<f64> {
        let rows =
            if self.list == "rows" { &results.rows } else { results.more.get(&self.list)? };
        let matches =
            |row: &&Row| figure.matching.iter().all(|(name, value)| row.get(name) == Some(value));
        let column = figure.value.as_ref().unwrap_or(&ours.value);
        rows.iter().find(matches)?.get(column)?.as_f64()
    }

    /// How many times better a figure is than that of the base: 2 is twice as fast.
    #[must_use]
    pub fn gain(&self, figure: f64, base: f64) -> Option<f64> {
        let gain = if self.more_is_better { figure / base } else { base / figure };
        (gain.is_finite() && gain > 0.0).then_some(gain)
    }

    /// The figure of the base in the same case.
    #[must_use]
    pub fn base_of(&self, figure: &Figure) -> Option<&Figure> {
        self.figures.iter().find(|other| other.case == figure.case && other.way == self.base)
    }
}

impl Figure {
    /// The median of the published figures.
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
    fn figures_are_unique_and_have_a_base() {
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
    fn measured_value_is_found_by_its_columns() {
        let table = of_benchmark("transport").next().unwrap();
        let text = r#"{"name":"transport","machine":{},"rows":[],"ratios":{},
            "published":[{"way":"1 plain: tcp","capped_s":9.2},
                {"way":"2 TLS side channel: tls","capped_s":9.4}]}"#;
        let results: Results = serde_json::from_str(text).unwrap();
        let tls = &table.figures[1];
        assert_eq!(table.measured(tls, &table.ours[0], &results), Some(9.4));
        assert_eq!(table.measured(tls, &table.ours[1], &results), None, "that was not measured");
        assert_eq!(tls.median(), Some(44.0));
        let base = table.base_of(tls).unwrap().median().unwrap();
        assert!((table.gain(44.0, base).unwrap() - 0.659).abs() < 0.001);
    }
}
