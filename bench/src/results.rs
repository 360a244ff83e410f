//! What every benchmark measures, with the plots of it; its shape in files is `vmferry_report::bench`.

use std::collections::BTreeMap;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use serde_json::Value;
use vmferry_report::bench::{self, Machine};

use crate::machine;
use crate::plot::Plot;

pub use vmferry_report::bench::Row;

/// The results of one benchmark.
pub struct Results {
    /// The benchmark.
    pub name: &'static str,
    /// What it ran on.
    pub machine: Machine,
    /// One for each way and case.
    pub rows: Vec<Row>,
    /// Rows of other measures, each by its name.
    pub more: BTreeMap<&'static str, Vec<Row>>,
    /// Physical limits, measured in the same run: name with unit, and number.
    pub yardsticks: BTreeMap<String, f64>,
    /// How the ways compare: name and number.
    pub ratios: BTreeMap<String, f64>,
    /// For people to look at.
    pub plots: Vec<Plot>,
}

impl Results {
    /// Measured on this machine.
    pub fn new(
        name: &'static str,
        rows: Vec<Row>,
        yardsticks: BTreeMap<String, f64>,
        ratios: BTreeMap<String, f64>,
    ) -> Self {
        let (machine, more, plots) = (machine::here(), BTreeMap::new(), Vec::new());
        Self { name, machine, rows, more, yardsticks, ratios, plots }
    }

    /// As they are written and read.
    pub fn into_shape(self) -> bench::Results {
        let Self { name, machine, rows, more, yardsticks, ratios, plots: _ } = self;
        bench::Results {
            format: bench::FORMAT.to_owned(),
            version: bench::VERSION,
            name: name.to_owned(),
            machine,
            rows,
            more: more.into_iter().map(|(name, rows)| (name.to_owned(), rows)).collect(),
            yardsticks,
            ratios,
        }
    }

    /// Tables with median and spread, then the yardsticks and ratios.
    pub fn as_text(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "{}: {}, {} cores, Linux {}, KVM {}, TCP {}\n{}\n",
            self.name,
            machine.cpu,
            machine.cores,
            machine.kernel,
            machine.kvm,
            machine.tcp,
            table(&self.rows)
        );
        for (name, rows) in &self.more {
            text.push_str(&format!("{name}:\n{}\n", table(rows)));
        }
        for (name, number) in self.yardsticks.iter() {
            text.push_str(&format!("{name}: {number:.1}\n"));
        }
        for (name, number) in &self.ratios {
            text.push_str(&format!("{name}: {number:.3}\n"));
        }
        text
    }
}

/// The columns are those of the first row.
fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_BORDERS_ONLY_CONDENSED);
    let columns: Vec<&str> =
        rows.first().map_or_else(Vec::new, |row| row.keys().map(String::as_str).collect());
    table.set_header(columns.iter().map(|name| name.replace('_', " ")));
    for row in rows {
        table.add_row(columns.iter().map(|name| cell(row.get(*name))));
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        let number = rows.iter().any(|row| {
            columns.get(index).and_then(|name| row.get(*name)).is_some_and(Value::is_number)
        });
        if number {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// A number with as many digits as mean something.
fn cell(value: Option<&Value>) -> String {
    match value {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(number)) => match (number.as_u64(), number.as_f64()) {
            (Some(whole), _) => whole.to_string(),
            (None, Some(number)) if number.abs() >= 1000.0 => format!("{number:.0}"),
            (None, Some(number)) if number.abs() >= 10.0 => format!("{number:.1}"),
            (None, number) => format!("{:.3}", number.unwrap_or(f64::NAN)),
        },
        _ => String::new(),
    }
}

/// A row from a structure whose fields are its columns.
///
/// # Errors
/// A structure that is no JSON object.
pub fn row(fields: &impl Serialize) -> anyhow::Result<Row> {
    match serde_json::to_value(fields)? {
        Value::Object(row) => Ok(row),
        other => anyhow::bail!("no row: {other}"),
    }
}

/// The median of some numbers; 0 of none.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    match numbers.len() {
        0 => 0.0,
        length if length % 2 == 1 => numbers[length / 2],
        length => f64::midpoint(numbers[length / 2 - 1], numbers[length / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(vec![]), 0.0);
    }
}
