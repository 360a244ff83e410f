//! The results of a benchmark and their plots. `vmferry_report::bench` defines the file format.

use std::collections::BTreeMap;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use serde_json::Value;
use vmferry_report::Curves;
use vmferry_report::bench::{self, Machine};

use crate::machine;

pub use vmferry_report::bench::Row;

/// The results of one benchmark.
pub struct Results {
    /// The name of the benchmark.
    pub name: &'static str,
    /// The machine it ran on.
    pub machine: Machine,
    /// What the rows are about, for the text.
    pub heading: Option<&'static str>,
    /// One row per method and case.
    pub rows: Vec<Row>,
    /// Additional tables, by name.
    pub more: BTreeMap<&'static str, Vec<Row>>,
    /// Physical limits measured in the same run, by name with the unit.
    pub yardsticks: BTreeMap<String, f64>,
    /// Ratios between the methods, by name.
    pub ratios: BTreeMap<String, f64>,
    /// Plots for `--svg`.
    pub plots: Vec<Curves>,
}

impl Results {
    /// Results measured on this machine.
    pub fn new(
        name: &'static str,
        rows: Vec<Row>,
        yardsticks: BTreeMap<String, f64>,
        ratios: BTreeMap<String, f64>,
    ) -> Self {
        let (machine, more, plots) = (machine::here(), BTreeMap::new(), Vec::new());
        Self { name, machine, heading: None, rows, more, yardsticks, ratios, plots }
    }

    /// Converts the results to the file format.
    pub fn into_shape(self) -> bench::Results {
        let Self { name, machine, rows, more, yardsticks, ratios, .. } = self;
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

    /// Formats the tables, then the yardsticks and ratios.
    pub fn as_text(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "{}: {}, {} cores, Linux {}, KVM {}, TCP {}\n",
            self.name, machine.cpu, machine.cores, machine.kernel, machine.kvm, machine.tcp,
        );
        if let Some(heading) = self.heading {
            text.push_str(&format!("{heading}\n"));
        }
        text.push_str(&format!("{}\n", table(&self.rows)));
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

/// Makes a table with the columns of the first row.
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

/// Formats a cell. Numbers get three to four significant digits.
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

/// Makes a row from a structure whose fields are the columns.
///
/// # Errors
/// The structure does not serialize to a JSON object.
pub fn row(fields: &impl Serialize) -> anyhow::Result<Row> {
    match serde_json::to_value(fields)? {
        Value::Object(row) => Ok(row),
        other => anyhow::bail!("not a row: {other}"),
    }
}

/// Reads a number from a row. Returns 0 if the row has no such number.
pub fn number(row: &Row, name: &str) -> f64 {
    row.get(name).and_then(Value::as_f64).unwrap_or_default()
}

/// The lines of a plot: one per value of the column `by`, with the `point` of each row that is
/// `wanted`. An x of 0 is drawn at `zero`, because the axes are logarithmic.
pub fn curves_of(
    rows: &[Row],
    by: &str,
    zero: f64,
    wanted: impl Fn(&Row) -> bool,
    point: impl Fn(&Row) -> (f64, f64),
) -> Vec<(String, Vec<(f64, f64)>)> {
    let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for row in rows.iter().filter(|row| wanted(row)) {
        let name = row.get(by).and_then(Value::as_str).unwrap_or_default();
        let (x, y) = point(row);
        let point = (if x > 0.0 { x } else { zero }, y.max(1e-9));
        match lines.iter_mut().find(|(line, _)| line == name) {
            Some((_, points)) => points.push(point),
            None => lines.push((name.to_owned(), vec![point])),
        }
    }
    for (_, points) in &mut lines {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    lines
}

/// The median of the numbers; 0 if there are none.
pub fn median(numbers: impl IntoIterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.into_iter().collect();
    numbers.sort_by(f64::total_cmp);
    match numbers.len() {
        0 => 0.0,
        length if length % 2 == 1 => numbers[length / 2],
        length => f64::midpoint(numbers[length / 2 - 1], numbers[length / 2]),
    }
}

/// The least of the numbers; infinity if there are none.
pub fn least(numbers: impl IntoIterator<Item = f64>) -> f64 {
    numbers.into_iter().fold(f64::INFINITY, f64::min)
}

/// The largest of the numbers, at least 0.
pub fn most(numbers: impl IntoIterator<Item = f64>) -> f64 {
    numbers.into_iter().fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_an_even_count_is_the_mean_of_the_middle_two() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median([]), 0.0);
    }
}
