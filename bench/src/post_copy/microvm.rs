//! vmferry's post-copy of its own VMM's guest on KVM, by the command.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;
use vmferry_net_lab::{DESTINATION_ADDRESS, Namespaces};

use super::command::{Running, command};
use super::observed::Sample;
use super::pair::TIMEOUT;
use super::{DOWNTIME_LIMIT, Plan};
use crate::qemus::Lab;

/// The guest's name.
const NAME: &str = "post-copy";

/// How often the guest's report is read.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// Moves a guest over TLS, and switches it over after the first round.
pub fn measure(lab: &Lab, namespaces: &Namespaces, plan: Plan) -> anyhow::Result<Sample> {
    let (here, there) = (namespaces.source_path(), namespaces.destination_path());
    let command = |host: &str, arguments: &[&str]| command(lab, host, arguments);
    let tls = lab.tls.display().to_string();
    let memory = format!("{}M", plan.mib);
    let workload = format!("hot={},random", plan.hot_mib);
    let guest = ["run", NAME, "--guest", "kvm", "--memory", &memory, "--workload", &workload];
    let _guest = Running::start(command("here", &guest), &here)?;
    let listen = format!("tls:{DESTINATION_ADDRESS}:0");
    let receive = ["receive", "--once", "--listen", &listen, "--tls", &tls];
    let mut destination = Running::start(command("there", &receive), &there)?;
    let listening = destination.event("listening")?;
    let address = listening["address"].as_str().context("vmferry receive printed no address")?;
    wait_until_written(|| command("here", &["status", NAME]))?;
    let limit = format!("{}ms", DOWNTIME_LIMIT.as_millis());
    let send = ["send", NAME, "--to", address, "--tls", &tls, "--post-copy", "now"];
    let options = ["--compress", "none", "--delta-memory", "0", "--downtime-limit", &limit];
    let mut source = Running::start(command("here", &[&send[..], &options].concat()), &here)?;
    let sent = source.last()?;
    let received = destination.event("received")?;
    Sample::of(&sent, &received["stats"])
}

/// Waits until the guest has rewritten all its pages once.
fn wait_until_written(status: impl Fn() -> Command) -> anyhow::Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let shown = status().stderr(Stdio::null()).output()?;
        let shown: Value = serde_json::from_slice(&shown.stdout).unwrap_or_default();
        if shown["report"]["rounds"].as_u64() > Some(1) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the guest has not started: {shown}");
        // A guest's report causes no event.
        std::thread::sleep(LOOK_PERIOD);
    }
}
