//! A QEMU process and its CPU time.

use anyhow::Context;
use serde_json::{Value, json};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::Qemu;

use super::beats::Beats;
use super::lab::Lab;

/// A QEMU that runs the guest or waits for it.
pub struct Host {
    pub qemu: Qemu,
    pub beats: Beats,
    /// The vCPU threads, which have no names of their own.
    vcpus: Vec<u64>,
}

impl Host {
    pub fn new(lab: &Lab, name: &str, qemu: Qemu) -> anyhow::Result<Self> {
        let beats = Beats::listen(&lab.world.path(&format!("{name}.beat")))?;
        let listed = Qmp::connect(&qemu.qmp)?.execute("query-cpus-fast", json!({}))?;
        let listed = listed.as_array().context("query-cpus-fast returned no list")?;
        let thread = |vcpu: &Value| {
            vcpu["thread-id"].as_u64().context("query-cpus-fast returned no thread-id")
        };
        let vcpus = listed.iter().map(thread).collect::<Result<_, _>>()?;
        Ok(Self { qemu, beats, vcpus })
    }

    pub fn qmp(&self) -> anyhow::Result<Qmp> {
        Ok(Qmp::connect(&self.qemu.qmp)?)
    }

    /// CPU time of the process without its vCPU threads, in seconds.
    pub fn cpu_s(&self) -> anyhow::Result<f64> {
        let pid = self.qemu.child.id();
        let mut vcpus = 0.0;
        for thread in &self.vcpus {
            let text = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/schedstat"))?;
            let nanoseconds = text.split(' ').next().context("schedstat is empty")?;
            vcpus += nanoseconds.parse::<f64>()? / 1e9;
        }
        Ok(process_cpu_s(pid)? - vcpus)
    }
}

/// CPU time of a process, in seconds.
pub fn process_cpu_s(pid: u32) -> anyhow::Result<f64> {
    stat_cpu_s(&format!("/proc/{pid}/stat"), 13)
}

/// CPU time of this process's ended children and their children, in seconds.
pub fn children_cpu_s() -> anyhow::Result<f64> {
    stat_cpu_s("/proc/self/stat", 15)
}

/// CPU time of a process and of its children that have ended, in seconds.
pub fn process_tree_cpu_s(pid: u32) -> anyhow::Result<f64> {
    Ok(process_cpu_s(pid)? + stat_cpu_s(&format!("/proc/{pid}/stat"), 15)?)
}

/// Sums two fields of proc_pid_stat(5), which are in ticks of 10 ms.
fn stat_cpu_s(path: &str, first: usize) -> anyhow::Result<f64> {
    let text = std::fs::read_to_string(path)?;
    let fields: Vec<&str> =
        text.rsplit_once(')').context("stat has no process name")?.1.split_whitespace().collect();
    // The text before `)` has fields 1 and 2, so the first of these is field 3.
    let ticks = |at: usize| fields.get(at - 2).and_then(|field| field.parse::<f64>().ok());
    Ok((ticks(first).context("stat has no utime")?
        + ticks(first + 1).context("stat has no stime")?)
        / 100.0)
}
