//! A fleet of two hosts with an etcd of three members.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;
use vmferry_etcd_lab::EtcdCluster;
use vmferry_qemu_lab::{Machine, Qemu};

use super::etcd::{Served, Traffic};
use super::host::{Host, TIMEOUT, table};
use crate::qemus::{Lab, children_cpu_s};

/// Members of etcd.
const MEMBERS: u16 = 3;

/// How often the objects of the fleet are read while a change is awaited.
const LOOK_PERIOD: Duration = Duration::from_millis(100);

/// The fleet.
pub struct Place {
    /// They use etcd, so they are dropped first.
    pub hosts: [Host; 2],
    pub etcd: EtcdCluster,
    pub lab: Lab,
    /// The table `[fleet]`, for commands.
    table: PathBuf,
}

impl Place {
    /// Starts etcd and both hosts, which receive guests like `machine`.
    pub fn new(machine: &Machine) -> anyhow::Result<Self> {
        let (lab, etcd) = (Lab::new()?, EtcdCluster::start(MEMBERS));
        let file = lab.world.path("fleet.toml");
        std::fs::write(&file, table(&etcd))?;
        let made = lab.command().args(["fleet", "init", "--config"]).arg(&file).output()?;
        let problem = String::from_utf8_lossy(&made.stderr);
        ensure!(made.status.success(), "vmferry fleet init failed: {problem}");
        let a = Host::start(&lab, &etcd, "a", machine)?;
        let b = Host::start(&lab, &etcd, "b", machine)?;
        Ok(Self { hosts: [a, b], etcd, lab, table: file })
    }

    /// Starts a guest on the first host, and waits until it works.
    pub fn start(&self, machine: &Machine, name: &str) -> Qemu {
        let mut qemu = machine.start(&self.hosts[0].qemus, name);
        qemu.wait_for("works", |said| said.get("uptime_us") > 0);
        qemu
    }

    /// An order of the operator.
    pub fn order(&self, words: &[&str]) -> Command {
        let mut command = self.lab.command();
        command.args(["--json", "fleet"]).args(words).arg("--config").arg(&self.table);
        command
    }

    /// Waits until the fleet shows `count` running guests on this host, and returns them. It reads
    /// etcd without transactions.
    pub fn shows(&self, host: usize, count: usize) -> anyhow::Result<Vec<Value>> {
        let key = format!("/vmferry/hosts/{}/guests/", self.hosts[host].name);
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let got = self.etcd.etcdctl(&["get", "--prefix", "--print-value-only", &key]);
            let problem = String::from_utf8_lossy(&got.stderr);
            ensure!(got.status.success(), "etcdctl has failed: {problem}");
            let text = String::from_utf8(got.stdout)?;
            let lines = text.lines().filter(|line| !line.is_empty());
            let all: Vec<Value> = lines.map(serde_json::from_str).collect::<Result<_, _>>()?;
            if all.len() == count && all.iter().all(|guest| guest["phase"] == "running") {
                return Ok(all);
            }
            ensure!(Instant::now() < deadline, "{key} never has {count} running guests: {text}");
            // `etcdctl` could watch the keys, as one more client of etcd.
            std::thread::sleep(LOOK_PERIOD);
        }
    }

    /// Waits until the guest `tested` is shown on this host. Returns its QMP socket.
    pub fn finds_tested(&self, host: usize, count: usize) -> anyhow::Result<PathBuf> {
        let guests = self.shows(host, count)?;
        let tested = guests.iter().find(|guest| guest["name"] == "tested");
        let socket = tested.and_then(|guest| guest["socket"].as_str());
        Ok(Path::new(socket.context("the guest has no socket")?).to_owned())
    }

    /// What etcd has served so far.
    pub fn served(&self) -> anyhow::Result<Served> {
        Served::by(&self.etcd)
    }

    /// What etcd serves while nothing is ordered.
    pub fn idle(&self, time: Duration) -> anyhow::Result<Traffic> {
        let before = self.served()?;
        // The measurement takes this time.
        std::thread::sleep(time);
        Ok(self.served()?.since(&before))
    }

    /// CPU time of the commands that have ended, and of both daemons and agents with their
    /// processes that have ended, in seconds. A receiver lives as long as its guest.
    pub fn cpu_s(&self) -> anyhow::Result<f64> {
        let hosts = self.hosts.iter().map(Host::cpu_s).sum::<anyhow::Result<f64>>()?;
        Ok(children_cpu_s()? + hosts)
    }
}
