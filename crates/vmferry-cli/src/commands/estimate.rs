//! `vmferry estimate`: what a migration would cost, without one.

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

/// Watches the guest, and reckons.
pub fn run(options: &EstimateOptions, output: &Output) -> Result<(), Failure> {
    if output.is_terminal() {
        output.note(format!("watching the guest for {:?}", options.time));
    }
    let estimate = match &options.qemu {
        Some(qmp) => watch_qemu(qmp, options)?,
        None => watch_guest(options.guest.as_deref().unwrap_or_default(), options)?,
    };
    let outlook = estimate.outlook(Plan {
        link_bytes_per_s: options.max_bandwidth as f64,
        downtime_limit: options.downtime_limit,
        max_rounds: options.max_rounds,
    });
    let result = json!({
        "seen": estimate,
        "link_bytes_per_s": options.max_bandwidth,
        "downtime_limit_ms": options.downtime_limit.as_secs_f64() * 1e3,
        "outlook": outlook,
    });
    output.result(&result, || describe(&estimate, &outlook, options));
    Ok(())
}

fn watch_guest(guest: &str, options: &EstimateOptions) -> Result<Estimate, Failure> {
    let request = Request::Estimate(EstimateRequest { time: options.time });
    let seen = call(&socket(guest)?, &request, &mut |_| {})?;
    serde_json::from_value(seen).map_err(|error| Failure::of(Code::Internal, error))
}

fn watch_qemu(qmp: &Path, options: &EstimateOptions) -> Result<Estimate, Failure> {
    let Reached::Attached(source) = Reached::by(qmp, Mode::Attached, 0)? else {
        return Err(Failure::new(Code::Internal, "attached to, and not attached"));
    };
    let ended = Arc::new(AtomicBool::new(false));
    let on_signal = Arc::clone(&ended);
    crate::signals::on_end(move || on_signal.store(true, Ordering::Release))?;
    Ok(estimate::watch(&source.memory(), &*source.dirty_log(), options.time, &ended)?)
}

fn describe(seen: &Estimate, outlook: &Outlook, options: &EstimateOptions) -> String {
    let mb = |bytes: f64| bytes / 1e6;
    let mut lines = vec![
        format!(
            "{} of {} hold anything, {:.0} % of that zeros, the rest compresses {:.1} to 1",
            ByteSize(seen.populated_pages * vmferry_memory::PAGE_SIZE as u64),
            ByteSize(seen.memory_bytes),
            seen.zero_percent,
            seen.compression_ratio,
        ),
        format!(
            "in {:.1} s the guest wrote {:.0} MB/s, on {} in all",
            seen.watched_ms / 1e3,
            mb(seen.dirty_bytes_per_s),
            ByteSize(seen.hot_bytes),
        ),
    ];
    let link = mb(options.max_bandwidth as f64);
    let limit = options.downtime_limit.as_secs_f64() * 1e3;
    if outlook.converges {
        lines.push(format!(
            "over {link:.0} MB/s a migration takes about {:.1} s in {} rounds, sends {}, and stops the guest for {:.0} ms \
             (limit {limit:.0})",
            outlook.total_ms / 1e3,
            outlook.rounds,
            ByteSize(outlook.sent_bytes),
            outlook.downtime_ms,
        ));
    } else {
        lines.push(format!(
            "over {link:.0} MB/s a migration does not converge within {} rounds: it would stop the guest for {:.0} ms (limit \
             {limit:.0})",
            options.max_rounds, outlook.downtime_ms,
        ));
        lines.push(match outlook.needed_bytes_per_s {
            Some(needed) => format!(
                "it converges from about {:.0} MB/s on, with --downtime-limit {}ms, or with --throttle",
                mb(needed),
                (outlook.downtime_ms * 1.2).ceil(),
            ),
            None => "no link is fast enough for that limit: allow more with --downtime-limit".to_owned(),
        });
    }
    lines.join("\n")
}
