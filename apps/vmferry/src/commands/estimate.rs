//! `vmferry estimate`: what a migration would cost, without migrating.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytesize::ByteSize;
use serde_json::json;
use vmferry::SourceVm;
use vmferry::estimate::{self, Estimate, Outlook, Plan};
use vmferry_control::{EstimateRequest, Request, call};
use vmferry_qemu::{Mode, Reached};

use super::socket;
use crate::args::EstimateOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// What was measured, and how.
struct Watched {
    estimate: Estimate,
    /// Why the guest would be carried, if it would.
    carried: Option<String>,
    /// Whether the guest would be paused throughout, because its QEMU loses writes while it
    /// migrates.
    stands_still: bool,
}

/// Watches the guest and computes the cost.
pub fn run(options: &EstimateOptions, output: &Output) -> Result<(), Failure> {
    if output.is_terminal() {
        output.note(format!("watching the guest for {:?}", options.time));
    }
    let watched = match &options.qemu {
        Some(qmp) => watch_qemu(qmp, options)?,
        None => watch_guest(options.guest.as_deref().unwrap_or_default(), options)?,
    };
    let outlook = watched.estimate.outlook(Plan {
        link_bytes_per_s: options.max_bandwidth as f64,
        downtime_limit: options.downtime_limit,
        max_rounds: options.max_rounds,
        stands_still: watched.stands_still,
    });
    let result = json!({
        "seen": watched.estimate,
        "carried": watched.carried,
        "stands_still": watched.stands_still,
        "link_bytes_per_s": options.max_bandwidth,
        "downtime_limit_ms": options.downtime_limit.as_secs_f64() * 1e3,
        "outlook": outlook,
    });
    output.result(&result, || describe(&watched, &outlook, options));
    Ok(())
}

fn watch_guest(guest: &str, options: &EstimateOptions) -> Result<Watched, Failure> {
    let request = Request::Estimate(EstimateRequest { time: options.time });
    let seen = call(&socket(guest)?, &request, &mut |_| {})?;
    let estimate =
        serde_json::from_value(seen).map_err(|error| Failure::of(Code::Internal, error))?;
    Ok(Watched { estimate, carried: None, stands_still: false })
}

fn watch_qemu(qmp: &Path, options: &EstimateOptions) -> Result<Watched, Failure> {
    let ended = Arc::new(AtomicBool::new(false));
    let on_signal = Arc::clone(&ended);
    let reached = Reached::by(qmp, Mode::Auto, 0)?;
    crate::signals::on_end(move || on_signal.store(true, Ordering::Release))?;
    match reached {
        Reached::Attached(source) => {
            let (memory, log) = (source.memory(), source.dirty_log());
            let estimate = estimate::watch(&memory, &*log, options.time, &ended)?;
            Ok(Watched { estimate, carried: None, stands_still: false })
        }
        Reached::Carried { source, why } => Ok(Watched {
            estimate: source.estimate(options.time, &ended)?,
            carried: why.as_ref().map(ToString::to_string),
            stands_still: source.must_stand_still(),
        }),
    }
}

fn describe(watched: &Watched, outlook: &Outlook, options: &EstimateOptions) -> String {
    let mb = |bytes: f64| bytes / 1e6;
    let seen = &watched.estimate;
    let mut lines: Vec<String> = Vec::new();
    if let Some(why) = &watched.carried {
        lines.push(format!("this guest would be carried: {why}"));
    }
    lines.extend([
        format!(
            "{} of {} hold {}",
            ByteSize(seen.populated_pages * vmferry_memory::PAGE_SIZE as u64),
            ByteSize(seen.memory_bytes),
            seen.contents.map_or_else(
                || "data at most; the contents can't be read from outside".to_owned(),
                |it| format!(
                    "data, {:.0} % of it zeros, the rest compresses {:.1} to 1",
                    it.zero_percent, it.compression_ratio
                )
            ),
        ),
        format!(
            "in {:.1} s the guest wrote {:.0} MB/s to {} of memory{}{}",
            seen.watched_ms / 1e3,
            mb(seen.dirty_bytes_per_s),
            ByteSize(seen.hot_bytes),
            seen.hot_contents.filter(|_| seen.hot_bytes > 0).map_or_else(
                String::new,
                |it| format!(" (compresses {:.1} to 1)", it.compression_ratio)
            ),
            if watched.carried.is_some() { ", by QEMU's estimate from a sample" } else { "" },
        ),
    ]);
    if watched.stands_still {
        lines.push(
            "this QEMU would lose some of its guest's writes: the guest would be paused for the \
             whole migration"
                .to_owned(),
        );
    }
    let link = mb(options.max_bandwidth as f64);
    let limit = options.downtime_limit.as_secs_f64() * 1e3;
    if outlook.converges {
        lines.push(format!(
            "at {link:.0} MB/s a migration takes about {:.1} s in {} rounds, sends {}, and pauses \
             the guest for {:.0} ms (limit {limit:.0})",
            outlook.total_ms / 1e3,
            outlook.rounds,
            ByteSize(outlook.sent_bytes),
            outlook.downtime_ms,
        ));
    } else {
        lines.push(format!(
            "at {link:.0} MB/s a migration does not converge within {} rounds: it would pause the \
             guest for {:.0} ms (limit {limit:.0})",
            options.max_rounds, outlook.downtime_ms,
        ));
        lines.push(match outlook.needed_bytes_per_s {
            Some(needed) => format!(
                "it converges at {:.0} MB/s or more, {}with --downtime-limit {}ms{}",
                mb(needed),
                if watched.stands_still { "or " } else { "" },
                (outlook.downtime_ms * 1.2).ceil(),
                if watched.stands_still { "" } else { ", or with --throttle" },
            ),
            None => "no link is fast enough for that limit: raise --downtime-limit".to_owned(),
        });
    }
    lines.join("\n")
}
