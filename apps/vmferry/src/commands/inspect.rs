//! `vmferry inspect`: decodes files and reports where they are damaged.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde_json::json;
use vmferry_inspect::{End, HEAD_BYTES, Inspector, Outcome, Record, Tell, turn_of};

use crate::args::InspectOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Prints each file, in the order in which the inspector can check one file against another.
pub fn run(options: &InspectOptions, output: &Output) -> Result<(), Failure> {
    let mut files = Vec::new();
    for path in &options.files {
        files.push((turn_of(&head(path)?), path));
    }
    files.sort();
    let mut inspector = Inspector::new(options.memory, options.pages);
    let mut printed = BufWriter::new(io::stdout().lock());
    match inspect(&files, &mut inspector, options, output, &mut printed) {
        // A reader that closed standard output has seen enough.
        Err(Ended::Closed) | Ok(true) => Ok(()),
        Ok(false) => Err(Failure::new(Code::Protocol, "damage was found: see the messages above")),
        Err(Ended::Failed(failure)) => Err(failure),
    }
}

/// Why printing ended early.
enum Ended {
    /// The reader closed standard output.
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

/// A file that keeps its own read error, to distinguish it from an error on standard output.
struct Reading<F> {
    file: F,
    error: Option<io::Error>,
}

impl<F: Read> Read for Reading<F> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.file.read(into).map_err(|error| {
            let kind = error.kind();
            if kind != io::ErrorKind::Interrupted {
                self.error = Some(error);
            }
            kind.into()
        })
    }
}

/// Prints all files. Returns whether they are undamaged and agree with each other.
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
        let outcome = read(path, file, inspector, &mut tell)?;
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

/// Reads one file. An error in reading names the file; an error on standard output does not.
fn read(
    path: &Path,
    from: impl Read,
    inspector: &mut Inspector,
    tell: &mut Tell<'_>,
) -> Result<Outcome, Ended> {
    let mut file = Reading { file: from, error: None };
    let outcome = inspector.file(&path.display().to_string(), &mut file, tell);
    match file.error {
        Some(error) => Err(unreadable(path, &error).into()),
        None => Ok(outcome?),
    }
}

fn say(name: &str, outcome: &Outcome, output: &Output, printed: &mut impl Write) -> io::Result<()> {
    if output.is_json() {
        let mut line = json!(outcome);
        line["file"] = json!(name);
        return writeln!(printed, "{line}");
    }
    writeln!(printed, "{name}: {outcome}")
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

#[cfg(test)]
mod tests {
    use super::*;

    struct Failing;

    impl Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            // The same kind as when the reader of standard output has gone.
            Err(io::ErrorKind::BrokenPipe.into())
        }
    }

    #[test]
    fn read_names_a_file_that_fails() {
        let line = vmferry_handover::journal::Record::Commit.encode();
        let from = line.chain(Failing);
        let mut records = 0;
        let read =
            read(Path::new("a.source.journal"), from, &mut Inspector::new(0, false), &mut |_| {
                records += 1;
                Ok(())
            });
        let Err(Ended::Failed(failure)) = read else { panic!("it can't be read") };
        let text = format!("{:#}", failure.error);
        assert!(text.starts_with("a.source.journal can't be read: "), "{text}");
        assert_eq!(records, 1);
    }
}
