//! `vmferry inspect`: what is in a file, and where it is broken.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde_json::json;
use vmferry_inspect::{End, HEAD_BYTES, Inspector, Outcome, Record, turn_of};

use crate::args::InspectOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Reads the files in the order in which they say something of each other, and prints each.
pub fn run(options: &InspectOptions, output: &Output) -> Result<(), Failure> {
    let mut files = Vec::new();
    for path in &options.files {
        files.push((turn_of(&head(path)?), path));
    }
    files.sort();
    let mut inspector = Inspector::new(options.memory, options.pages);
    let mut printed = BufWriter::new(io::stdout().lock());
    match inspect(&files, &mut inspector, options, output, &mut printed) {
        // Whoever closed standard output has seen enough.
        Err(Ended::Closed) | Ok(true) => Ok(()),
        Ok(false) => {
            Err(Failure::new(Code::Protocol, "not everything is right: see above where it is not"))
        }
        Err(Ended::Failed(failure)) => Err(failure),
    }
}

/// Why the printing ended early.
enum Ended {
    /// Nobody reads on.
    Closed,
    Failed(Failure),
}

impl From<io::Error> for Ended {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Failed(error.into()),
        }
    }
}

/// Whether everything is right.
fn inspect(
    files: &[((u8, u32, u8), &PathBuf)],
    inspector: &mut Inspector,
    options: &InspectOptions,
    output: &Output,
    printed: &mut impl Write,
) -> Result<bool, Ended> {
    let mut right = true;
    for (_, path) in files {
        let name = path.display().to_string();
        if !options.summary && !output.is_json() {
            writeln!(printed, "{name}:")?;
        }
        let file = File::open(path).map_err(|error| unreadable(path, &error))?;
        let mut tell = |record: &Record| match (options.summary, output.is_json()) {
            (true, _) => Ok(()),
            (false, true) => {
                let mut line = json!(record);
                line["file"] = json!(name);
                writeln!(printed, "{line}")
            }
            (false, false) => writeln!(printed, "{record}"),
        };
        let outcome = inspector.file(&name, file, &mut tell)?;
        right &= !matches!(outcome.end, End::Broken(_));
        say(&name, &outcome, output, printed)?;
    }
    for text in inspector.disagreements() {
        right = false;
        if output.is_json() {
            writeln!(printed, "{}", json!({ "disagreement": text }))?;
        } else {
            writeln!(printed, "{text}")?;
        }
    }
    printed.flush()?;
    Ok(right)
}

fn say(name: &str, outcome: &Outcome, output: &Output, printed: &mut impl Write) -> io::Result<()> {
    if output.is_json() {
        let mut line = json!(outcome);
        line["file"] = json!(name);
        return writeln!(printed, "{line}");
    }
    let Outcome { kind, records, bytes, end } = outcome;
    writeln!(printed, "{name}: {kind}, {records} records in {bytes} bytes, {end}")
}

/// The first bytes of a file.
fn head(path: &Path) -> Result<Vec<u8>, Failure> {
    let mut head = Vec::new();
    File::open(path)
        .and_then(|file| file.take(HEAD_BYTES as u64).read_to_end(&mut head))
        .map_err(|error| unreadable(path, &error))?;
    Ok(head)
}

fn unreadable(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Code::Usage, format!("{} can't be read: {error}", path.display()))
}

impl From<Failure> for Ended {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}
