//! A guest in a QEMU, and another QEMU that waits for it, in two network namespaces.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use serde_json::Value;
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, SlotId, SlotLayout};
use vmferry_microvm::report::Report;
use vmferry_net_lab::Namespaces;
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Machine, Qemu, Version};

use super::observed::Sample;
use super::{Plan, trace};
use crate::qemus::Lab;

/// Timeout for any single operation.
pub const TIMEOUT: Duration = Duration::from_secs(180);

/// Pages at the start of guest memory that contain the guest's report.
const REPORT_PAGES: u64 = 64;

/// Number of pairs started so far.
static PAIRS: AtomicU32 = AtomicU32::new(0);

/// The two QEMUs.
pub struct Pair {
    here: Qemu,
    there: Qemu,
    ends: Ends,
    /// The source's memory file.
    memory: PathBuf,
    events_here: Qmp,
    events_there: Qmp,
}

/// What a method needs to move the guest.
pub struct Ends {
    /// The QMP socket of the guest's QEMU.
    pub here: PathBuf,
    /// The QMP socket of the QEMU that waits.
    pub there: PathBuf,
    /// The log of the destination's trace events.
    pub trace: PathBuf,
}

impl Pair {
    /// Starts both, and waits until the guest has written all pages of its workload.
    pub fn start(lab: &Lab, namespaces: &Namespaces, plan: Plan) -> anyhow::Result<Self> {
        let number = PAIRS.fetch_add(1, Ordering::Relaxed);
        let names = [format!("here-{number}"), format!("there-{number}")];
        let trace = lab.world.path(&format!("{}.trace", names[1]));
        let mut here =
            machine(lab, plan, &names[0], namespaces.source_path()).start(&lab.world, &names[0]);
        let there = traced(machine(lab, plan, &names[1], namespaces.destination_path()), &trace)
            .incoming(&lab.world, &names[1]);
        let events = |name: &str| Qmp::connect(&events_socket(lab, name));
        let (events_here, events_there) = (events(&names[0])?, events(&names[1])?);
        here.wait_for("rewrites its memory", |said| said.get("rounds") > 1);
        let memory = lab.world.path_on_tmpfs(&format!("{}-ram", names[0]));
        let ends = Ends { here: here.qmp.clone(), there: there.qmp.clone(), trace };
        Ok(Self { here, there, ends, memory, events_here, events_there })
    }

    /// Observes a migration from outside, and adds the downtime and the guest's work to what
    /// `migrate` reports. The guest must not have found its memory damaged.
    pub fn observe(
        mut self,
        window: Duration,
        migrate: impl FnOnce(&Ends) -> anyhow::Result<Sample> + Send,
    ) -> anyhow::Result<Sample> {
        let ends = &self.ends;
        let (sample, seen) = std::thread::scope(|scope| {
            let migrating = scope.spawn(|| migrate(ends));
            let seen = (|| {
                let stopped = time_of(&mut self.events_here, "STOP")?;
                let before = checked_pages(&self.memory)?;
                let resumed = time_of(&mut self.events_there, "RESUME")?;
                // The window in which the guest's work counts.
                std::thread::sleep(window);
                let after = self.there.said().map_or(0, |said| said.get("checked"));
                anyhow::Ok((resumed - stopped, after.saturating_sub(before)))
            })();
            let sample = migrating.join().map_err(|_| anyhow!("a thread panicked"));
            (sample.flatten(), seen)
        });
        let words = || {
            let words = [&mut self.here, &mut self.there].map(|qemu| qemu.last_words());
            format!("the source's QEMU: {:?}; the destination's: {:?}", words[0], words[1])
        };
        let sample = sample.with_context(words)?;
        let (downtime_ms, work) = seen?;
        let now = self.there.check_guest();
        ensure!(now.get("corruptions") == 0, "the guest found its memory damaged: {now:?}");
        Ok(Sample { downtime_ms, guest_work: Some(work as f64), ..sample })
    }
}

/// One of the two QEMUs, with certificates and a monitor for events.
fn machine(lab: &Lab, plan: Plan, name: &str, namespace: PathBuf) -> Machine {
    let credentials =
        |end: &str| format!("tls-creds-x509,id={end},endpoint={end},dir={}", lab.tls.display());
    let workload = format!("hot={},random", plan.hot_mib);
    let on_kvm = Machine::on_kvm(Version::V10_0, &workload);
    let machine = Machine { mib: plan.mib, namespace: Some(namespace), ..on_kvm };
    machine.with(&["-object", &credentials("client")]).with(&[
        "-object",
        &credentials("server"),
        "-qmp",
        &format!("unix:{},server=on,wait=off", events_socket(lab, name).display()),
    ])
}

fn events_socket(lab: &Lab, name: &str) -> PathBuf {
    lab.world.path(&format!("{name}.events"))
}

/// The same with a log of the events that a post-copy needs.
fn traced(machine: Machine, log: &Path) -> Machine {
    let log = log.display().to_string();
    trace::EVENTS
        .iter()
        .fold(machine.with(&["-msg", "timestamp=on", "-D", &log]), |machine, event| {
            machine.with(&["-trace", &format!("enable={event}")])
        })
}

/// Waits for an event. Returns QEMU's time of it in milliseconds, by the host's clock.
fn time_of(qmp: &mut Qmp, name: &str) -> anyhow::Result<f64> {
    let event = qmp.wait_for(name, TIMEOUT, |event: &Value| event["event"] == name)?;
    let part = |part: &str| {
        let time = event["timestamp"][part].as_f64();
        time.with_context(|| format!("an event of QEMU has no {part}"))
    };
    Ok(part("seconds")? * 1e3 + part("microseconds")? / 1e3)
}

/// The pages that a paused guest has checked, from the report in its memory.
fn checked_pages(memory: &Path) -> anyhow::Result<u64> {
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: REPORT_PAGES }];
    let copy = GuestMemory::allocate(&layout, MemoryKind::Private)?;
    let mut bytes = vec![0; REPORT_PAGES as usize * PAGE_SIZE];
    std::fs::File::open(memory)?.read_exact_at(&mut bytes, 0)?;
    copy.write_at(0, &bytes)?;
    Ok(Report::read(&copy)?.pages_checked)
}
