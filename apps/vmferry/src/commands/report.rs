//! `vmferry report`: records of migrations and results of benchmarks as an HTML page.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use vmferry_report::{Document, ReportError, Run, bench};

use crate::args::ReportOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Larger files are refused. A record has five lines of some hundred bytes per second, so this is
/// about a week.
const FILE_LIMIT: u64 = 1 << 30;

/// Reads the files, makes the page, and writes it.
pub fn run(options: &ReportOptions, output: &Output) -> Result<(), Failure> {
    let to = target(options, output)?;
    let (mut runs, mut benchmarks) = (Vec::new(), Vec::new());
    for path in &options.files {
        match vmferry_report::read(&path.display().to_string(), &content(path)?)? {
            Document::Run(run) => runs.push(*run),
            Document::Benchmark(results) => benchmarks.push(*results),
        }
    }
    let (kind, page) = page(options.compare, &runs, &benchmarks)?;
    let bytes = page.len();
    let Some(to) = to else {
        return match io::stdout().write_all(page.as_bytes()) {
            // A reader that closed standard output does not want the page.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
            _ => Ok(()),
        };
    };
    std::fs::write(&to, page).map_err(|error| {
        Failure::new(Code::Internal, format!("{} can't be written: {error}", to.display()))
    })?;
    let result = json!({ "output": to.display().to_string(), "bytes": bytes, "kind": kind });
    output.result(&result, || format!("wrote the report to {}", to.display()));
    Ok(())
}

/// The kind of the page and its HTML.
fn page(
    compare: bool,
    runs: &[Run],
    benchmarks: &[bench::Results],
) -> Result<(&'static str, String), Failure> {
    let usage = |text: &str| Err(Failure::new(Code::Usage, text));
    Ok(match (runs, benchmarks) {
        ([a, b], []) if compare => ("compare", vmferry_report::compare(a, b)?),
        _ if compare => return usage("--compare needs the records of two migrations"),
        ([run], []) => ("run", vmferry_report::run(run)?),
        ([], benchmarks) => ("benchmarks", vmferry_report::benchmarks(benchmarks)?),
        (_, []) => {
            return usage("a page shows one migration: add --compare to show two side by side");
        }
        _ => return usage("a page shows migrations or benchmarks, not both: make two pages"),
    })
}

/// The file for the page, or `None` for standard output.
fn target(options: &ReportOptions, output: &Output) -> Result<Option<PathBuf>, Failure> {
    let usage = |text: String| Failure::new(Code::Usage, text);
    let to = match (&options.output, options.files.as_slice()) {
        (Some(path), _) if path.as_os_str() == "-" => {
            if output.is_json() {
                let text = "--json and -o - both use standard output: name a file for the page";
                return Err(usage(text.to_owned()));
            }
            return Ok(None);
        }
        (Some(path), _) => path.clone(),
        (None, [file]) => file.with_extension("html"),
        (None, _) => {
            return Err(usage("several files need a name for the page: add -o FILE".into()));
        }
    };
    // Compared by inode, because two paths can lead to one file.
    let same = |path: &PathBuf| {
        let (one, other) = (std::fs::metadata(path), std::fs::metadata(&to));
        one.is_ok_and(|one| {
            other.is_ok_and(|other| (one.dev(), one.ino()) == (other.dev(), other.ino()))
        })
    };
    if let Some(input) = options.files.iter().find(|path| same(path)) {
        let text =
            format!("the page would overwrite {}: name another file with -o", input.display());
        return Err(usage(text));
    }
    Ok(Some(to))
}

fn content(path: &Path) -> Result<Vec<u8>, Failure> {
    let mut content = Vec::new();
    File::open(path).and_then(|file| file.take(FILE_LIMIT + 1).read_to_end(&mut content)).map_err(
        |error| Failure::new(Code::Usage, format!("{} can't be read: {error}", path.display())),
    )?;
    if content.len() as u64 > FILE_LIMIT {
        let text =
            format!("{} is not a record: it has more than {FILE_LIMIT} bytes", path.display());
        return Err(Failure::new(Code::Protocol, text));
    }
    Ok(content)
}

impl From<ReportError> for Failure {
    fn from(error: ReportError) -> Self {
        let code = match error {
            ReportError::Plot(_) => Code::Internal,
            _ => Code::Protocol,
        };
        Self::of(code, error)
    }
}
