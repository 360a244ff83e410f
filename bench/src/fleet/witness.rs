//! The same guest moved with the fleet's witness and without, in turn, between QEMUs that wait for
//! it and receivers that are started by hand.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Instant;

use anyhow::Context;
use serde_json::Value;
use vmferry_qemu_lab::{Machine, Qemu};

use super::moves::{lines, succeeded};
use super::place::Place;
use crate::qemus::{children_cpu_s, process_cpu_s};

/// Whether both hosts use the witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    Witness,
    NoWitness,
}

impl Way {
    pub const ALL: [Self; 2] = [Self::Witness, Self::NoWitness];

    pub fn name(self) -> &'static str {
        match self {
            Self::Witness => "with --witness",
            Self::NoWitness => "without",
        }
    }
}

/// One migration.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// By the source's clock.
    pub downtime_ms: f64,
    /// The part of it from COMMIT to RUNNING, in which the destination claims the guest.
    pub commit_ms: f64,
    /// From the start of the command to its end.
    pub total_ms: f64,
    /// CPU time of `vmferry send` and `vmferry receive`.
    pub cpu_s: f64,
}

/// The guest. Its QEMUs are not shown in the fleet: an agent would use their sockets, too.
pub struct Guest<'a> {
    place: &'a Place,
    machine: Machine,
    qemu: Qemu,
    host: usize,
    hops: u32,
}

impl<'a> Guest<'a> {
    /// Starts it on the first host.
    pub fn start(place: &'a Place, machine: Machine) -> Self {
        let mut qemu = machine.start(&place.lab.world, "witnessed");
        qemu.check_guest();
        Self { place, machine, qemu, host: 0, hops: 0 }
    }

    /// Moves it to the other host.
    pub fn move_on(&mut self, way: Way) -> anyhow::Result<Sample> {
        self.hops += 1;
        let [source, destination] = [self.host, 1 - self.host].map(|host| &self.place.hosts[host]);
        let world = &self.place.lab.world;
        let there = self.machine.incoming(world, &format!("witnessed-{}", self.hops));
        let mut receive = destination.command();
        receive.args(["receive", "--once", "--listen", "127.0.0.1:0", "--qemu"]);
        receive.arg(&there.qmp).arg("--tls").arg(&destination.tls);
        let mut send = source.command();
        send.args(["send", "--qemu"]).arg(&self.qemu.qmp).arg("--tls").arg(&source.tls);
        if way == Way::Witness {
            receive.arg("--witness").arg(destination.witness());
            send.arg("--witness").arg(source.witness());
        }
        let receive = receive.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let mut receive = KillOnDrop(receive);
        let said = receive.0.stdout.take().context("vmferry receive has no output")?;
        let mut said = BufReader::new(said).lines();
        let mut event = |name: &str| -> anyhow::Result<Value> {
            for line in said.by_ref() {
                let event: Value = serde_json::from_str(&line?)?;
                if event["event"] == name {
                    return Ok(event);
                }
            }
            anyhow::bail!("vmferry receive printed no `{name}`")
        };
        let listening = event("listening")?;
        send.arg("--to").arg(listening["address"].as_str().context("it printed no address")?);
        let (begun, cpu_s) = (Instant::now(), children_cpu_s()?);
        let sent = succeeded(send.stdin(Stdio::null()).output()?)?;
        let total_ms = begun.elapsed().as_secs_f64() * 1e3;
        event("received")?;
        let cpu_s = children_cpu_s()? - cpu_s + process_cpu_s(receive.0.id())?;
        let sent = lines(&sent.stdout)?;
        let stats = sent.last().context("vmferry send printed nothing")?;
        let ms = |value: &Value| value.as_f64().context("vmferry send printed no downtime");
        let (downtime_ms, commit_ms) =
            (ms(&stats["downtime_ms"])?, ms(&stats["downtime"]["commit_ms"])?);
        self.qemu = there;
        self.host = 1 - self.host;
        // A guest that has just arrived touches its memory for the first time, which would be a
        // part of the next downtime.
        self.qemu.check_guest();
        Ok(Sample { downtime_ms, commit_ms, total_ms, cpu_s })
    }
}

/// A receiver whose guest has arrived. The guest stays in its QEMU.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
