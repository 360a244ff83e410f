//! `vmferry-bench NAME`: one file per benchmark, each with its physical limit measured in the same
//! run.

mod aims;
mod bitmap;
mod carried;
mod compression;
mod dirty_log;
mod engine;
mod free_pages;
mod guest;
mod interrupt;
mod machine;
mod place;
mod plot;
mod qemu;
mod qemus;
mod raw;
mod results;
mod socket;
mod transport;

use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::{Parser, ValueEnum};

use crate::results::Results;

/// Benchmarks of vmferry.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Which benchmark.
    name: Name,
    /// Print one JSON object and nothing else.
    #[arg(long)]
    json: bool,
    /// Small and once: shows that it works, and measures nothing.
    #[arg(long)]
    quick: bool,
    /// With as much memory and time as in the published test (compression).
    #[arg(long, conflicts_with = "quick")]
    full: bool,
    /// Draw the plots into this file (bitmap, dirty-log, compression).
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// The transport benchmark starts itself again with these two.
    #[arg(long, hide = true, requires = "directory")]
    role: Option<transport::Role>,
    #[arg(long, hide = true)]
    directory: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Name {
    /// Guest pages per second through the whole path, beside a raw socket and raw rustls.
    Engine,
    /// QEMU's own migration and vmferry's, of the same guests.
    Qemu,
    /// QEMU's own migration over TLS, and the same carried by vmferry, capped and not.
    Carried,
    /// Ways to bring pages into an empty memory file.
    Place,
    /// Ways to hand frames to a TCP socket: calls, options, lengths of frames and of TLS batches (as root also
    /// between two network namespaces).
    Socket,
    /// Traversal of dirty bitmaps by byte, by word, with SIMD and with a summary.
    Bitmap,
    /// What a harvest costs with each dirty log.
    DirtyLog,
    /// Pages per second with each way to compress, by content and link.
    Compression,
    /// Total time with and without free-page hints, idle and busy guests of 8 and 128 GB (5 minutes and 18 GiB of
    /// memory).
    FreePages,
    /// Total time and idle processors with each transport, capped and not, and under attack (20 minutes and
    /// 7 GiB of memory; as root also between two network namespaces).
    Transport,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    if let (Some(role), Some(directory)) = (arguments.role, &arguments.directory) {
        return transport::be(role, directory);
    }
    let has_plots = matches!(arguments.name, Name::Bitmap | Name::DirtyLog | Name::Compression);
    ensure!(
        arguments.svg.is_none() || has_plots,
        "only `bitmap`, `dirty-log` and `compression` have plots"
    );
    let is_compression = matches!(arguments.name, Name::Compression);
    ensure!(!arguments.full || is_compression, "only `compression` has a full size");
    if matches!(arguments.name, Name::Qemu | Name::Carried) {
        interrupt::ends_all_processes()?;
    }
    let results = match measure(&arguments) {
        // It was said what has happened.
        Err(_) if interrupt::came() => std::process::exit(130),
        results => results?,
    };
    if let Some(path) = &arguments.svg {
        plot::draw(&results.plots, path)
            .with_context(|| format!("the plots can't be drawn into {}", path.display()))?;
    }
    if arguments.json {
        println!("{}", serde_json::to_string(&results.into_shape())?);
    } else {
        println!("{}", results.as_text());
    }
    Ok(())
}

fn measure(arguments: &Arguments) -> anyhow::Result<Results> {
    Ok(match arguments.name {
        Name::Engine => engine::run(arguments.quick)?,
        Name::Qemu => qemu::run(arguments.quick)?,
        Name::Carried => carried::run(arguments.quick)?,
        Name::Place => place::run(arguments.quick)?,
        Name::Socket => socket::run(arguments.quick)?,
        Name::DirtyLog => dirty_log::run(arguments.quick)?,
        Name::Bitmap => bitmap::run(arguments.quick)?,
        Name::FreePages => free_pages::run(arguments.quick)?,
        Name::Transport => transport::run(arguments.quick)?,
        Name::Compression => compression::run(match (arguments.quick, arguments.full) {
            (true, _) => compression::Size::Quick,
            (_, true) => compression::Size::Full,
            _ => compression::Size::Usual,
        })?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_benchmarks_are_run_in_turn() {
        let script = include_str!("../../scripts/bench-all");
        let line = script.lines().find_map(|line| line.strip_prefix("names=\"")).unwrap();
        let mut listed: Vec<&str> = line.trim_end_matches('"').split(' ').collect();
        let names = Name::value_variants().iter().map(|name| name.to_possible_value().unwrap());
        let mut names: Vec<String> = names.map(|name| name.get_name().to_owned()).collect();
        listed.sort_unstable();
        names.sort_unstable();
        assert_eq!(listed, names);
    }
}
