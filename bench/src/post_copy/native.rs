//! QEMU's own post-copy, with its pre-empt channel.

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use vmferry_net_lab::DESTINATION_ADDRESS;
use vmferry_qemu::Qmp;

use super::DOWNTIME_LIMIT;
use super::observed::Sample;
use super::pair::{Ends, TIMEOUT};
use super::trace::Waits;

/// Moves the guest, and switches it over when the first pass is over.
pub fn migrate(ends: &Ends, tls: bool) -> anyhow::Result<Sample> {
    let (mut source, mut destination) = (Qmp::connect(&ends.here)?, Qmp::connect(&ends.there)?);
    let sample = between(&mut source, &mut destination, ends, tls);
    sample.with_context(|| {
        let of = |qmp: &mut Qmp| qmp.execute("query-migrate", json!({})).unwrap_or_default();
        let (source, destination) = (of(&mut source), of(&mut destination));
        format!("query-migrate at the source: {source}; at the destination: {destination}")
    })
}

fn between(
    source: &mut Qmp,
    destination: &mut Qmp,
    ends: &Ends,
    tls: bool,
) -> anyhow::Result<Sample> {
    for (qmp, credentials) in [(&mut *source, "client"), (&mut *destination, "server")] {
        set_up(qmp, tls.then_some(credentials))?;
    }
    let listen = format!("tcp:{DESTINATION_ADDRESS}:0");
    destination.execute("migrate-incoming", json!({ "uri": listen }))?;
    let listening = destination.execute("query-migrate", json!({}))?;
    let port = listening["socket-address"][0]["port"].as_str().context("QEMU reported no port")?;
    let to = format!("tcp:{DESTINATION_ADDRESS}:{port}");
    source.forget_events();
    source.execute("migrate", json!({ "uri": to }))?;
    let ended = |event: &Value| {
        let status = event["data"]["status"].as_str();
        event["event"] == "MIGRATION" && matches!(status, Some("completed" | "failed"))
    };
    // The second pass begins when the first one is over.
    let second = |event: &Value| {
        event["event"] == "MIGRATION_PASS" && event["data"]["pass"].as_u64() > Some(1)
    };
    source.wait_for("migrate", TIMEOUT, |event| ended(event) || second(event))?;
    source.execute("migrate-start-postcopy", json!({}))?;
    let status = |wanted: &'static str| {
        move |event: &Value| event["event"] == "MIGRATION" && event["data"]["status"] == wanted
    };
    let begun = status("postcopy-active");
    let begun = source.wait_for("migrate", TIMEOUT, |event| begun(event) || ended(event))?;
    ensure!(begun["data"]["status"] == "postcopy-active", "QEMU moved the guest by pre-copy");
    let over = source.wait_for("migrate", TIMEOUT, ended)?;
    ensure!(over["data"]["status"] == "completed", "QEMU's migration failed: {over}");
    let waits = Waits::read(&std::fs::read_to_string(&ends.trace)?);
    ensure!(waits.placed > 0, "QEMU's log has no placed page");
    Ok(Sample {
        missing_pages: waits.placed as f64,
        waits: waits.us.len() as f64,
        wait_mean_us: waits.mean(),
        wait_p50_us: waits.percentile(0.5),
        wait_p99_us: waits.percentile(0.99),
        wait_max_us: waits.percentile(1.0),
        fetch_ms: time_ms(&over)? - time_ms(&begun)?,
        ..Sample::default()
    })
}

fn time_ms(event: &Value) -> anyhow::Result<f64> {
    let part = |part: &str| event["timestamp"][part].as_f64().context("an event has no time");
    Ok(part("seconds")? * 1e3 + part("microseconds")? / 1e3)
}

fn set_up(qmp: &mut Qmp, credentials: Option<&str>) -> anyhow::Result<()> {
    let on = |name: &str| json!({ "capability": name, "state": true });
    let names = ["events", "return-path", "postcopy-ram", "postcopy-preempt"];
    let capabilities = json!({ "capabilities": names.map(on) });
    qmp.execute("migrate-set-capabilities", capabilities)?;
    // For QEMU, 0 means no limit.
    let mut parameters = json!({
        "max-bandwidth": 0,
        "max-postcopy-bandwidth": 0,
        "downtime-limit": DOWNTIME_LIMIT.as_millis() as u64,
    });
    parameters["tls-creds"] = json!(credentials.unwrap_or(""));
    if credentials == Some("client") {
        parameters["tls-hostname"] = json!(DESTINATION_ADDRESS.to_string());
    }
    qmp.execute("migrate-set-parameters", parameters)?;
    Ok(())
}
