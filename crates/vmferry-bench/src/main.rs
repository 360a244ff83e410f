//! `vmferry-bench NAME`: one file per benchmark, each with its physical limit measured in the same
//! run.

mod bitmap;
mod dirty_log;
mod engine;
mod machine;
mod place;
mod qemu;
mod results;

use clap::{Parser, ValueEnum};

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
}

#[derive(Clone, Copy, ValueEnum)]
enum Name {
    /// Guest pages per second through the whole path, beside a raw socket and raw rustls.
    Engine,
    /// QEMU's own migration and vmferry's, of the same guests.
    Qemu,
    /// Ways to bring pages into an empty memory file.
    Place,
    /// Traversal of dirty bitmaps by byte, by word, with SIMD and with a summary.
    Bitmap,
    /// What a harvest costs with each dirty log.
    DirtyLog,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let results = match arguments.name {
        Name::Engine => engine::run(arguments.quick)?,
        Name::Qemu => qemu::run(arguments.quick)?,
        Name::Place => place::run(arguments.quick)?,
        Name::DirtyLog => dirty_log::run(arguments.quick)?,
        Name::Bitmap => bitmap::run(arguments.quick)?,
    };
    if arguments.json {
        println!("{}", serde_json::to_string(&results)?);
    } else {
        println!("{}", results.as_text());
    }
    Ok(())
}
