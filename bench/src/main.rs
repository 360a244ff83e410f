//! The `vmferry-bench NAME` command. Each benchmark has its own module and measures its physical
//! limit in the same run.

mod aims;
mod bitmap;
mod carried;
mod compression;
mod dirty_log;
mod engine;
mod faults;
mod fleet;
mod free_pages;
mod guest;
mod interrupt;
mod libvirt;
mod machine;
mod place;
mod post_copy;
mod qemu;
mod qemus;
mod raw;
mod results;
mod socket;
mod storage;
mod transport;

use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::{Parser, ValueEnum};

use crate::results::Results;

/// Benchmarks of vmferry.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The benchmark to run.
    name: Name,
    /// Print the results as one JSON object instead of tables.
    #[arg(long)]
    json: bool,
    /// Run once on a small input. This shows that the benchmark works; the numbers mean nothing.
    #[arg(long)]
    quick: bool,
    /// Use as much memory and time as the published test (compression only).
    #[arg(long, conflicts_with = "quick")]
    full: bool,
    /// Draw the plots into this file (bitmap, dirty-log, compression, faults).
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Internal: the transport benchmark starts itself again with these two options.
    #[arg(long, hide = true, requires = "directory")]
    role: Option<transport::Role>,
    #[arg(long, hide = true)]
    directory: Option<PathBuf>,
    /// Internal: the faults benchmark starts itself again with this option.
    #[arg(long, hide = true)]
    guest: Option<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Name {
    /// Engine throughput, compared with a raw socket and raw rustls.
    Engine,
    /// QEMU's own migration and vmferry's, on the same guests.
    Qemu,
    /// QEMU's own migration over TLS, direct and carried by vmferry, with and without a bandwidth
    /// cap.
    Carried,
    /// Guests under libvirt: its own migration, plain, with TLS and through `socat`, and through
    /// `vmferry daemon`. Takes 10 minutes and 5 GiB of memory, and needs root.
    Libvirt,
    /// Ways to put pages into an empty memory file.
    Place,
    /// Ways to send frames over a TCP socket: system calls, socket options, frame lengths and TLS
    /// batch lengths. As root, also between two network namespaces.
    Socket,
    /// The cost of comparing the disks of both hosts while the guest is paused. Needs KVM and root.
    Storage,
    /// Traversal of dirty bitmaps: by byte, by word, with SIMD, and with a summary.
    Bitmap,
    /// The cost of a harvest with each dirty log.
    DirtyLog,
    /// Missing pages of a guest, served by userfaultfd: faults per second and their latency, by
    /// number of threads and descriptors. Needs root.
    Faults,
    /// What a fleet costs: the witness, orders to move guests, and agents. Takes 3 minutes, and
    /// needs KVM and root.
    Fleet,
    /// Guests that run before their memory has arrived: QEMU's post-copy and vmferry's, between two
    /// network namespaces. Takes 15 minutes and 8 GiB of memory, and needs root.
    PostCopy,
    /// Pages per second with each compression method, by content and link.
    Compression,
    /// Total time with and without free-page hints, for idle and busy guests of 8 and 128 GB. Takes
    /// 5 minutes and 18 GiB of memory.
    FreePages,
    /// Total time and idle CPU time with each transport, with and without a cap, and under attack.
    /// Takes 20 minutes and 7 GiB of memory. As root, also between two network namespaces.
    Transport,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    if let (Some(role), Some(directory)) = (arguments.role, &arguments.directory) {
        return transport::run_role(role, directory);
    }
    if let Some(order) = &arguments.guest {
        return faults::run_guest(order);
    }
    let has_plots =
        matches!(arguments.name, Name::Bitmap | Name::DirtyLog | Name::Compression | Name::Faults);
    ensure!(
        arguments.svg.is_none() || has_plots,
        "--svg works only with `bitmap`, `dirty-log`, `compression` and `faults`"
    );
    let is_compression = matches!(arguments.name, Name::Compression);
    ensure!(
        !arguments.full || is_compression,
        "--full works only with `compression`, which has a full size"
    );
    match arguments.name {
        Name::Qemu | Name::Carried | Name::PostCopy | Name::Storage | Name::Fleet => {
            interrupt::kill_children_on_signal()?
        }
        Name::Libvirt => interrupt::stop_on_signal()?,
        _ => {}
    }
    let results = match measure(&arguments) {
        // The interrupt handler has already printed why.
        Err(_) if interrupt::received() => std::process::exit(130),
        results => results?,
    };
    if let Some(path) = &arguments.svg {
        std::fs::write(path, vmferry_report::svg_of(&results.plots)?)
            .with_context(|| format!("could not write the plots to {}", path.display()))?;
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
        Name::Libvirt => libvirt::run(arguments.quick)?,
        Name::Place => place::run(arguments.quick)?,
        Name::Socket => socket::run(arguments.quick)?,
        Name::Storage => storage::run(arguments.quick)?,
        Name::DirtyLog => dirty_log::run(arguments.quick)?,
        Name::Bitmap => bitmap::run(arguments.quick)?,
        Name::FreePages => free_pages::run(arguments.quick)?,
        Name::Faults => faults::run(arguments.quick)?,
        Name::Fleet => fleet::run(arguments.quick)?,
        Name::PostCopy => post_copy::run(arguments.quick)?,
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
    fn bench_all_script_lists_every_benchmark() {
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
