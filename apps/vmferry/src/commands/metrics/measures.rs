//! The metrics that are read from a guest's status.

use prometheus_client::registry::Unit;
use serde_json::Value;
use vmferry_memory::PAGE_SIZE;

/// A metric of a guest's status. Metrics of a migration or of a fetch exist only while it runs.
pub struct Measure {
    /// The name, without the unit.
    pub name: &'static str,
    /// What it says.
    pub help: &'static str,
    /// The unit, which the exporter appends to the name.
    pub unit: Option<Unit>,
    /// Reads the value from a status.
    pub read: fn(&Value) -> Option<f64>,
}

impl Measure {
    const fn new(
        name: &'static str,
        help: &'static str,
        unit: Option<Unit>,
        read: fn(&Value) -> Option<f64>,
    ) -> Self {
        Self { name, help, unit, read }
    }
}

/// All metrics of a guest.
pub fn measures() -> Vec<Measure> {
    guest().into_iter().chain(migration()).chain(fetch()).chain(waits()).collect()
}

/// 1 for true, 0 for false.
fn truth(value: &Value) -> Option<f64> {
    value.as_bool().map(|so| f64::from(u8::from(so)))
}

fn guest() -> Vec<Measure> {
    let measure = Measure::new;
    vec![
        measure("guest_answers", "Whether the guest's VMM answers", None, |it| {
            Some(f64::from(u8::from(it["pid"].is_number())))
        }),
        measure("guest_running", "Whether the guest runs", None, |it| {
            it["phase"].as_str().map(|phase| f64::from(u8::from(phase == "running")))
        }),
        measure("guest_memory", "Memory of the guest", Some(Unit::Bytes), |it| {
            it["memory_bytes"].as_f64()
        }),
        measure("guest_vcpus", "vCPUs of the guest", None, |it| it["vcpus"].as_f64()),
    ]
}

fn migration() -> Vec<Measure> {
    let measure = Measure::new;
    vec![
        measure("migration_active", "Whether a migration of the guest runs", None, |it| {
            it["pid"].is_number().then(|| f64::from(u8::from(it["migration"].is_object())))
        }),
        measure("migration_in_doubt", "Whether its handover is in doubt", None, |it| {
            truth(&it["migration"]["in_doubt"])
        }),
        measure("migration_held", "Whether it waits for `vmferry switch-over`", None, |it| {
            truth(&it["migration"]["held"])
        }),
        measure("migration_elapsed", "Time since it began", Some(Unit::Seconds), |it| {
            Some(it["migration"]["elapsed_ms"].as_f64()? / 1e3)
        }),
        measure("migration_round", "Number of the current round", None, |it| {
            it["migration"]["round"].as_f64()
        }),
        measure("migration_sent", "Sent on the data channels so far", Some(Unit::Bytes), |it| {
            it["migration"]["sent_bytes"].as_f64()
        }),
        measure(
            "migration_serving",
            "Whether the guest runs at the destination and needs pages of this host",
            None,
            |it| truth(&it["migration"]["serving"]),
        ),
        measure(
            "migration_crashed",
            "Whether the guest has crashed at the destination, which lacked pages of this host",
            None,
            |it| truth(&it["migration"]["crashed"]),
        ),
        measure(
            "migration_remaining",
            "Pages of the round, or pages that the guest needs of this host, not sent yet",
            Some(Unit::Bytes),
            |it| {
                let migration = &it["migration"];
                let pages = migration["round_pages"].as_f64()?;
                // A process that took over from another one does not know what is missing.
                if migration["serving"] == true && pages == 0.0 {
                    return None;
                }
                Some((pages - migration["round_sent_pages"].as_f64()?) * PAGE_SIZE as f64)
            },
        ),
        measure(
            "migration_dirty_rate",
            "Rate at which the guest dirties pages, bytes per second",
            None,
            |it| it["migration"]["forecast"]["dirty_bytes_per_s"].as_f64(),
        ),
        measure(
            "migration_link_rate",
            "Rate at which the link carries such pages, bytes per second",
            None,
            |it| it["migration"]["forecast"]["link_bytes_per_s"].as_f64(),
        ),
        measure(
            "migration_predicted_downtime",
            "Predicted downtime of a switchover now",
            Some(Unit::Seconds),
            |it| Some(it["migration"]["forecast"]["predicted_downtime_ms"].as_f64()? / 1e3),
        ),
        measure(
            "migration_downtime_limit",
            "Longest accepted downtime",
            Some(Unit::Seconds),
            |it| Some(it["migration"]["forecast"]["downtime_limit_ms"].as_f64()? / 1e3),
        ),
    ]
}

/// The pages that a guest lacks while it runs here.
fn fetch() -> Vec<Measure> {
    let measure = Measure::new;
    vec![
        measure("fetch_active", "Whether the guest lacks pages while it runs here", None, |it| {
            // The status of a QEMU guest that is sent from here has no `fetch`.
            Some(f64::from(u8::from(it.get("fetch")?.is_object())))
        }),
        measure("fetch_missing", "Missing when the guest started here", Some(Unit::Bytes), |it| {
            Some(number(it, "missing_pages")? * PAGE_SIZE as f64)
        }),
        measure("fetch_remaining", "Still missing", Some(Unit::Bytes), |it| {
            number(it, "remaining_bytes")
        }),
        measure("fetch_rate", "Rate at which pages arrive, bytes per second", None, |it| {
            number(it, "bytes_per_s")
        }),
        measure("fetch_elapsed", "Time since the guest started", Some(Unit::Seconds), |it| {
            seconds(it, "fetch_ms")
        }),
        measure(
            "fetch_eta",
            "Time until the last page arrives at this rate",
            Some(Unit::Seconds),
            |it| seconds(it, "eta_ms"),
        ),
        measure("fetch_fault_pages", "Pages that arrived while threads waited", None, |it| {
            number(it, "fault_pages")
        }),
        measure(
            "fetch_background_pages",
            "Pages that arrived before any thread touched them",
            None,
            |it| number(it, "background_pages"),
        ),
        measure("fetch_lost_channels", "Channels to the source that are lost", None, |it| {
            number(it, "lost_channels")
        }),
        measure(
            "fetch_link_lost",
            "For how long at least one channel has been lost, or 0",
            Some(Unit::Seconds),
            |it| {
                number(it, "lost_channels")?;
                Some(seconds(it, "link_lost_ms").unwrap_or(0.0))
            },
        ),
        measure("fetch_reconnections", "Lost channels that were restored", None, |it| {
            number(it, "reconnections")
        }),
    ]
}

/// The faults of a guest that lacks pages, and how long its threads wait for them.
fn waits() -> Vec<Measure> {
    let measure = Measure::new;
    vec![
        measure("fetch_faults", "Faults of the guest's threads", None, |it| number(it, "faults")),
        measure(
            "fetch_zero_faults",
            "Faults at pages that were never populated, which are zero",
            None,
            |it| number(it, "zero_faults"),
        ),
        measure("fetch_awaited_pages", "Pages that threads wait for now", None, |it| {
            number(it, "awaited_pages")
        }),
        measure(
            "fetch_awaited",
            "For how long the first of these threads has been waiting",
            Some(Unit::Seconds),
            |it| seconds(it, "awaited_ms"),
        ),
        measure("fetch_waited", "All waits together", Some(Unit::Seconds), |it| {
            seconds(it, "waited_ms")
        }),
        measure("fetch_wait_mean", "The mean wait for a page", Some(Unit::Seconds), |it| {
            wait(it, "wait_mean_us")
        }),
        measure("fetch_wait_p50", "The median wait", Some(Unit::Seconds), |it| {
            wait(it, "wait_p50_us")
        }),
        measure("fetch_wait_p99", "99 % of waits are at most this", Some(Unit::Seconds), |it| {
            wait(it, "wait_p99_us")
        }),
        measure("fetch_wait_max", "The longest wait", Some(Unit::Seconds), |it| {
            wait(it, "wait_max_us")
        }),
    ]
}

/// A number of the fetch, if there is one.
fn number(status: &Value, name: &str) -> Option<f64> {
    status["fetch"][name].as_f64()
}

/// A time of the fetch in milliseconds, as seconds.
fn seconds(status: &Value, name: &str) -> Option<f64> {
    Some(number(status, name)? / 1e3)
}

/// A wait in microseconds, as seconds. A guest that has not waited has none.
fn wait(status: &Value, name: &str) -> Option<f64> {
    number(status, "fault_pages").filter(|pages| *pages > 0.0)?;
    Some(number(status, name)? / 1e6)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vmferry::destination::FetchProgress;
    use vmferry::source::Progress;

    use super::*;

    #[test]
    fn migration_metrics_exist_only_during_a_migration() {
        let status = json!({
            "name": "web", "pid": 7, "phase": "running", "memory_bytes": 4096, "migration": null,
        });
        let read = |wanted: &str, status: &Value| {
            measures().into_iter().find(|it| it.name == wanted).and_then(|it| (it.read)(status))
        };
        assert_eq!(read("guest_running", &status), Some(1.0));
        assert_eq!(read("migration_active", &status), Some(0.0));
        assert_eq!(read("migration_round", &status), None);
        let silent = json!({ "name": "web", "phase": "not answering" });
        assert_eq!(read("guest_answers", &silent), Some(0.0));
        assert_eq!(read("migration_active", &silent), None);
        let migrating = json!({
            "pid": 7, "migration": { "round": 2, "round_pages": 10, "round_sent_pages": 4 },
        });
        assert_eq!(read("migration_remaining", &migrating), Some(6.0 * 4096.0));
    }
    #[test]
    fn fetch_metrics_exist_only_during_a_fetch() {
        let read = |status: &Value| {
            let all = measures().into_iter().filter(|it| it.name.starts_with("fetch_"));
            all.filter_map(|it| Some((it.name, (it.read)(status)?))).collect::<Vec<_>>()
        };
        let status = |fetch: &FetchProgress| json!({ "name": "web", "pid": 7, "fetch": fetch });
        assert_eq!(read(&json!({ "pid": 7, "fetch": null })), [("fetch_active", 0.0)]);
        assert_eq!(read(&json!({ "pid": 7, "guest": "qemu" })), []);
        let mut fetch = FetchProgress { remaining_bytes: 8192, ..FetchProgress::default() };
        let names = |read: &[(&'static str, f64)], end: &str| {
            read.iter().filter(|(name, _)| name.contains(end)).count()
        };
        let before = read(&status(&fetch));
        assert!(before.contains(&("fetch_remaining", 8192.0)), "{before:?}");
        assert!(before.contains(&("fetch_link_lost", 0.0)), "{before:?}");
        assert_eq!(names(&before, "wait_"), 0, "nothing has waited: {before:?}");
        (fetch.eta_ms, fetch.link_lost_ms) = (Some(1500.0), Some(250.0));
        (fetch.stats.fault_pages, fetch.stats.wait_p99_us) = (3, 4000);
        let after = read(&status(&fetch));
        assert!(after.contains(&("fetch_eta", 1.5)), "{after:?}");
        assert!(after.contains(&("fetch_link_lost", 0.25)), "{after:?}");
        assert!(after.contains(&("fetch_wait_p99", 0.004)), "{after:?}");
        let all = measures().into_iter().filter(|it| it.name.starts_with("fetch_")).count();
        assert_eq!(after.len(), all, "each has a value: {after:?}");
    }

    #[test]
    fn migration_metrics_count_the_pages_that_the_destination_still_fetches() {
        let read = |status: &Value| {
            ["migration_serving", "migration_remaining"].map(|wanted| {
                let all = measures();
                (all.iter().find(|it| it.name == wanted).unwrap().read)(status)
            })
        };
        let progress = |pages| Progress {
            serving: true,
            round_pages: pages,
            round_sent_pages: pages / 4,
            ..Progress::default()
        };
        let status = |pages| json!({ "pid": 7, "migration": progress(pages) });
        assert_eq!(read(&status(8)), [Some(1.0), Some(6.0 * 4096.0)]);
        assert_eq!(read(&status(0)), [Some(1.0), None], "it is not known after a takeover");
        assert_eq!(read(&json!({ "pid": 7, "migration": null })), [None, None]);
    }
}
