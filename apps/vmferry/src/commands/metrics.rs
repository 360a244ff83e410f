//! `vmferry metrics`: metrics of this host's guests and migrations in Prometheus's text format.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use serde_json::{Value, json};
use vmferry_control::http::{answer_head, read_request};
use vmferry_handover::journal::{self, Side, Verdict};

use super::directories;
use super::status::ask_all;
use crate::args::MetricsOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// How long a scraper may take to send its request, and again to read the answer. Scrapers are
/// served one at a time.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(2);

/// Prometheus's text format. It treats the additional lines of OpenMetrics as comments.
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Prints the metrics, or serves them until the process ends.
pub fn run(options: &MetricsOptions, output: &Output) -> Result<(), Failure> {
    let Some(address) = &options.listen else {
        let text = text()?;
        output.result(&json!({ "metrics": text }), || text.clone());
        return Ok(());
    };
    let failed = |error: std::io::Error| {
        if error.kind() == std::io::ErrorKind::InvalidInput {
            let text =
                format!("`{address}` is not an address: use HOST:PORT, such as 127.0.0.1:9188");
            return Failure::new(Code::Usage, text);
        }
        Failure::of(
            Code::Busy,
            anyhow::Error::new(error).context(format!("can't listen on {address}")),
        )
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    output.event(&json!({ "event": "listening", "address": bound.to_string() }), || {
        format!("metrics at http://{bound}/metrics")
    });
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        // A slow scraper is cut off; it tries again at its next interval.
        if let Err(error) = serve(stream) {
            output.note(format!("a scraper was not answered: {error}"));
        }
    }
    Ok(())
}

/// Answers one request.
fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_write_timeout(Some(SCRAPE_TIMEOUT))?;
    let mut request = TimedStream { stream: &stream, deadline: Instant::now() + SCRAPE_TIMEOUT };
    let (status, body) = match read_request(&mut request, || Ok(())) {
        Ok(request) if request.path == "/metrics" => match text() {
            Ok(text) => (200, text),
            Err(failure) => (500, format!("{failure}\n")),
        },
        Ok(_) => (404, "metrics are at /metrics\n".to_owned()),
        Err(error) => (error.status(), format!("{}\n", vmferry::chain(&error))),
    };
    stream.write_all(answer_head(status, TEXT_FORMAT, Some(body.len())).as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// A scraper's connection and the time by which its whole request must have arrived.
struct TimedStream<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl Read for TimedStream<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        // A timeout of zero is not allowed.
        self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        if left.is_zero() {
            Err(std::io::ErrorKind::TimedOut.into())
        } else {
            self.stream.read(into)
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Guest {
    guest: String,
    uuid: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Sessions {
    side: &'static str,
    verdict: &'static str,
}

/// A metric of a guest's status. Metrics of a migration exist only while it runs.
struct Measure {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    read: fn(&Value) -> Option<f64>,
}

/// 1 for true, 0 for false.
fn truth(value: &Value) -> Option<f64> {
    value.as_bool().map(|so| f64::from(u8::from(so)))
}

fn measures() -> Vec<Measure> {
    let measure = |name, help, unit, read| Measure { name, help, unit, read };
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
            "migration_remaining",
            "Pages of the round that were not sent yet",
            Some(Unit::Bytes),
            |it| {
                let pages = |name: &str| it["migration"][name].as_f64();
                Some(
                    (pages("round_pages")? - pages("round_sent_pages")?)
                        * vmferry_memory::PAGE_SIZE as f64,
                )
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

/// The journal's verdict on a session, as a label.
fn verdict_name(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Here => "here",
        Verdict::There => "there",
        Verdict::InDoubt => "in-doubt",
    }
}

/// The metrics in Prometheus's text format.
fn text() -> Result<String, Failure> {
    let directory = directories()?;
    let sessions = journal::sessions(&directory.journals())
        .map_err(|error| Failure::of(Code::Internal, error))?;
    let guests = ask_all(&directory, &sessions)?;
    let mut registry = Registry::with_prefix("vmferry");
    for measure in measures() {
        let family = Family::<Guest, Gauge<f64, std::sync::atomic::AtomicU64>>::default();
        for guest in &guests {
            if let Some(number) = (measure.read)(guest) {
                let text = |name: &str| guest[name].as_str().unwrap_or_default().to_owned();
                family
                    .get_or_create(&Guest { guest: text("name"), uuid: text("uuid") })
                    .set(number);
            }
        }
        match measure.unit {
            Some(unit) => registry.register_with_unit(measure.name, measure.help, unit, family),
            None => registry.register(measure.name, measure.help, family),
        }
    }
    let family = Family::<Sessions, Gauge>::default();
    for session in &sessions {
        let side = if session.side == Side::Source { "source" } else { "destination" };
        family.get_or_create(&Sessions { side, verdict: verdict_name(session.verdict) }).inc();
    }
    registry.register(
        "sessions",
        "Migrations in this host's journals, by the host that has the guest",
        family,
    );
    let mut text = String::new();
    encode(&mut text, &registry).map_err(|error| Failure::of(Code::Internal, error))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
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
}
