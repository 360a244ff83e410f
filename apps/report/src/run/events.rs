//! Words for events.

use serde_json::{Map, Value};

use crate::human;

/// Describes an event in one sentence. Unknown events are shown with their members.
pub fn sentence(event: &Map<String, Value>) -> String {
    let number = |name: &str| event.get(name).and_then(Value::as_f64).unwrap_or_default();
    let text = |name: &str| event.get(name).and_then(Value::as_str).unwrap_or_default();
    let flag = |name: &str| event.get(name).and_then(Value::as_bool).unwrap_or_default();
    match text("event") {
        "started" => format!("migration of {} to {} requested", text("guest"), text("to")),
        "connected" => {
            let trip = human::ms(number("round_trip_ms"));
            let destination = event.get("destination").filter(|value| !value.is_null());
            let destination = destination.map(|value| format!(", to {}", plain(value)));
            format!("connected, round trip {trip}{}", destination.unwrap_or_default())
        }
        "round-started" => {
            let paused = if flag("paused") { ", guest paused" } else { "" };
            format!("round {}: {} pages{paused}", number("round"), human::count(number("pages")))
        }
        "round-done" => format!(
            "round {} done in {}, {} sent",
            number("round"),
            human::ms(number("ms")),
            human::bytes(number("bytes"))
        ),
        "forecast" => {
            let advice = text("advice");
            let advice = if advice.is_empty() { String::new() } else { format!(": {advice}") };
            format!(
                "round {}: {} pages pending, {} of downtime predicted, {}{advice}",
                number("round"),
                human::count(number("pending_pages")),
                human::ms(number("predicted_downtime_ms")),
                verdict(text("verdict"))
            )
        }
        "held" => format!(
            "holding before the switchover; predicted downtime {}",
            human::ms(number("predicted_downtime_ms"))
        ),
        "throttled" => {
            format!(
                "the guest writes faster than the link: vCPUs throttled by {} %",
                number("percent")
            )
        }
        "paused" => {
            let expected = human::ms(number("predicted_downtime_ms"));
            format!("guest paused; predicted downtime {expected}")
        }
        "link-lost" => format!("{} lost: {}", text("channel"), text("reason")),
        "link-restored" => {
            format!("{} restored after {}", text("channel"), human::ms(number("after_ms")))
        }
        "resent" => format!(
            "lane {}: {} frames resent, {}",
            number("lane"),
            human::count(number("frames")),
            human::bytes(number("bytes"))
        ),
        "recalled" => {
            "the link was lost while the guest was paused; the guest resumed at the source"
                .to_owned()
        }
        "ready" => "the destination is ready".to_owned(),
        "committed" => {
            "committed: the source cannot resume the guest without the destination's consent"
                .to_owned()
        }
        "in-doubt" => format!("in doubt: {}", text("reason")),
        "too-late-to-cancel" => "too late to cancel".to_owned(),
        "resumed" => "the guest resumed at the source".to_owned(),
        "recording" => text("message").to_owned(),
        "done" => "done: the guest runs at the destination".to_owned(),
        "failed" => {
            let message = event.get("error").and_then(|error| error.get("message"));
            format!("failed: {}", message.and_then(Value::as_str).unwrap_or("no reason given"))
        }
        other => {
            let members = event.iter().filter(|(name, _)| {
                !matches!(name.as_str(), "event" | "time" | "run" | "elapsed_ms")
            });
            let members: Vec<String> =
                members.map(|(name, value)| format!("{name} {}", plain(value))).collect();
            if members.is_empty() {
                other.to_owned()
            } else {
                format!("{other}: {}", members.join(", "))
            }
        }
    }
}

/// Words for a forecast's verdict.
fn verdict(word: &str) -> String {
    match word {
        "fits" => "which is within the limit".to_owned(),
        "converging" => "and rounds get shorter".to_owned(),
        "not-converging" => "and rounds do not get shorter".to_owned(),
        other => other.replace('-', " "),
    }
}

/// A value as plain text.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Object(members) => {
            let words = members.iter().filter(|(_, value)| !value.is_null());
            words
                .map(|(name, value)| format!("{name} {}", plain(value)))
                .collect::<Vec<_>>()
                .join(", ")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> String {
        let Ok(Value::Object(event)) = serde_json::from_str(text) else { panic!("{text}") };
        sentence(&event)
    }

    #[test]
    fn sentence_contains_the_numbers_of_the_event() {
        let cases = [
            (
                r#"{"event":"round-started","round":2,"pages":1335,"paused":true}"#,
                "round 2: 1,335 pages, guest paused",
            ),
            (
                r#"{"event":"throttled","percent":40}"#,
                "the guest writes faster than the link: vCPUs throttled by 40 %",
            ),
            (r#"{"event":"link-lost","channel":"lane 1","reason":"reset"}"#, "lane 1 lost: reset"),
            (
                r#"{"event":"connected","round_trip_ms":0.2,
                    "destination":{"vmferry":"0.1.0","vmm":null}}"#,
                "connected, round trip 0.20 ms, to vmferry 0.1.0",
            ),
            (r#"{"event":"newer","run":"x","what":[1],"how":"so"}"#, "newer: what [1], how so"),
            (r#"{"event":"failed"}"#, "failed: no reason given"),
        ];
        for (event, sentence) in cases {
            assert_eq!(words(event), sentence);
        }
    }
}
