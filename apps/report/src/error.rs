//! Errors of reading a file and of drawing a page.

use plotters::drawing::DrawingAreaErrorKind;
use thiserror::Error;

/// Why a file cannot be shown.
#[derive(Debug, Error)]
pub enum ReportError {
    /// A line is not JSON, or its members have the wrong type.
    #[error("{file}, line {line}: {reason}")]
    Line {
        /// The file.
        file: String,
        /// The line number, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// The file has no known content.
    #[error("{file} is neither the record of a migration nor the result of a benchmark")]
    Unknown {
        /// The file.
        file: String,
    },
    /// A benchmark result has the wrong structure.
    #[error("{file} is not a valid benchmark result")]
    Benchmark {
        /// The file.
        file: String,
        /// What is wrong.
        #[source]
        source: serde_json::Error,
    },
    /// A benchmark result has an unknown version of the format.
    #[error(
        "{file} has version {version} of the benchmark format, but this release reads only \
         version {known}"
    )]
    Version {
        /// The file.
        file: String,
        /// The version in the file.
        version: u64,
        /// The version that this release reads.
        known: u64,
    },
    /// A plot cannot be drawn.
    #[error("could not draw a plot: {0}")]
    Plot(String),
}

impl From<DrawingAreaErrorKind<std::io::Error>> for ReportError {
    fn from(error: DrawingAreaErrorKind<std::io::Error>) -> Self {
        Self::Plot(error.to_string())
    }
}
