//! vmferry's post-copy of an attached QEMU, by the command.

use anyhow::Context;
use vmferry_net_lab::{DESTINATION_ADDRESS, Namespaces};

use super::DOWNTIME_LIMIT;
use super::command::{Running, command};
use super::observed::Sample;
use super::pair::Ends;
use crate::qemus::Lab;

/// Moves the guest over TLS, and switches it over after the first round.
pub fn migrate(
    lab: &Lab,
    namespaces: &Namespaces,
    ends: &Ends,
    compressed: bool,
) -> anyhow::Result<Sample> {
    let (here, there) = (namespaces.source_path(), namespaces.destination_path());
    let tls = lab.tls.display().to_string();
    let (qmp_here, qmp_there) = (ends.here.display().to_string(), ends.there.display().to_string());
    let listen = format!("tls:{DESTINATION_ADDRESS}:0");
    let receive = ["receive", "--once", "--qemu", &qmp_there, "--listen", &listen, "--tls", &tls];
    let mut destination = Running::start(command(lab, "there", &receive), &there)?;
    let listening = destination.event("listening")?;
    let address = listening["address"].as_str().context("vmferry receive printed no address")?;
    let limit = format!("{}ms", DOWNTIME_LIMIT.as_millis());
    let mut send = vec!["send", "--qemu", &qmp_here, "--keep-source", "--to", address];
    send.extend(["--tls", &tls, "--post-copy", "now", "--downtime-limit", &limit]);
    if !compressed {
        send.extend(["--compress", "none", "--delta-memory", "0"]);
    }
    let mut source = Running::start(command(lab, "here", &send), &here)?;
    let sent = source.last()?;
    let received = destination.event("received")?;
    Sample::of(&sent, &received["stats"])
}
