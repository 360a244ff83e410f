//! Migration by the `vmferry` command.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, ensure};
use serde_json::Value;

use super::host::{Host, children_cpu_s, process_cpu_s};
use super::lab::Lab;
use super::{DOWNTIME_LIMIT_MS, Moved, Order};

/// Migrates the guest, carried or attached, with this number of channels or the default.
pub fn migrate(
    lab: &Lab,
    here: &Host,
    there: &Host,
    (carried, channels): (bool, Option<u8>),
    order: Order,
) -> anyhow::Result<Moved> {
    let link = |command: &mut Command| {
        if order.tls {
            command.arg("--tls").arg(&lab.tls);
        } else {
            command.arg("--plain");
        }
    };
    let mut receive = lab.command();
    receive.args(["--json", "receive", "--once", "--listen", "127.0.0.1:0", "--qemu"]);
    link(receive.arg(&there.qemu.qmp));
    let mut receive = KillOnDrop(receive.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?);
    let mut lines =
        BufReader::new(receive.0.stdout.take().context("vmferry receive has no output")?).lines();
    let listening: Value =
        serde_json::from_str(&lines.next().context("vmferry receive ended before it listened")??)?;
    let address =
        listening["address"].as_str().context("vmferry receive printed no address")?.to_owned();

    let mut send = lab.command();
    send.args(["--json", "send", "--keep-source", "--to", &address, "--qemu"]);
    link(send.arg(&here.qemu.qmp));
    send.args(["--mode", if carried { "carried" } else { "attached" }]);
    send.args(["--downtime-limit", &format!("{DOWNTIME_LIMIT_MS}ms")]);
    if let Some(channels) = channels {
        let option = if carried { "--multifd" } else { "--channels" };
        send.args([option, &channels.to_string()]);
    }
    if let Some(bytes_per_s) = order.max_bandwidth {
        send.args(["--max-bandwidth", &bytes_per_s.to_string()]);
    }
    if let Some(passes) = order.passes {
        send.args(["--when-stuck", "switch-over", "--max-rounds", &passes.to_string()]);
    }
    let before = children_cpu_s()?;
    let begun = Instant::now();
    let sent = send.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    let text = String::from_utf8(sent.stdout)?;
    ensure!(sent.status.success(), "vmferry send failed: {text}");
    let stats: Value =
        serde_json::from_str(text.lines().last().context("vmferry send printed no result")?)?;
    let bytes = stats["sent_bytes"].as_f64().context("the result has no sent_bytes")?;
    let vmferry_cpu_s = children_cpu_s()? - before + process_cpu_s(receive.0.id())?;
    Ok(Moved { begun, bytes, vmferry_cpu_s })
}

/// A process that is killed on drop. Its guest keeps running in its QEMU.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
