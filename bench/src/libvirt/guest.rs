//! A guest that migrates between the hosts.

use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use vmferry_libvirt_lab::{Disk, Domain};

use super::cpu::CpuMeter;
use super::lab::Lab;
use super::warmth::WarmMemory;
use super::way::Way;
use crate::interrupt;
use crate::qemus::Beats;

/// Time between two beats of the guest.
const BEAT_US: u64 = 1000;

/// Time for which a guest runs undisturbed before the next migration.
const SETTLE: Duration = Duration::from_millis(300);

/// Time limit for the guest to check all of its memory twice.
const FULL_CHECK: Duration = Duration::from_secs(400);

/// A guest's name and workload.
#[derive(Clone, Debug)]
pub struct Workload {
    pub name: String,
    /// Memory in MiB.
    pub mib: u64,
    /// The guest's command line (`testing/qemu-lab/linux/main.c`).
    pub options: String,
}

/// A guest and the host that it is on.
pub struct Guest<'a> {
    lab: &'a Lab,
    workload: Workload,
    pub host: usize,
    beats: Option<Beats>,
}

/// The cost of one migration.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// From the start of `virsh migrate` to its end.
    pub total_ms: f64,
    /// The gap between two beats of the guest, by this machine's clock.
    pub downtime_ms: f64,
    /// The downtime in `virsh domjobinfo --completed`.
    pub libvirt_downtime_ms: f64,
    /// Bytes on the cable, both directions, with all headers.
    pub wire_bytes: f64,
    /// CPU seconds at the source and at the destination.
    pub cpu_s: [f64; 2],
}

impl<'a> Guest<'a> {
    /// Starts a guest on the first host and waits until it works.
    pub fn start(lab: &'a Lab, workload: &Workload, disk: Option<Disk>) -> anyhow::Result<Self> {
        let guest = Self::begin(lab, workload, disk);
        guest.wait_until_it_works();
        Ok(Self { beats: Some(Beats::listen(&guest.beat_socket(0))?), ..guest })
    }

    /// The same without the wait.
    pub fn begin(lab: &'a Lab, workload: &Workload, disk: Option<Disk>) -> Self {
        let name = &workload.name;
        let options = format!("{} beat={BEAT_US}", workload.options);
        let devices = format!(
            "<serial type='unix'><source mode='bind' path='/run/{name}.beat'/>\
             <target type='isa-debug'><model name='isa-debugcon'/></target>\
             <address type='isa' iobase='0xe9'/></serial>"
        );
        let disks = disk.into_iter().collect();
        let domain = Domain { mib: workload.mib, devices, disks, ..Domain::linux(name, &options) };
        lab.hosts[0].libvirt.create(&domain);
        Self { lab, workload: workload.clone(), host: 0, beats: None }
    }

    /// Waits until the guest has filled its memory.
    pub fn wait_until_it_works(&self) {
        let host = &self.lab.hosts[self.host].libvirt;
        host.wait_for(self.name(), "works", |said| said.get("checked") > 0);
    }

    pub fn name(&self) -> &str {
        &self.workload.name
    }

    /// `virsh migrate` to the other host, ready to start.
    pub fn command(&self, way: Way, disk: bool) -> std::process::Command {
        let hosts = &self.lab.hosts;
        let arguments = way.arguments(self.name(), &hosts[1 - self.host], disk);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut command = hosts[self.host].libvirt.virsh_command(&arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Migrates the guest to the other host.
    pub fn move_on(&mut self, way: Way, disk: bool) -> anyhow::Result<Sample> {
        ensure!(!interrupt::received(), "interrupted");
        let (lab, from, to) = (self.lab, self.host, 1 - self.host);
        let there = &lab.hosts[to].libvirt;
        let memory = WarmMemory::allocate(self.workload.mib, there.pid_file(self.name()))?;
        std::thread::sleep(SETTLE);
        let listening = Listening::start(self.beat_socket(to))?;
        let wire_before = wire_bytes(lab)?;
        let cpu = CpuMeter::start(lab, &[self.name()])?;
        let begun = Instant::now();
        let done = self.command(way, disk).output()?;
        let total_ms = begun.elapsed().as_secs_f64() * 1e3;
        let cpu_s = cpu.stop()?;
        memory.free()?;
        let there = listening.stop()?;
        must_succeed(lab, &done)?;
        let there = there.context("the guest's debug port is not open at the destination")?;
        let first = there.first().context("the guest was not heard at the destination")?;
        let last = self.beats.as_ref().and_then(Beats::last);
        let last = last.context("the guest was not heard at the source")?;
        let wire_bytes = wire_bytes(lab)? - wire_before;
        (self.host, self.beats) = (to, Some(there));
        let libvirt_downtime_ms = self.libvirt_downtime_ms();
        self.check()?;
        Ok(Sample {
            total_ms,
            downtime_ms: first.saturating_duration_since(last).as_secs_f64() * 1e3,
            libvirt_downtime_ms,
            wire_bytes,
            cpu_s: [cpu_s[from], cpu_s[to]],
        })
    }

    /// What libvirt says about the migration that has just ended; not a number if nothing.
    fn libvirt_downtime_ms(&self) -> f64 {
        let host = &self.lab.hosts[self.host].libvirt;
        let said = host.virsh(&["domjobinfo", self.name(), "--completed"]);
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        let line = said.lines().find_map(|line| line.strip_prefix("Total downtime:"));
        let line = line.or_else(|| said.lines().find_map(|line| line.strip_prefix("Downtime:")));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        number.unwrap_or(f64::NAN)
    }

    /// Waits until the guest has reported on its present host, and checks that it has not found an
    /// error. Returns the number of times that it has checked all of its memory.
    pub fn check(&self) -> anyhow::Result<u64> {
        let host = &self.lab.hosts[self.host].libvirt;
        let said = host.wait_for(self.name(), "works", |said| said.get("uptime_us") > 0);
        ensure!(said.get("corruptions") == 0, "{} has found corruptions: {said:?}", self.name());
        Ok(said.get("static_rounds"))
    }

    /// Waits until the guest has checked all of its memory since it had done so `before` times.
    pub fn check_all_since(&self, before: u64) -> anyhow::Result<()> {
        let deadline = Instant::now() + FULL_CHECK;
        // The round that was under way then may be checked in part only.
        while self.check()? < before + 2 {
            ensure!(Instant::now() < deadline, "{} checks its memory too slowly", self.name());
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Ends the guest.
    pub fn end(self) {
        self.lab.hosts[self.host].libvirt.virsh_ok(&["destroy", self.name()]);
    }

    fn beat_socket(&self, host: usize) -> PathBuf {
        self.lab.hosts[host].libvirt.path_in_run(format!("{}.beat", self.name()))
    }
}

/// Fails with what `virsh` and the daemons have said if it failed.
pub fn must_succeed(lab: &Lab, done: &Output) -> anyhow::Result<()> {
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "virsh migrate: {said}\n{}", lab.daemons_said());
    Ok(())
}

/// Waits for a QEMU at the destination, to listen to its guest from the beginning.
struct Listening {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Option<Beats>>,
}

impl Listening {
    fn start(socket: PathBuf) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let of_thread = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("listening".into()).spawn(move || {
            loop {
                if let Ok(beats) = Beats::listen(&socket) {
                    return Some(beats);
                }
                if of_thread.load(Ordering::Acquire) {
                    return None;
                }
                // Files cause no wake-up.
                std::thread::sleep(Duration::from_millis(5));
            }
        })?;
        Ok(Self { stop, thread })
    }

    fn stop(self) -> anyhow::Result<Option<Beats>> {
        self.stop.store(true, Ordering::Release);
        self.thread.join().map_err(|_| anyhow!("a thread panicked"))
    }
}

/// Bytes that the first host has received and sent on the cable.
fn wire_bytes(lab: &Lab) -> anyhow::Result<f64> {
    let pid = lab.hosts[0].libvirt.libvirtd_pid();
    let text = std::fs::read_to_string(format!("/proc/{pid}/net/dev"))?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix("source:"));
    let line = line.context("the cable's interface is not in /proc/net/dev")?;
    let numbers: Vec<f64> = line.split_whitespace().filter_map(|n| n.parse().ok()).collect();
    // Source: Linux `net/core/net-procfs.c`: 8 numbers of reception, then 8 of transmission.
    let number = |at: usize| numbers.get(at).context("/proc/net/dev has too few numbers");
    Ok(number(0)? + number(8)?)
}
