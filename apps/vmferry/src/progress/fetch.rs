//! The progress of post-copy as text, on both hosts.

use bytesize::ByteSize;
use serde_json::Value;

use super::PAGE_BYTES;
use super::words::time;

/// The progress at the destination, without who needs the pages: `needs 5 pages of HOST, …`.
pub fn needs(fetch: &Value) -> String {
    let number = |name: &str| fetch[name].as_f64().unwrap_or_default();
    let eta =
        fetch["eta_ms"].as_f64().map_or_else(String::new, |eta| format!(", ETA {}", time(eta)));
    format!(
        "needs {} pages ({}) of {}: {:.0} MB/s{eta}",
        fetch["remaining_pages"],
        ByteSize(fetch["remaining_bytes"].as_u64().unwrap_or_default()),
        fetch["source"].as_str().unwrap_or_default(),
        number("bytes_per_s") / 1e6,
    )
}

/// How the guest's threads wait for missing pages.
pub fn waits(fetch: &Value) -> String {
    let number = |name: &str| fetch[name].as_f64().unwrap_or_default();
    let mut text = format!("{} faults", fetch["faults"]);
    if number("fault_pages") > 0.0 {
        let (mean, p99) = (number("wait_mean_us") / 1e3, number("wait_p99_us") / 1e3);
        text.push_str(&format!(", which waited {mean:.1} ms, 99 % at most {p99:.1} ms"));
    }
    if number("awaited_pages") > 0.0 {
        let (pages, since) = (&fetch["awaited_pages"], time(number("awaited_ms")));
        text.push_str(&format!("; threads wait for {pages} pages now, the first for {since}"));
    }
    text
}

/// What the destination says of a broken link to the source, or that it was restored.
pub fn link(fetch: &Value) -> Option<String> {
    let Some(lost) = fetch["link_lost_ms"].as_f64() else {
        let again = fetch["reconnections"].as_u64().filter(|again| *again > 0)?;
        return Some(format!("{again} lost channels were restored"));
    };
    let (count, all) = (&fetch["lost_channels"], &fetch["channels"]);
    let of = fetch["source"].as_str().unwrap_or_default();
    let what = match count == all {
        true => format!("the link to {of} is lost"),
        false => format!("{count} of {all} channels to {of} are lost"),
    };
    Some(format!("{what} for {}; that host reconnects by itself", time(lost)))
}

/// The progress at the source: `runs at HOST and needs 5 more pages of this host`.
pub fn serves(progress: &Value) -> String {
    let number = |name: &str| progress[name].as_u64().unwrap_or_default();
    let pages = number("round_pages").saturating_sub(number("round_sent_pages"));
    let to = progress["destination"].as_str().unwrap_or("the destination");
    if progress["crashed"] == true {
        // A process that took over from another one does not know what the destination lacked.
        let lacked = match number("round_pages") {
            0 => "pages".into(),
            _ => format!("{pages} pages ({})", ByteSize(pages * PAGE_BYTES)),
        };
        return format!(
            "has crashed at {to} while it lacked {lacked}, which this host keeps until `vmferry \
             resolve --give-up`"
        );
    }
    match pages {
        // A process that took over from another one does not know what the destination lacks.
        0 if number("round_pages") == 0 => format!("runs at {to}, and fetches pages of this host"),
        0 => format!("runs at {to}, which has not yet confirmed its last pages"),
        pages => format!(
            "runs at {to} and needs {pages} more pages ({}) of this host",
            ByteSize(pages * PAGE_BYTES)
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fetch_has_words_for_pages_waits_and_links() {
        let mut fetch = json!({
            "source": "10.0.0.1:5 (a)", "remaining_pages": 512, "remaining_bytes": 2_097_152,
            "bytes_per_s": 12e6, "eta_ms": 4200.0, "faults": 7, "fault_pages": 6,
            "wait_mean_us": 1200.0, "wait_p99_us": 9000, "awaited_pages": 0, "awaited_ms": 0.0,
            "channels": 4, "lost_channels": 0, "link_lost_ms": null, "reconnections": 0,
        });
        assert_eq!(needs(&fetch), "needs 512 pages (2.0 MiB) of 10.0.0.1:5 (a): 12 MB/s, ETA 4 s");
        assert_eq!(waits(&fetch), "7 faults, which waited 1.2 ms, 99 % at most 9.0 ms");
        assert_eq!(link(&fetch), None);
        for (name, value) in [
            ("awaited_pages", json!(2)),
            ("awaited_ms", json!(3000.0)),
            ("lost_channels", json!(3)),
            ("link_lost_ms", json!(3500.0)),
            ("eta_ms", Value::Null),
        ] {
            fetch[name] = value;
        }
        assert!(needs(&fetch).ends_with("12 MB/s"), "{}", needs(&fetch));
        assert!(waits(&fetch).ends_with("; threads wait for 2 pages now, the first for 3 s"));
        assert!(link(&fetch).unwrap().starts_with("3 of 4 channels to 10.0.0.1:5 (a) are lost"));
        fetch["lost_channels"] = json!(4);
        assert!(link(&fetch).unwrap().starts_with("the link to 10.0.0.1:5 (a) is lost for 4 s"));
        (fetch["link_lost_ms"], fetch["reconnections"]) = (Value::Null, json!(4));
        assert_eq!(link(&fetch).unwrap(), "4 lost channels were restored");
    }

    #[test]
    fn source_says_what_the_guest_still_needs_of_it() {
        let mut progress = json!({
            "destination": "tls:b:7001", "round_pages": 600, "round_sent_pages": 88,
        });
        assert_eq!(
            serves(&progress),
            "runs at tls:b:7001 and needs 512 more pages (2.0 MiB) of this host"
        );
        progress["crashed"] = json!(true);
        assert_eq!(
            serves(&progress),
            "has crashed at tls:b:7001 while it lacked 512 pages (2.0 MiB), which this host keeps \
             until `vmferry resolve --give-up`"
        );
        progress["crashed"] = json!(false);
        progress["round_sent_pages"] = json!(600);
        assert!(serves(&progress).contains("not yet confirmed"));
        (progress["round_pages"], progress["round_sent_pages"]) = (json!(0), json!(0));
        assert!(serves(&progress).ends_with(", and fetches pages of this host"));
    }
}
