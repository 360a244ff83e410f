//! Records of migrations and results of benchmarks as pages for people.
//!
//! In goes what a file holds: the record of a run, one JSON object a line as the engine's events come, or the one object
//! that a benchmark prints. Out comes one HTML page that needs nothing else: no script, no picture, no font, no network.
//! Whatever stands in a file is text in the page, and never a part of its structure.
//!
//! ```
//! let record = br#"{"event":"started","guest":"web"}
//! {"event":"done","stats":{"rounds":[{"round":1,"pages":512,"ms":9.5}],"total_ms":12.5}}
//! "#;
//! let vmferry_report::Document::Run(run) = vmferry_report::read("run.json", record)? else { panic!() };
//! assert!(vmferry_report::run(&run)?.contains("web moved in 12.5 ms"));
//! # Ok::<(), vmferry_report::ReportError>(())
//! ```

#![forbid(unsafe_code)]

pub mod bench;
mod chart;
mod error;
pub mod human;
mod page;
pub mod published;
mod run;

use serde_json::Value;

pub use error::ReportError;
pub use page::{benchmarks, compare, run};
pub use run::{
    Downtime, Encoded, Ending, Event, Failure, Forecast, Limits, Number, Round, Run, Sample,
    Started, Stats,
};

/// What a file is.
#[derive(Clone, Debug)]
pub enum Document {
    /// The record of a migration.
    Run(Box<Run>),
    /// The results of a benchmark.
    Benchmark(Box<bench::Results>),
}

/// Reads a file, whose name is for messages and for the page.
///
/// # Errors
/// A file that is neither, or is broken: which line, and why. A record that ends within a line is not broken.
pub fn read(file: &str, bytes: &[u8]) -> Result<Document, ReportError> {
    // One object over several lines, or all in one: a benchmark, a demo, or a record of one event.
    if let Ok(Value::Object(object)) = serde_json::from_slice(bytes) {
        if bench::is_results(&object) {
            return Ok(Document::Benchmark(Box::new(bench::read(file, object)?)));
        }
        return Ok(Document::Run(Box::new(run::of_object(file, &object)?)));
    }
    Ok(Document::Run(Box::new(run::read(file, bytes)?)))
}
