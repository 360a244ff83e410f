//! Events and rates as text.

use std::fmt::Write;

use serde_json::Value;
use vmferry_report::sentence;

use super::Seen;

/// An event as one line, with what the operator can do about it, or `None` for an event that is not
/// shown.
pub fn describe(event: &Value) -> Option<String> {
    let sentence = sentence(event.as_object()?);
    Some(match event["event"].as_str()? {
        "started" => {
            let text = |name: &str| event[name].as_str().unwrap_or_default();
            format!("{} to {}, run {}", text("guest"), text("to"), text("run"))
        }
        "held" => format!("{sentence}: the guest runs here until `vmferry switch-over`"),
        "in-doubt" => format!(
            "{sentence}. The guest stays paused while vmferry keeps asking the destination; \
             `vmferry resolve` decides without it"
        ),
        "guest-crashed" => format!(
            "{sentence}. Its pages are kept here until `vmferry resolve --give-up`; it can only be \
             started again from its disks"
        ),
        "connected"
        | "unknown-fields"
        | "recording"
        | "round-done"
        | "throttled"
        | "paused"
        | "link-lost"
        | "link-restored"
        | "resent"
        | "recalled"
        | "ready"
        | "committed"
        | "too-late-to-cancel"
        | "witness-decided"
        | "resumed"
        | "post-copy"
        | "post-copy-unavailable"
        | "serving"
        | "serving-failed" => sentence,
        _ => return None,
    })
}

/// The guest, the destination and the phase.
pub fn headline(seen: &Seen) -> String {
    let progress = &seen.progress;
    let number = |name: &str| progress[name].as_f64().unwrap_or_default();
    if progress["serving"] == true {
        let (serves, passed) = (super::fetch::serves(progress), number("elapsed_ms") / 1e3);
        return format!("{} {serves}, {passed:.1} s", seen.guest);
    }
    let phase = if progress["held"] == true {
        "held before the switchover"
    } else {
        progress["phase"].as_str().unwrap_or("connecting")
    };
    let mut text = format!("{} to {}: {phase}", seen.guest, seen.to);
    if number("round") > 0.0 {
        let _ = write!(text, ", round {}", number("round"));
    }
    let _ = write!(text, ", {:.1} s", number("elapsed_ms") / 1e3);
    text
}

/// The send rate and the forecast.
pub fn rates(seen: &Seen) -> String {
    let forecast = &seen.forecast;
    let number = |name: &str| forecast[name].as_f64().unwrap_or_default();
    let mut text = format!("{:.0} MB/s sent", seen.sent_per_s / 1e6);
    if seen.progress["serving"] == true {
        let crashed = seen.progress["crashed"] == true;
        return if crashed { text } else { text + ", keep both hosts running" };
    }
    if forecast.is_null() {
        let _ = write!(text, ", downtime limit {:.0} ms", seen.downtime_limit_ms);
        return text;
    }
    if number("compression_ratio") >= 1.1 {
        let _ = write!(text, " ({:.1}:1)", number("compression_ratio"));
    }
    let _ = write!(text, ", {}", outlook(forecast));
    text
}

/// A forecast as text: dirty rate, predicted downtime, throttling and remaining time.
pub fn outlook(forecast: &Value) -> String {
    let number = |name: &str| forecast[name].as_f64().unwrap_or_default();
    let mut text = format!(
        "{:.0} MB/s dirty, downtime {:.0} of {:.0} ms",
        number("dirty_bytes_per_s") / 1e6,
        number("predicted_downtime_ms"),
        number("downtime_limit_ms"),
    );
    if number("throttle_percent") > 0.0 {
        let _ = write!(text, ", throttled {} %", number("throttle_percent"));
    }
    if let Some(eta) = forecast["eta_ms"].as_f64() {
        let _ = write!(text, ", ETA {}", time(eta));
    }
    text
}

/// Milliseconds in a readable unit.
pub fn time(ms: f64) -> String {
    match ms / 1e3 {
        s if s < 1.0 => format!("{ms:.0} ms"),
        s if s < 120.0 => format!("{s:.0} s"),
        s => format!("{:.0} min", s / 60.0),
    }
}

/// The verdict of a forecast, whenever it changes: does not converge, or converges again.
pub fn verdict(event: &Value, seen: &mut Seen) -> Option<String> {
    if event["event"] != "forecast" {
        return None;
    }
    let stuck = event["verdict"] == "not-converging";
    if stuck == seen.advised {
        return None;
    }
    seen.advised = stuck;
    let advice = event["advice"].as_str();
    Some(match advice.filter(|_| stuck) {
        Some(advice) => format!("does not converge: {advice}"),
        None => "converges again".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn seen() -> Seen {
        let mut seen = Seen::default();
        for event in [
            json!({
                "event": "started", "guest": "web", "to": "tls:b:7001",
                "limits": { "downtime_limit_ms": 300.0 },
            }),
            json!({
                "event": "progress", "phase": "pre-copy", "round": 1, "elapsed_ms": 1000.0,
                "sent_bytes": 0,
            }),
            json!({
                "event": "progress", "phase": "pre-copy", "round": 2, "elapsed_ms": 2000.0,
                "sent_bytes": 64_000_000,
            }),
        ] {
            seen.take(&event);
        }
        seen
    }

    fn forecast(verdict: &str, eta_ms: Value, advice: Value) -> Value {
        json!({
            "event": "forecast", "verdict": verdict, "eta_ms": eta_ms, "advice": advice,
            "compression_ratio": 2.1, "dirty_bytes_per_s": 12e6, "predicted_downtime_ms": 420.0,
            "downtime_limit_ms": 300.0, "throttle_percent": 20,
        })
    }

    #[test]
    fn redrawn_lines_fit_a_narrow_terminal() {
        let mut seen = seen();
        assert_eq!(headline(&seen), "web to tls:b:7001: pre-copy, round 2, 2.0 s");
        assert_eq!(rates(&seen), "64 MB/s sent, downtime limit 300 ms");
        seen.take(&forecast("converging", 4200.0.into(), Value::Null));
        let text = rates(&seen);
        assert_eq!(
            text,
            "64 MB/s sent (2.1:1), 12 MB/s dirty, downtime 420 of 300 ms, throttled 20 %, ETA 4 s"
        );
        seen.progress["held"] = true.into();
        assert!(headline(&seen).contains("held before the switchover"));
        let serving = json!({
            "serving": true, "destination": "tls:b:7001", "round_pages": 9, "elapsed_ms": 3000.0,
        });
        seen.progress = serving;
        let text = headline(&seen);
        let says = "web runs at tls:b:7001 and needs 9 more pages (36.0 KiB) of this host, 3.0 s";
        assert_eq!(text, says);
        assert_eq!(rates(&seen), "64 MB/s sent, keep both hosts running");
    }

    #[test]
    fn verdict_is_reported_when_it_changes() {
        let mut seen = seen();
        let stuck = forecast("not-converging", Value::Null, "raise it".into());
        assert_eq!(verdict(&stuck, &mut seen).unwrap(), "does not converge: raise it");
        assert_eq!(verdict(&stuck, &mut seen), None);
        let well = forecast("converging", Value::Null, Value::Null);
        assert_eq!(verdict(&well, &mut seen).unwrap(), "converges again");
        assert_eq!(verdict(&well, &mut seen), None);
    }

    #[test]
    fn time_has_a_readable_unit() {
        assert_eq!([time(90.4), time(4200.0), time(600_000.0)], ["90 ms", "4 s", "10 min"]);
    }
}
