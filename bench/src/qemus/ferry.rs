//! vmferry's migration, by its command.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, ensure};
use serde_json::Value;

use super::host::{Host, children_cpu_s, process_cpu_s};
use super::lab::Lab;
use super::{DOWNTIME_LIMIT_MS, Moved, Order};

/// Moves the guest, carried or attached, with so many channels or the default.
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
    let mut receive = Ended(receive.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?);
    let mut lines = BufReader::new(receive.0.stdout.take().context("no output")?).lines();
    let listening: Value = serde_json::from_str(&lines.next().context("it has ended")??)?;
    let address = listening["address"].as_str().context("no address")?.to_owned();

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
    let stats: Value = serde_json::from_str(text.lines().last().context("no result")?)?;
    let bytes = stats["sent_bytes"].as_f64().context("no sent_bytes")?;
    let vmferry_cpu_s = children_cpu_s()? - before + process_cpu_s(receive.0.id())?;
    Ok(Moved { begun, bytes, vmferry_cpu_s })
}

/// Ended when dropped: its guest lives on in its QEMU.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // One that has ended needs neither.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
