//! `storage`: what it costs to compare the disks of both hosts while the guest is paused.
//!
//! The bare-metal guest has a disk on a loop device, and the destination another loop device on the
//! same file: two hosts with shared storage whose name tells nothing. Both read 64 blocks of
//! 16 KiB, which are 256 pages. The other way is the same migration with `--disks-differ`, which
//! compares nothing.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, ensure};
use serde::Serialize;
use serde_json::Value;
use vmferry_qemu_lab::{Backend, LoopDevice, Machine, Version};

use crate::qemus::Lab;
use crate::results::{Results, least, median, most, row};

/// Size of the image in MiB. All of it is data.
const IMAGE_MIB: usize = 256;

/// Reads one after the other, for the yardstick.
const READS: usize = 64;

/// The size of a block.
const BLOCK: usize = 16 << 10;

/// Whether the disks are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Compared,
    NotCompared,
}

/// One migration, in milliseconds by vmferry's own clocks.
#[derive(Clone, Copy, Debug)]
struct Sample {
    downtime_ms: f64,
    source_ms: f64,
    destination_ms: f64,
}

/// Runs the benchmark.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let runs = if quick { 1 } else { 15 };
    let lab = Lab::new()?;
    let image = lab.world.path("image");
    fill(&image)?;
    let devices = [LoopDevice::of(&image)?, LoopDevice::of(&image)?];
    let mut samples: BTreeMap<Way, Vec<Sample>> = BTreeMap::new();
    for run in 1..=runs {
        for way in [Way::Compared, Way::NotCompared] {
            let sample = migrate(&lab, &devices, way).with_context(|| format!("{way:?}"))?;
            samples.entry(way).or_default().push(sample);
        }
        eprintln!("storage: run {run} of {runs}");
    }
    let mut rows = Vec::new();
    for (way, samples) in &samples {
        rows.push(row(&StorageRow::of(*way, samples))?);
    }
    let mid = |way, part: fn(&Sample) -> f64| median(samples[&way].iter().map(part));
    let downtime = |way| mid(way, |sample| sample.downtime_ms);
    let ratio = downtime(Way::Compared) / downtime(Way::NotCompared);
    let yardsticks = BTreeMap::from([(
        "64 reads of 16 KiB, one after the other, in ms".to_owned(),
        one_by_one(devices[0].path())?,
    )]);
    let ratios = BTreeMap::from([("downtime_compared".to_owned(), ratio)]);
    Ok(Results::new("storage", rows, yardsticks, ratios))
}

#[derive(Serialize)]
struct StorageRow {
    disks: &'static str,
    source_ms: f64,
    source_ms_max: f64,
    destination_ms: f64,
    destination_ms_max: f64,
    downtime_ms: f64,
    downtime_ms_min: f64,
    downtime_ms_max: f64,
    runs: usize,
}

impl StorageRow {
    fn of(way: Way, samples: &[Sample]) -> Self {
        let all = |part: fn(&Sample) -> f64| samples.iter().map(part);
        Self {
            disks: if way == Way::Compared { "compared" } else { "not compared" },
            source_ms: median(all(|sample| sample.source_ms)),
            source_ms_max: most(all(|sample| sample.source_ms)),
            destination_ms: median(all(|sample| sample.destination_ms)),
            destination_ms_max: most(all(|sample| sample.destination_ms)),
            downtime_ms: median(all(|sample| sample.downtime_ms)),
            downtime_ms_min: least(all(|sample| sample.downtime_ms)),
            downtime_ms_max: most(all(|sample| sample.downtime_ms)),
            runs: samples.len(),
        }
    }
}

/// Migrates a guest with a disk from one loop device to the other.
fn migrate(lab: &Lab, devices: &[LoopDevice; 2], way: Way) -> anyhow::Result<Sample> {
    let machine = |device: &Path| {
        let file = format!(
            "driver=host_device,node-name=file,filename={},cache.direct=on",
            device.display()
        );
        let machine = Machine::on_kvm(Version::V10_0, "hot=2,rate=1000");
        let disk = ["-blockdev", &file, "-blockdev", "driver=raw,node-name=d,file=file"];
        let machine = machine.with(&disk).with(&["-device", "virtio-blk-pci,drive=d,id=disk"]);
        Machine { backend: Backend::File, ..machine }
    };
    let mut here = machine(devices[0].path()).start(&lab.world, "here");
    here.check_guest();
    let there = machine(devices[1].path()).incoming(&lab.world, "there");
    let mut receive = lab.command();
    receive.args(["--json", "receive", "--once", "--listen", "127.0.0.1:0", "--qemu"]);
    receive.arg(&there.qmp).arg("--tls").arg(&lab.tls);
    let mut receive = receive.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut lines =
        BufReader::new(receive.stdout.take().context("vmferry receive has no output")?).lines();
    let mut event = |name: &str| -> anyhow::Result<Value> {
        for line in lines.by_ref() {
            let event: Value = serde_json::from_str(&line?)?;
            if event["event"] == name {
                return Ok(event);
            }
        }
        anyhow::bail!("vmferry receive printed no `{name}`")
    };
    let listening = event("listening")?;
    let address = listening["address"].as_str().context("it printed no address")?.to_owned();
    let mut send = lab.command();
    send.args(["--json", "send", "--to", &address, "--mode", "attached", "--qemu"]);
    send.arg(&here.qmp).arg("--tls").arg(&lab.tls);
    if way == Way::NotCompared {
        send.arg("--disks-differ");
    }
    let sent = send.stdin(Stdio::null()).output()?;
    let text = String::from_utf8(sent.stdout)?;
    ensure!(sent.status.success(), "vmferry send failed: {text}");
    let sent: Value = serde_json::from_str(text.lines().last().context("no result")?)?;
    let received = event("received")?;
    drop(there);
    receive.wait()?;
    let number = |of: &Value, name: &str| of[name].as_f64().context(name.to_owned());
    let sample = Sample {
        downtime_ms: number(&sent, "downtime_ms")?,
        source_ms: number(&sent["downtime"], "storage_ms")?,
        destination_ms: number(&received["stats"], "storage_ms")?,
    };
    let compared = sample.source_ms > 0.0 && sample.destination_ms > 0.0;
    ensure!(compared == (way == Way::Compared), "the disks were compared: {compared}");
    Ok(sample)
}

fn fill(image: &Path) -> anyhow::Result<()> {
    let mut file = File::create(image)?;
    for mib in 0..IMAGE_MIB {
        file.write_all(&[mib as u8 | 1; 1 << 20])?;
    }
    Ok(file.sync_all()?)
}

/// The same number of reads of a device without the page cache, one after the other.
fn one_by_one(device: &Path) -> anyhow::Result<f64> {
    let direct = rustix::fs::OFlags::DIRECT.bits();
    let file = File::options().read(true).custom_flags(direct as i32).open(device)?;
    let mut bytes = vec![0; BLOCK + 4096];
    let start = bytes.as_ptr().align_offset(4096);
    let begun = Instant::now();
    for read in 0..READS {
        let offset = (read * 4_999_999 % (IMAGE_MIB << 20) / BLOCK * BLOCK) as u64;
        file.read_exact_at(&mut bytes[start..][..BLOCK], offset)?;
    }
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}
