//! `vmferry balloon`: the actual and target size of a guest's balloon, and the guest's memory
//! statistics.

use std::fmt::Write;

use bytesize::ByteSize;
use serde_json::Value;
use vmferry_control::{Request, call};

use super::socket;
use crate::args::BalloonOptions;
use crate::exit::Failure;
use crate::output::Output;

/// Statistics that are numbers of events, not bytes.
const EVENTS: [&str; 6] = [
    "major-faults",
    "minor-faults",
    "hugetlb-allocations",
    "hugetlb-failures",
    "oom-kills",
    "allocation-stalls",
];

/// Sets the size if one is given, and shows the balloon.
pub fn run(options: &BalloonOptions, output: &Output) -> Result<(), Failure> {
    let request =
        options.size.map_or(Request::Balloon, |target_bytes| Request::SetBalloon { target_bytes });
    let status = call(&socket(&options.guest)?, &request, &mut |_| {})?;
    output.result(&status, || describe(&options.guest, &status));
    Ok(())
}

fn describe(guest: &str, status: &Value) -> String {
    let bytes = |name: &str| ByteSize(status[name].as_u64().unwrap_or_default());
    let mut text = format!("{guest}: balloon of {}", bytes("actual_bytes"));
    let mut line = |line: String| {
        // Writing into a string does not fail.
        let _ = write!(text, "\n  {line}");
    };
    if status["actual_bytes"] != status["target_bytes"] {
        line(format!("target: {}", bytes("target_bytes")));
    }
    if status["driver"] != true {
        line("the guest has no driver for it, or the driver has not started".into());
    }
    if status["needs_reset"] == true {
        line("BROKEN: the guest's driver must reset the device".into());
    }
    line(format!("returned to this host: {}", bytes("discarded_bytes")));
    if let Some(hints) = status["hints"].as_object() {
        let hinted = ByteSize(hints["bytes"].as_u64().unwrap_or_default());
        line(format!("hinted free in the last migration: {hinted}"));
    }
    if let Some(statistics) = status["statistics"].as_object() {
        let age = if status["statistics_fresh"] == true { "" } else { " (outdated)" };
        line(format!("statistics{age}:"));
        for (name, value) in statistics {
            let number = value.as_u64().unwrap_or_default();
            let shown = match EVENTS.contains(&name.as_str()) {
                true => number.to_string(),
                false => ByteSize(number).to_string(),
            };
            line(format!("  {name}: {shown}"));
        }
    }
    for warning in status["warnings"].as_array().into_iter().flatten() {
        line(format!("warning: {}", warning.as_str().unwrap_or_default()));
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn describe_shows_sizes_hints_and_statistics() {
        let status = json!({
            "driver": true, "needs_reset": false, "features": ["stats-vq"],
            "target_bytes": 64 << 20, "actual_bytes": 32 << 20, "discarded_bytes": 32 << 20,
            "deflated_bytes": 0, "hints": { "id": 2, "ranges": 1, "bytes": 4096, "complete": true },
            "statistics": { "free-memory": 1 << 20, "major-faults": 17 }, "statistics_fresh": false,
            "warnings": ["something"],
        });
        let expected = "web: balloon of 32.0 MiB\n  target: 64.0 MiB\n  \
                        returned to this host: 32.0 MiB\n  \
                        hinted free in the last migration: 4.0 KiB\n  \
                        statistics (outdated):\n    free-memory: 1.0 MiB\n    major-faults: 17\n  \
                        warning: something";
        assert_eq!(describe("web", &status), expected);
    }
}
