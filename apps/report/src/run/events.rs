//! Words for events, for reports and for the command's progress.

use std::fmt::Write;

use serde::Deserialize;
use serde_json::{Map, Value};
use vmferry_api::Release;

use super::PAGE_BYTES;
use crate::human;

/// Describes an event in one sentence. Unknown events are shown with their members.
#[must_use]
pub fn sentence(event: &Map<String, Value>) -> String {
    let number = |name: &str| event.get(name).and_then(Value::as_f64).unwrap_or_default();
    let text = |name: &str| event.get(name).and_then(Value::as_str).unwrap_or_default();
    let flag = |name: &str| event.get(name).and_then(Value::as_bool).unwrap_or_default();
    let paused = if flag("paused") { ", guest paused" } else { "" };
    match text("event") {
        "started" => format!("migration of {} to {} requested", text("guest"), text("to")),
        "connected" => {
            let mut text = format!("connected, round trip {}", human::ms(number("round_trip_ms")));
            // A VMM of another release may report less.
            if let Some(protocol) = event.get("protocol").and_then(Value::as_u64) {
                let _ = write!(text, ", protocol {protocol}");
            }
            if let Some(Ok(release)) = event.get("destination").map(Release::deserialize) {
                let _ = write!(text, ", to {release}");
            }
            text
        }
        "unknown-fields" => format!(
            "the destination is newer: ignored unknown fields of its {}: {}",
            text("message"),
            event.get("fields").unwrap_or(&Value::Null)
        ),
        "round-started" => {
            format!("round {}: {} pages{paused}", number("round"), human::count(number("pages")))
        }
        "round-done" => format!(
            "round {}: {} in {}, {} sent, {}{paused}",
            number("round"),
            human::memory(number("pages") * PAGE_BYTES),
            human::ms(number("ms")),
            human::bytes(number("bytes")),
            human::rate(number("bytes_per_s"))
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
            "held before the switchover, which would take {}",
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
            format!("guest paused, {expected} expected")
        }
        "link-lost" => format!("{} lost: {}; reconnecting", text("channel"), text("reason")),
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
        "post-copy" => format!(
            "switching over with post-copy: {} pages will be fetched while the guest runs",
            human::count(number("pages"))
        ),
        "post-copy-unavailable" => format!("no post-copy: {}", text("why")),
        "serving" if event.contains_key("pages") => format!(
            "the guest runs at the destination, and fetches {} pages from here: keep both hosts \
             running",
            human::count(number("pages"))
        ),
        "guest-crashed" => {
            "the guest has crashed at the destination while it lacked pages of this host".to_owned()
        }
        "guest-ended" => match event.get("in_order") {
            Some(Value::Bool(true)) => "the guest was ended while it lacked pages".to_owned(),
            _ => "the guest has crashed while it lacked pages".to_owned(),
        },
        "serving-failed" => {
            format!("pages that the guest lacks can't be sent for now: {}", text("reason"))
        }
        "accepted" => format!(
            "{} announced: {} over {} channels",
            text("name"),
            human::memory(number("memory_bytes")),
            number("lanes")
        ),
        "authenticated" => {
            let names = event.get("names").and_then(Value::as_array);
            let name = names.and_then(|names| names.first()?.as_str());
            format!("{} is {}", text("peer"), name.unwrap_or("a certificate without a name"))
        }
        "turned-away" => format!("turned {} away: {}", text("peer"), text("reason")),
        "attempt-failed" => format!("still waiting: {}", text("reason")),
        "running" => "the guest runs at the destination".to_owned(),
        "fetching" => format!(
            "{} of its pages are still at the source, and are fetched while it runs",
            human::count(number("pages"))
        ),
        "fetched" => "every page has arrived: the source is not needed any more".to_owned(),
        "fetching-failed" => format!("fetching pages: {}", text("reason")),
        "received" => "the destination has the guest".to_owned(),
        "ready" => "the destination is ready".to_owned(),
        "committed" => {
            "committed: the source cannot resume the guest without the destination's consent"
                .to_owned()
        }
        "in-doubt" => format!("IN DOUBT: {}", text("reason")),
        "witness-decided" => match text("register") {
            "taken-back" => "the witness has given the guest back to the source".to_owned(),
            "aborted" => "the witness says that the guest never runs at the destination".to_owned(),
            _ => "the witness says that the guest is at the destination".to_owned(),
        },
        "too-late-to-cancel" => "too late to cancel: the handover is under way".to_owned(),
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
                r#"{"event":"round-done","round":2,"pages":512,"ms":9.5,"bytes":1e6,
                    "bytes_per_s":1.05e8}"#,
                "round 2: 2 MiB in 9.5 ms, 1 MB sent, 105 MB/s",
            ),
            (
                r#"{"event":"throttled","percent":40}"#,
                "the guest writes faster than the link: vCPUs throttled by 40 %",
            ),
            (
                r#"{"event":"link-lost","channel":"lane 1","reason":"reset"}"#,
                "lane 1 lost: reset; reconnecting",
            ),
            (
                r#"{"event":"connected","round_trip_ms":0.2,
                    "protocol":2,"destination":{"vmferry":"0.1.0","vmm":"QEMU 10.0.2"}}"#,
                "connected, round trip 0.20 ms, protocol 2, to vmferry 0.1.0, QEMU 10.0.2",
            ),
            (
                r#"{"event":"serving","pages":1335}"#,
                "the guest runs at the destination, and fetches 1,335 pages from here: keep both \
                 hosts running",
            ),
            (
                r#"{"event":"authenticated","peer":"10.0.0.1:9","names":["host-a"]}"#,
                "10.0.0.1:9 is host-a",
            ),
            (
                r#"{"event":"guest-crashed"}"#,
                "the guest has crashed at the destination while it lacked pages of this host",
            ),
            (
                r#"{"event":"guest-ended","in_order":true}"#,
                "the guest was ended while it lacked pages",
            ),
            // A VMM that answers on its control socket.
            (r#"{"event":"serving","name":"web","pid":7}"#, "serving: name web, pid 7"),
            (r#"{"event":"newer","run":"x","what":[1],"how":"so"}"#, "newer: what [1], how so"),
            (r#"{"event":"failed"}"#, "failed: no reason given"),
        ];
        for (event, sentence) in cases {
            assert_eq!(words(event), sentence);
        }
    }
}
