//! The shape of a benchmark's results, for whoever writes and for whoever reads them.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::error::ReportError;

/// The name of the shape.
pub const FORMAT: &str = "vmferry-bench";

/// Its version. Members are added without a new one.
pub const VERSION: u64 = 1;

/// One way in one case, over all repetitions: what it is, and numbers with their units in the key.
pub type Row = Map<String, Value>;

/// The results of one benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`FORMAT`]. Results of the release before do not say it.
    #[serde(default = "format")]
    pub format: String,
    /// [`VERSION`].
    #[serde(default = "version")]
    pub version: u64,
    /// The benchmark.
    pub name: String,
    /// What it ran on.
    pub machine: Machine,
    /// One for each way and case.
    pub rows: Vec<Row>,
    /// Rows of other measures, each by its name.
    #[serde(flatten, deserialize_with = "lists_of_rows")]
    pub more: BTreeMap<String, Vec<Row>>,
    /// Physical limits, measured in the same run: name with unit, and number.
    #[serde(default, deserialize_with = "numbers")]
    pub yardsticks: BTreeMap<String, f64>,
    /// How the ways compare: name and number.
    #[serde(default, deserialize_with = "numbers")]
    pub ratios: BTreeMap<String, f64>,
}

/// The machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    /// The CPU's model name.
    pub cpu: String,
    /// Cores that the process could use.
    pub cores: usize,
    /// Linux's release.
    pub kernel: String,
    /// `kvm_intel`, `kvm_amd`, `kvm_pvm` or `none`.
    pub kvm: String,
    /// TCP's congestion control, unless a socket asked for another.
    pub tcp: String,
}

fn format() -> String {
    FORMAT.to_owned()
}

fn version() -> u64 {
    VERSION
}

/// What a newer release adds and is no list of rows is left out.
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

/// What was no number when it was written is `null` in JSON, and left out.
fn numbers<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let all = BTreeMap::<String, Option<f64>>::deserialize(from)?;
    Ok(all.into_iter().filter_map(|(name, number)| Some((name, number?))).collect())
}

/// Whether an object is the result of a benchmark.
pub(crate) fn is_results(object: &Row) -> bool {
    let says = object.get("format").is_some_and(|format| format == FORMAT);
    let looks = ["name", "machine", "rows", "ratios"].iter().all(|name| object.contains_key(*name));
    says || looks
}

/// Reads one.
pub(crate) fn read(file: &str, object: Row) -> Result<Results, ReportError> {
    let known = VERSION;
    // Looked at first: the rest may be of another shape then.
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
    fn what_is_written_is_read() {
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
        assert_eq!(object["aims"][0]["way"], "raw", "lists of rows stand beside the others");
        assert_eq!(read("a.json", object).unwrap(), written);
    }

    #[test]
    fn what_a_release_adds_is_left_out_and_another_version_is_refused() {
        let text = r#"{"name":"x","machine":{"new":1},"rows":[],"ratios":{"a":null,"b":1},"added":{"c":1}}"#;
        let object: Row = serde_json::from_str(text).unwrap();
        let read_back = read("a.json", object.clone()).unwrap();
        assert_eq!(read_back.ratios.len(), 1);
        assert!(read_back.more.is_empty() && read_back.version == VERSION);
        let mut newer = object;
        newer.insert("version".into(), 2.into());
        let error = read("a.json", newer).unwrap_err().to_string();
        assert_eq!(
            error,
            "a.json has version 2 of a benchmark's results, and only 1 is known here"
        );
    }
}
