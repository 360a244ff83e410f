//! `vmferry-sim` runs schedules of faults for a given time, and replays one by its seed.

use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::json;
use vmferry_sim::{Plan, Seed, Summary, run, run_all};

const EXAMPLES: &str = "Examples:
  vmferry-sim                          every boundary, and 10,000 random schedules
  vmferry-sim --minutes 30 --from 1000 random schedules from the thousandth on
  vmferry-sim --replay random:17       one schedule, step by step

Exit status: 0 if no schedule went wrong.";

/// Runs the engine's machines under simulated time, network and disk: cuts every message boundary,
/// fails every journal write, and adds random schedules of faults. Each schedule has a number that
/// replays it.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Options {
    /// Print the trace of one schedule.
    #[arg(long, value_name = "SEED")]
    replay: Option<Seed>,
    /// Number of random schedules in addition to those of every boundary.
    #[arg(long, default_value_t = 10_000)]
    random: u64,
    /// Continue with random schedules for this long.
    #[arg(long)]
    minutes: Option<u64>,
    /// The number of the first random schedule.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Random schedules between two checks of the clock.
const BATCH: u64 = 5_000;

fn main() -> ExitCode {
    let options = Options::parse();
    match options.replay {
        Some(seed) => replay(seed),
        None => soak(&options),
    }
}

fn replay(seed: Seed) -> ExitCode {
    let plan = Plan::new(seed);
    println!(
        "{seed}: {} lanes, verify {}, post-copy {}, reconnection for {:?}, {:#?}",
        plan.lanes, plan.verify, plan.post_copy, plan.reconnect, plan.faults
    );
    let outcome = run(&plan, true);
    for line in &outcome.trace {
        println!("{line}");
    }
    println!(
        "{:?} after {:.3} s and {} messages, in doubt: {}",
        outcome.end,
        outcome.took.as_secs_f64(),
        outcome.messages,
        outcome.was_in_doubt
    );
    for violation in &outcome.violations {
        println!("VIOLATED: {violation}");
    }
    if outcome.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn soak(options: &Options) -> ExitCode {
    let begun = Instant::now();
    let stop = AtomicBool::new(false);
    let boundaries: Vec<Seed> = (0..Plan::boundaries()).map(Seed::Boundary).collect();
    let mut next = options.from + options.random;
    let random: Vec<Seed> = (options.from..next).map(Seed::Random).collect();
    let mut whole = run_all(&[boundaries, random].concat(), &stop);
    let end = options.minutes.map(|minutes| begun + Duration::from_secs(60 * minutes));
    while end.is_some_and(|end| Instant::now() < end) && whole.failures.is_empty() {
        let seeds: Vec<Seed> = (next..next + BATCH).map(Seed::Random).collect();
        whole.merge(run_all(&seeds, &stop));
        next += BATCH;
        if !options.json {
            eprintln!("{} schedules, {:.0} s", whole.schedules, begun.elapsed().as_secs_f64());
        }
    }
    print(&whole, options, next, begun.elapsed());
    if whole.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn print(whole: &Summary, options: &Options, next: u64, took: Duration) {
    let seconds = took.as_secs_f64();
    if options.json {
        let ok = whole.failures.is_empty();
        println!("{}", json!({ "ok": ok, "seconds": seconds, "summary": whole }));
        return;
    }
    println!(
        "{} schedules ({} boundaries, random:{} to random:{}) in {seconds:.1} s; a fault struck in \
         {}; {} messages; the longest took {:.0} simulated seconds",
        whole.schedules,
        Plan::boundaries(),
        options.from,
        next.saturating_sub(1),
        whole.struck,
        whole.messages,
        whole.longest_s
    );
    println!(
        "{:.0} schedules/s; {} cuts, {} channels made again, {} frames sent again; handed over \
         after a loss: {}, after the paused guest ran on: {}, as it had to be: {}",
        whole.schedules as f64 / seconds,
        whole.cuts,
        whole.restored,
        whole.resent,
        whole.survived,
        whole.recalled,
        whole.must_be_given
    );
    println!(
        "with post-copy: {} guests ran before all their pages were there, {} of them while a \
         channel was cut; {} pages fetched, {} of them for a waiting vCPU, {} twice",
        whole.fetching,
        whole.cut_while_fetching,
        whole.fetched_pages,
        whole.faults,
        whole.again_pages
    );
    println!(
        "restarts while pages were missing: {} destinations took over, {} sources served again, \
         {} guests had died and were given up",
        whole.taken_over, whole.served_again, whole.given_up
    );
    for (end, count) in &whole.ends {
        println!("  {count:>8} {end}");
    }
    for failure in whole.failures.iter().take(20) {
        println!("FAILED {}: {}", failure.seed, failure.violations.join("; "));
    }
    match whole.failures.len() {
        0 => println!("no violation"),
        count => println!(
            "{count} schedules went wrong: `vmferry-sim --replay SEED` shows one step by step"
        ),
    }
}
