//! The guest that migrates between QEMUs.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use vmferry_qemu_lab::{Backend, Machine, Version};

use super::host::Host;
use super::lab::Lab;
use super::warmth::warm_up;
use super::{By, Order, Sample, ferry, native};

/// Time between two beats of the guest.
const BEAT_US: u64 = 300;

/// Time for which a guest runs undisturbed before the next migration.
const SETTLE: Duration = Duration::from_millis(300);

/// Number of guests started so far.
static GUESTS: AtomicU32 = AtomicU32::new(0);

/// The guest and its current QEMU.
pub struct Guest<'a> {
    lab: &'a Lab,
    machine: Machine,
    host: Host,
    name: String,
    hops: u32,
}

impl<'a> Guest<'a> {
    /// Starts the guest and waits until it works.
    pub fn start(lab: &'a Lab, mib: u64, backend: Backend, workload: &str) -> anyhow::Result<Self> {
        // Unlike guests of tests it never rests.
        let workload = format!("{workload} rest=0 beat={BEAT_US}");
        let machine = Machine { mib, backend, ..Machine::new(Version::V10_0, &workload) };
        // The name is unique within this benchmark.
        let name = format!("bench-{}", GUESTS.fetch_add(1, Ordering::Relaxed));
        let qemu = with_devices(lab, &machine, &name).start(&lab.world, &name);
        let mut host = Host::new(lab, &name, qemu)?;
        host.qemu.wait_for("works", |said| said.get("uptime_us") > 0);
        Ok(Self { lab, machine, host, name, hops: 0 })
    }

    /// Migrates the guest to a new QEMU.
    pub fn move_on(mut self, order: Order) -> anyhow::Result<(Self, Sample)> {
        self.hops += 1;
        let name = format!("{}-{}", self.name, self.hops);
        let machine = with_devices(self.lab, &self.machine, &name);
        let qemu = machine.incoming(&self.lab.world, &name);
        let mut there = Host::new(self.lab, &name, qemu)?;
        warm_up(&self.host, self.machine.mib)?;
        // A guest that has just arrived touches its memory for the first time.
        std::thread::sleep(SETTLE);
        let before = self.host.cpu_s()? + there.cpu_s()?;
        let moved = match order.by {
            By::Qemu { multifd } => native::migrate(&self.host, &there, multifd, order),
            By::Vmferry { carried, channels } => {
                ferry::migrate(self.lab, &self.host, &there, (carried, channels), order)
            }
        }
        .with_context(|| {
            let said = [&mut self.host, &mut there].map(|host| host.qemu.last_words());
            format!("the source's QEMU: {:?}; the destination's: {:?}", said[0], said[1])
        })?;
        let first = there
            .beats
            .first()
            .context("the destination's QEMU received no beat from the guest")?;
        let last =
            self.host.beats.last().context("the source's QEMU received no beat from the guest")?;
        let cpu_s = self.host.cpu_s()? + there.cpu_s()? - before + moved.vmferry_cpu_s;
        let ms =
            |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e3;
        let sample = Sample {
            total_ms: ms(moved.begun, first),
            downtime_ms: ms(last, first),
            bytes: moved.bytes,
            cpu_s,
        };
        self.host = there;
        Ok((self, sample))
    }

    /// Number of corruptions that the guest has found in its memory so far.
    pub fn corruptions(&mut self) -> anyhow::Result<u64> {
        let said = self.host.qemu.wait_for("works", |said| said.get("uptime_us") > 0);
        Ok(said.get("corruptions"))
    }
}

fn with_devices(lab: &Lab, machine: &Machine, name: &str) -> Machine {
    let socket = lab.world.path(&format!("{name}.beat"));
    let chardev = format!("socket,id=beat,path={},server=on,wait=off", socket.display());
    let client = format!("tls-creds-x509,id=client,endpoint=client,dir={}", lab.tls.display());
    let server = format!("tls-creds-x509,id=server,endpoint=server,dir={}", lab.tls.display());
    machine.clone().with(&[
        "-chardev",
        &chardev,
        "-device",
        "isa-debugcon,chardev=beat",
        "-object",
        &client,
        "-object",
        &server,
    ])
}
