//! The report reads only members that the engine writes.

use serde::Serialize;
use serde_json::Value;
use vmferry::destination::FetchProgress;
use vmferry::stats::{FetchStats, RoundStats, SourceStats};
use vmferry_report::{Fetch, Round, Stats};

fn names(of: &impl Serialize) -> Vec<String> {
    fn walk(value: &Value, path: &str, into: &mut Vec<String>) {
        match value {
            Value::Object(members) => {
                for (name, value) in members {
                    walk(value, &format!("{path}.{name}"), into);
                }
            }
            Value::Array(all) => all.iter().for_each(|one| walk(one, path, into)),
            _ => into.push(path.to_owned()),
        }
    }
    let mut all = Vec::new();
    walk(&serde_json::to_value(of).unwrap(), "", &mut all);
    all
}

#[test]
fn members_read_are_written_by_the_engine() {
    let written = SourceStats { rounds: vec![RoundStats::default()], ..SourceStats::default() };
    let written_names = names(&written);
    let read = Stats { rounds: vec![Round::default()], ..Stats::default() };
    let read_names = names(&read);
    assert!(read_names.len() > 40, "{read_names:?}");
    for name in &read_names {
        assert!(written_names.contains(name), "the engine does not write {name}");
    }
}

#[test]
fn members_of_a_fetch_are_written_by_the_engine() {
    let read_names = names(&Fetch::default());
    assert!(read_names.len() > 10, "{read_names:?}");
    for written_names in [names(&FetchStats::default()), names(&FetchProgress::default())] {
        for name in &read_names {
            assert!(written_names.contains(name), "the engine does not write {name}");
        }
    }
}

#[test]
fn engine_statistics_are_shown() {
    let round =
        RoundStats { round: 1, pages: 1000, bytes: 4_100_000, ms: 50.0, ..RoundStats::default() };
    let stats = SourceStats {
        rounds: vec![round],
        total_ms: 61.0,
        downtime_ms: 12.5,
        sent_bytes: 4_100_000,
        compression_ratio: f64::NAN,
        ..SourceStats::default()
    };
    let line =
        format!("{{\"event\":\"done\",\"stats\":{}}}\n", serde_json::to_string(&stats).unwrap());
    let Ok(vmferry_report::Document::Run(run)) = vmferry_report::read("run.json", line.as_bytes())
    else {
        panic!("{line} is a run")
    };
    let page = vmferry_report::run(&run).unwrap();
    for shown in ["moved in 61.0 ms", "12.5 ms", "4.10 MB", "1,000"] {
        assert!(page.contains(shown), "{shown}");
    }
}
