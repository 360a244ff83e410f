//! The file format of benchmark results, for the writer and the reader.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::error::ReportError;

/// The name of the format.
pub const FORMAT: &str = "vmferry-bench";

/// The version of the format. New members do not change it.
pub const VERSION: u64 = 1;

/// A table row: one method in one case, over all repetitions. Number keys contain the unit.
pub type Row = Map<String, Value>;

/// The results of one benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`FORMAT`]. The previous release did not write it.
    #[serde(default = "format")]
    pub format: String,
    /// [`VERSION`].
    #[serde(default = "version")]
    pub version: u64,
    /// The name of the benchmark.
    pub name: String,
    /// The machine it ran on.
    pub machine: Machine,
    /// One row per method and case.
    pub rows: Vec<Row>,
    /// Additional tables, by name.
    #[serde(flatten, deserialize_with = "lists_of_rows")]
    pub more: BTreeMap<String, Vec<Row>>,
    /// Physical limits measured in the same run, by name with the unit.
    #[serde(default, deserialize_with = "numbers")]
    pub yardsticks: BTreeMap<String, f64>,
    /// Ratios between the methods, by name.
    #[serde(default, deserialize_with = "numbers")]
    pub ratios: BTreeMap<String, f64>,
}

/// The machine that ran a benchmark.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    /// The CPU's model name.
    pub cpu: String,
    /// Cores available to the process.
    pub cores: usize,
    /// The Linux release.
    pub kernel: String,
    /// `kvm_intel`, `kvm_amd`, `kvm_pvm` or `none`.
    pub kvm: String,
    /// The default TCP congestion control.
    pub tcp: String,
}

fn format() -> String {
    FORMAT.to_owned()
}

fn version() -> u64 {
    VERSION
}

/// Members that are not lists of rows, as a newer release may add, are ignored.
fn lists_of_rows<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<BTreeMap<String, Vec<Row>>, D::Error> {
    let all = BTreeMap::<String, Value>::deserialize(from)?;
    let lists = all.into_iter().filter_map(|(name, value)| {
        let Value::Array(rows) = value else { return None };
        let rows = rows.into_iter().filter_map(|row| match row {
            Value::Object(row) => Some(row),
            _ => None,
        });
        Some((name, rows.collect()))
    });
    Ok(lists.collect())
}

/// Numbers that are not finite are `null` in JSON. They are left out.
fn numbers<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let all = BTreeMap::<String, Option<f64>>::deserialize(from)?;
    Ok(all.into_iter().filter_map(|(name, number)| Some((name, number?))).collect())
}

/// Whether an object is a benchmark result.
pub(crate) fn is_results(object: &Row) -> bool {
    let says = object.get("format").is_some_and(|format| format == FORMAT);
    let looks = ["name", "machine", "rows", "ratios"].iter().all(|name| object.contains_key(*name));
    says || looks
}

/// Parses a benchmark result.
pub(crate) fn read(file: &str, object: Row) -> Result<Results, ReportError> {
    let known = VERSION;
    // The version is checked first, because another version may have another structure.
    if let Some(version) = object.get("version").and_then(Value::as_u64).filter(|it| *it != known) {
        return Err(ReportError::Version { file: file.to_owned(), version, known });
    }
    Results::deserialize(Value::Object(object))
        .map_err(|source| ReportError::Benchmark { file: file.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_survive_writing_and_reading() {
        let row: Row = serde_json::from_str(r#"{"way":"raw","ms":1.5}"#).unwrap();
        let written = Results {
            format: format(),
            version: VERSION,
            name: "place".into(),
            machine: Machine { cpu: "x".into(), cores: 2, ..Machine::default() },
            rows: vec![row.clone()],
            more: BTreeMap::from([("aims".into(), vec![row])]),
            yardsticks: BTreeMap::from([("mb_per_s".into(), 3.5)]),
            ratios: BTreeMap::from([("a_over_b".into(), 2.0)]),
        };
        let Ok(Value::Object(object)) = serde_json::to_value(&written) else { panic!("an object") };
        assert!(is_results(&object));
        assert_eq!(object["format"], FORMAT);
        assert_eq!(object["aims"][0]["way"], "raw", "additional tables are top-level members");
        assert_eq!(read("a.json", object).unwrap(), written);
    }

    #[test]
    fn read_ignores_new_members_and_rejects_other_versions() {
        let text = r#"{"name":"x","machine":{"new":1},"rows":[],
            "ratios":{"a":null,"b":1},"added":{"c":1}}"#;
        let object: Row = serde_json::from_str(text).unwrap();
        let read_back = read("a.json", object.clone()).unwrap();
        assert_eq!(read_back.ratios.len(), 1);
        assert!(read_back.more.is_empty() && read_back.version == VERSION);
        let mut newer = object;
        newer.insert("version".into(), 2.into());
        let error = read("a.json", newer).unwrap_err().to_string();
        assert_eq!(
            error,
            "a.json has version 2 of the benchmark format, but this release reads only version 1"
        );
    }
}
