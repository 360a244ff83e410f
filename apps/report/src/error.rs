//! What can be wrong with a file.

use thiserror::Error;

/// Why a file can't be shown.
#[derive(Debug, Error)]
pub enum ReportError {
    /// A line that is no JSON, or whose members are not what they should be.
    #[error("{file}, line {line}: {reason}")]
    Line {
        /// The file.
        file: String,
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// Nothing in it is known.
    #[error("{file} is neither the record of a migration nor the result of a benchmark")]
    Unknown {
        /// The file.
        file: String,
    },
    /// A result of a benchmark that is not of the shape.
    #[error("{file} is no result of a benchmark")]
    Benchmark {
        /// The file.
        file: String,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// A result of a benchmark in a version of the shape that is not known.
    #[error(
        "{file} has version {version} of a benchmark's results, and only {known} is known here"
    )]
    Version {
        /// The file.
        file: String,
        /// Its version.
        version: u64,
        /// The version that is known.
        known: u64,
    },
    /// A plot that can't be drawn.
    #[error("a plot can't be drawn: {0}")]
    Plot(String),
}
