//! QEMU's own migration, ordered by QMP.

use std::time::Instant;

use anyhow::Context;
use serde_json::{Value, json};
use vmferry_qemu::Qmp;

use super::guest::{Host, Moved, PATIENCE};

/// The downtime that both QEMU and vmferry may take, in milliseconds: QEMU's default.
pub const DOWNTIME_LIMIT_MS: u64 = 300;

/// Moves the guest: one stream, or `multifd` with so many channels.
pub fn migrate(here: &Host, there: &Host, multifd: Option<u8>, tls: bool) -> anyhow::Result<Moved> {
    let (mut source, mut destination) = (here.qmp()?, there.qmp()?);
    for (qmp, credentials) in [(&mut source, "client"), (&mut destination, "server")] {
        set_up(qmp, multifd, tls.then_some(credentials))?;
    }
    destination.execute("migrate-incoming", json!({ "uri": "tcp:127.0.0.1:0" }))?;
    let listening = destination.execute("query-migrate", json!({}))?;
    let port = listening["socket-address"][0]["port"].as_str().context("no port")?.to_owned();
    source.forget_events();
    let begun = Instant::now();
    source.execute("migrate", json!({ "uri": format!("tcp:127.0.0.1:{port}") }))?;
    source.wait_for("migrate", PATIENCE, |event| {
        let status = event["data"]["status"].as_str();
        event["event"] == "MIGRATION" && matches!(status, Some("completed" | "failed"))
    })?;
    let done: Value = source.execute("query-migrate", json!({}))?;
    anyhow::ensure!(done["status"] == "completed", "QEMU's migration failed: {done}");
    let bytes = done["ram"]["transferred"].as_f64().context("no transferred")?;
    Ok(Moved { begun, bytes, vmferry_cpu_s: 0.0 })
}

fn set_up(qmp: &mut Qmp, multifd: Option<u8>, credentials: Option<&str>) -> anyhow::Result<()> {
    let capability = |name: &str, on: bool| json!({ "capability": name, "state": on });
    let capabilities = json!({ "capabilities": [
        capability("events", true),
        capability("multifd", multifd.is_some()),
    ] });
    qmp.execute("migrate-set-capabilities", capabilities)?;
    let mut parameters = json!({ "max-bandwidth": 0, "downtime-limit": DOWNTIME_LIMIT_MS });
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
