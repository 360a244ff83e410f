//! HTML reports of recorded migrations and of benchmark results.
//!
//! The input is the content of a file: the record of a migration, with one JSON object per line as
//! the engine emits its events, or the JSON object that a benchmark prints. The output is one HTML
//! page without scripts, images, fonts or network access. Text from a file is always escaped.
//!
//! ```
//! let record = br#"{"event":"started","guest":"web"}
//! {"event":"done","stats":{"rounds":[{"round":1,"pages":512,"ms":9.5}],"total_ms":12.5}}
//! "#;
//! let document = vmferry_report::read("run.json", record)?;
//! let vmferry_report::Document::Run(run) = document else { panic!() };
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

pub use chart::{Curves, Legend, svg_of};
pub use error::ReportError;
pub use page::{benchmarks, compare, run};
pub use run::{
    Downtime, Encoded, Ending, Event, Failure, Fetch, Forecast, Limits, Number, Round, Run, Sample,
    Started, Stats, sentence,
};

/// The content of a file.
#[derive(Clone, Debug)]
pub enum Document {
    /// The record of a migration.
    Run(Box<Run>),
    /// The results of a benchmark.
    Benchmark(Box<bench::Results>),
}

/// Parses a file. Its name is used in messages and on the page.
///
/// # Errors
/// The file is neither kind of document, or a line is invalid. A record that ends within a line is
/// accepted.
pub fn read(file: &str, bytes: &[u8]) -> Result<Document, ReportError> {
    // A single object is a benchmark result, a demo result, or a record with one event.
    if let Ok(Value::Object(object)) = serde_json::from_slice(bytes) {
        if bench::is_results(&object) {
            return Ok(Document::Benchmark(Box::new(bench::read(file, object)?)));
        }
        return Ok(Document::Run(Box::new(run::of_object(file, &object)?)));
    }
    Ok(Document::Run(Box::new(run::read(file, bytes)?)))
}
