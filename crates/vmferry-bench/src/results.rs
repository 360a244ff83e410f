//! The shape that every benchmark's results have.

use std::collections::BTreeMap;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::machine::Machine;

/// The results of one benchmark.
#[derive(Debug, Serialize)]
pub struct Results {
    /// The benchmark.
    pub name: &'static str,
    /// What it ran on.
    pub machine: Machine,
    /// One for each way and case.
    pub rows: Vec<Row>,
    /// Physical limits, measured in the same run: name with unit, and number.
    pub yardsticks: BTreeMap<String, f64>,
    /// How the ways compare: name and number.
    pub ratios: BTreeMap<String, f64>,
}

/// One way in one case, over all repetitions.
#[derive(Debug, Serialize)]
pub struct Row {
    /// What was measured, and how.
    pub way: &'static str,
    /// Data channels.
    pub channels: u8,
    /// Guest pages per second, median.
    pub pages_per_s: f64,
    /// The same in 10^6 bytes per second.
    pub mb_per_s: f64,
    /// Time of the whole copy or migration, median.
    pub total_ms: f64,
    /// The fastest.
    pub total_ms_min: f64,
    /// The slowest.
    pub total_ms_max: f64,
    /// CPU time of the whole process, both sides, median.
    pub cpu_s: f64,
    /// CPU time of the engine's source side, median; absent for yardsticks.
    pub source_cpu_s: Option<f64>,
    /// CPU time of the engine's destination side, median; absent for yardsticks.
    pub destination_cpu_s: Option<f64>,
    /// Repetitions.
    pub runs: usize,
}

impl Results {
    /// A table with median and spread, then the yardsticks and ratios.
    pub fn as_text(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::ASCII_BORDERS_ONLY_CONDENSED);
        table.set_header([
            "way",
            "channels",
            "pages/s",
            "MB/s",
            "total ms",
            "min",
            "max",
            "CPU s",
            "source",
            "destination",
            "runs",
        ]);
        let seconds =
            |time: Option<f64>| time.map_or_else(String::new, |time| format!("{time:.3}"));
        for row in &self.rows {
            table.add_row([
                row.way.to_owned(),
                row.channels.to_string(),
                format!("{:.0}", row.pages_per_s),
                format!("{:.0}", row.mb_per_s),
                format!("{:.1}", row.total_ms),
                format!("{:.1}", row.total_ms_min),
                format!("{:.1}", row.total_ms_max),
                format!("{:.3}", row.cpu_s),
                seconds(row.source_cpu_s),
                seconds(row.destination_cpu_s),
                row.runs.to_string(),
            ]);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let machine = &self.machine;
        let mut text = format!(
            "{}: {}, {} cores, Linux {}, KVM {}\n{table}\n",
            self.name, machine.cpu, machine.cores, machine.kernel, machine.kvm
        );
        for (name, number) in self.yardsticks.iter() {
            text.push_str(&format!("{name}: {number:.1}\n"));
        }
        for (name, number) in &self.ratios {
            text.push_str(&format!("{name}: {number:.3}\n"));
        }
        text
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
