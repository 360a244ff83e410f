//! The options of `vmferry report`.

use std::path::PathBuf;

use clap::Args;

/// `vmferry report`.
#[derive(Debug, Args)]
#[command(after_help = "\
The page is one file that needs no network and contains no scripts. The exit status is 5 if a file
is damaged. A record that ends within a line, because its writer was killed, is not damaged.

Examples:
  vmferry send web --to host-b:7001 --tls tls-a --json > run.json
  vmferry report run.json                                      # makes run.html
  vmferry report --compare before.json after.json -o report.html
  vmferry report target/bench/*.json -o benchmarks.html
  vmferry report run.json -o - | ssh desk 'cat > report.html'")]
pub struct ReportOptions {
    /// The record of a migration (two with --compare), or results of `vmferry-bench NAME --json`.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Show two migrations side by side.
    #[arg(long)]
    pub compare: bool,
    /// File for the page, - for standard output; by default FILE with the extension .html.
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
}
