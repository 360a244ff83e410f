//! QEMU's own migration, ordered over QMP.

use std::time::Instant;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use vmferry_qemu::Qmp;

use super::host::Host;
use super::{DOWNTIME_LIMIT_MS, Moved, Order, TIMEOUT};

/// QEMU's maximum downtime limit, so that any downtime is allowed.
const ANY_DOWNTIME_MS: u64 = 2_000_000;

/// Migrates the guest with one stream, or `multifd` with this number of channels.
pub fn migrate(
    here: &Host,
    there: &Host,
    multifd: Option<u8>,
    order: Order,
) -> anyhow::Result<Moved> {
    let (mut source, mut destination) = (here.qmp()?, there.qmp()?);
    for (qmp, credentials) in [(&mut source, "client"), (&mut destination, "server")] {
        set_up(qmp, multifd, order, order.tls.then_some(credentials))?;
    }
    destination.execute("migrate-incoming", json!({ "uri": "tcp:127.0.0.1:0" }))?;
    let listening = destination.execute("query-migrate", json!({}))?;
    let port = listening["socket-address"][0]["port"]
        .as_str()
        .context("QEMU reported no port")?
        .to_owned();
    source.forget_events();
    let begun = Instant::now();
    source.execute("migrate", json!({ "uri": format!("tcp:127.0.0.1:{port}") }))?;
    // The pass that begins now exceeds the limit, as vmferry counts rounds.
    let is_stuck = |event: &Value| {
        let pass = event["data"]["pass"].as_u64();
        event["event"] == "MIGRATION_PASS"
            && order.passes.is_some_and(|passes| pass > Some(passes.into()))
    };
    let is_over = |event: &Value| {
        let status = event["data"]["status"].as_str();
        event["event"] == "MIGRATION" && matches!(status, Some("completed" | "failed"))
    };
    let event = source.wait_for("migrate", TIMEOUT, |event| is_over(event) || is_stuck(event))?;
    if is_stuck(&event) {
        let parameters = json!({ "downtime-limit": ANY_DOWNTIME_MS });
        source.execute("migrate-set-parameters", parameters)?;
        source.wait_for("migrate", TIMEOUT, is_over)?;
    }
    let done: Value = source.execute("query-migrate", json!({}))?;
    ensure!(done["status"] == "completed", "QEMU's migration failed: {done}");
    let bytes =
        done["ram"]["transferred"].as_f64().context("QEMU reported no transferred bytes")?;
    Ok(Moved { begun, bytes, vmferry_cpu_s: 0.0 })
}

fn set_up(
    qmp: &mut Qmp,
    multifd: Option<u8>,
    order: Order,
    credentials: Option<&str>,
) -> anyhow::Result<()> {
    let capability = |name: &str, on: bool| json!({ "capability": name, "state": on });
    let capabilities = json!({ "capabilities": [
        capability("events", true),
        capability("multifd", multifd.is_some()),
    ] });
    qmp.execute("migrate-set-capabilities", capabilities)?;
    // For QEMU, 0 means no limit.
    let mut parameters = json!({
        "max-bandwidth": order.max_bandwidth.unwrap_or(0), "downtime-limit": DOWNTIME_LIMIT_MS,
    });
    if let Some(channels) = multifd {
        parameters["multifd-channels"] = json!(channels);
    }
    parameters["tls-creds"] = json!(credentials.unwrap_or(""));
    if credentials == Some("client") {
        parameters["tls-hostname"] = json!("127.0.0.1");
    }
    qmp.execute("migrate-set-parameters", parameters)?;
    Ok(())
}
