//! The guest that wanders, and what is heard of it.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use vmferry_memory::{GuestMemory, MemoryKind, PageRun, SlotId, SlotLayout};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Machine, Qemu, Version, World};

use super::{Sample, Way, ferry, native};

/// How long anything may take.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Time between two beats of the guest.
const BEAT_US: u64 = 300;

/// Linux maps so many bytes of a file at a fault (`fault_around_bytes`).
const FAULT_AROUND: usize = 64 << 10;

/// For how long a guest is left alone before it is moved on.
const SETTLE: Duration = Duration::from_millis(300);

/// Sockets, certificates and the command.
pub struct Lab {
    pub world: World,
    /// `ca.pem`, `host.pem` and `host.key`, and the same as QEMU names them.
    pub tls: PathBuf,
    pub vmferry: PathBuf,
}

impl Lab {
    pub fn new() -> anyhow::Result<Self> {
        let beside = std::env::current_exe()?;
        let vmferry = beside.parent().context("no directory")?.join("vmferry");
        ensure!(
            vmferry.exists(),
            "the `vmferry` command is missing beside this benchmark: run `make bench NAME=qemu`"
        );
        let world = World::new();
        let lab = Self { tls: world.path("tls"), world, vmferry };
        let (pki, tls) = (lab.world.path("pki"), lab.tls.clone());
        let run = |arguments: &[&str]| -> anyhow::Result<()> {
            let done = lab.command().arg("pki").args(arguments).output()?;
            ensure!(done.status.success(), "pki: {}", String::from_utf8_lossy(&done.stderr));
            Ok(())
        };
        let (pki, out) = (pki.display().to_string(), tls.display().to_string());
        run(&["init", "--dir", &pki])?;
        run(&["issue", "bench", "--dir", &pki, "--out", &out, "--address", "127.0.0.1"])?;
        // The names by which QEMU's `tls-creds-x509` finds them.
        for (ours, theirs) in [
            ("ca.pem", "ca-cert.pem"),
            ("host.pem", "server-cert.pem"),
            ("host.key", "server-key.pem"),
            ("host.pem", "client-cert.pem"),
            ("host.key", "client-key.pem"),
        ] {
            std::fs::copy(tls.join(ours), tls.join(theirs))?;
        }
        Ok(lab)
    }

    /// The command, on a host of this benchmark's own.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.vmferry);
        // The default, /run/vmferry, is on a tmpfs too.
        command.env("VMFERRY_RUNTIME_DIR", self.world.path_on_tmpfs("host"));
        command
    }
}

/// A QEMU with the guest, or one that waits for it.
pub struct Host {
    pub qemu: Qemu,
    beats: Beats,
}

impl Host {
    fn new(lab: &Lab, name: &str, qemu: Qemu) -> anyhow::Result<Self> {
        let beats = Beats::listen(&lab.world.path(&format!("{name}.beat")))?;
        Ok(Self { qemu, beats })
    }

    pub fn qmp(&self) -> anyhow::Result<Qmp> {
        Ok(Qmp::connect(&self.qemu.qmp)?)
    }

    /// CPU time of the process without its vCPUs, in seconds.
    pub fn cpu_s(&self) -> anyhow::Result<f64> {
        let pid = self.qemu.child.id();
        let mut vcpus = 0.0;
        for entry in std::fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
            let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            if name.starts_with("CPU ") {
                let text = std::fs::read_to_string(entry.path().join("schedstat"))?;
                let nanoseconds = text.split(' ').next().and_then(|word| word.parse::<f64>().ok());
                vcpus += nanoseconds.unwrap_or_default() / 1e9;
            }
        }
        Ok(process_cpu_s(pid)? - vcpus)
    }
}

/// CPU time of a process, in seconds.
pub fn process_cpu_s(pid: u32) -> anyhow::Result<f64> {
    stat_cpu_s(&format!("/proc/{pid}/stat"), 13)
}

/// CPU time of this process's children that have ended, and of theirs, in seconds.
pub fn children_cpu_s() -> anyhow::Result<f64> {
    stat_cpu_s("/proc/self/stat", 15)
}

/// Sums two fields of proc_pid_stat(5), in ticks of 10 ms.
fn stat_cpu_s(path: &str, first: usize) -> anyhow::Result<f64> {
    let text = std::fs::read_to_string(path)?;
    let fields: Vec<&str> =
        text.rsplit_once(')').context("no stat")?.1.split_whitespace().collect();
    // The name was the second field, and the third is the first of these.
    let ticks = |at: usize| fields.get(at - 2).and_then(|field| field.parse::<f64>().ok());
    Ok((ticks(first).context("utime")? + ticks(first + 1).context("stime")?) / 100.0)
}

/// The guest, where it is now.
pub struct Guest<'a> {
    lab: &'a Lab,
    machine: Machine,
    host: Host,
    hops: u32,
}

impl<'a> Guest<'a> {
    /// Starts it and waits until it is at work.
    pub fn start(lab: &'a Lab, mib: u64, workload: &str) -> anyhow::Result<Self> {
        let workload = format!("{workload} beat={BEAT_US}");
        let machine = Machine { mib, ..Machine::new(Version::V10_0, &workload) };
        let name = "bench-0";
        let qemu = with_devices(lab, &machine, name).start(&lab.world, name);
        let mut host = Host::new(lab, name, qemu)?;
        host.qemu.wait_for("works", |said| said.get("uptime_us") > 0);
        Ok(Self { lab, machine, host, hops: 0 })
    }

    /// Moves it to a new QEMU.
    pub fn move_on(mut self, way: Way) -> anyhow::Result<(Self, Sample)> {
        self.hops += 1;
        let name = format!("bench-{}-{}", self.machine.workload.len(), self.hops);
        let machine = with_devices(self.lab, &self.machine, &name);
        let qemu = machine.incoming(&self.lab.world, &name);
        let mut there = Host::new(self.lab, &name, qemu)?;
        warm_up(&self.host, self.machine.mib)?;
        // A guest that has just arrived touches its memory for the first time.
        std::thread::sleep(SETTLE);
        let before = self.host.cpu_s()? + there.cpu_s()?;
        let moved = match way {
            Way::Qemu => native::migrate(&self.host, &there, None, false),
            Way::QemuMultifd { channels, tls } => {
                native::migrate(&self.host, &there, Some(channels), tls)
            }
            Way::Vmferry { channels, tls } => {
                ferry::migrate(self.lab, &self.host, &there, channels, tls)
            }
        }
        .with_context(|| {
            let said = [&mut self.host, &mut there].map(|host| host.qemu.last_words());
            format!("the source's QEMU: {:?}; the destination's: {:?}", said[0], said[1])
        })?;
        let first = there.beats.first().context("the guest is not heard at the destination")?;
        let last = self.host.beats.last().context("the guest was not heard at the source")?;
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

    /// Errors that it has found in its memory so far.
    pub fn corruptions(&mut self) -> anyhow::Result<u64> {
        let said = self.host.qemu.wait_for("works", |said| said.get("uptime_us") > 0);
        Ok(said.get("corruptions"))
    }
}

/// What a way of migrating reports.
pub struct Moved {
    /// When it was ordered.
    pub begun: Instant,
    /// Bytes sent.
    pub bytes: f64,
    /// CPU time of vmferry's processes.
    pub vmferry_cpu_s: f64,
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

/// Memory that was free for long has gone back to the host of a virtual machine such as this one, and is slow
/// to come again; and pages that came by a file are in no page table of the QEMU that runs the guest. Both
/// would be charged to whoever comes first.
fn warm_up(source: &Host, mib: u64) -> anyhow::Result<()> {
    let pages = mib << 8;
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages }];
    let memory = GuestMemory::allocate(&layout, MemoryKind::Thp)?;
    memory.populate(PageRun { slot: SlotId(0), first: 0, pages })?;
    drop(memory);
    let pid = source.qemu.child.id();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let file = std::fs::File::open(format!("/proc/{pid}/mem"))?;
    for line in maps.lines().filter(|line| line.contains("/dev/shm/")) {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let Some((from, to)) = range else { bail!("no mapping: {line}") };
        let (from, to) = (u64::from_str_radix(from, 16)?, u64::from_str_radix(to, 16)?);
        let path = line.find("/dev/shm/").map_or("", |at| &line[at..]);
        touch_data(&file, path, from, to)?;
    }
    Ok(())
}

/// Reads a byte of each page that has content, by the process's own mapping.
fn touch_data(memory: &std::fs::File, path: &str, from: u64, to: u64) -> anyhow::Result<()> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open(path).with_context(|| path.to_owned())?;
    let mut at = 0;
    while let Ok(data) = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
        let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(data))?;
        for page in (data..hole.min(to - from)).step_by(FAULT_AROUND) {
            memory.read_exact_at(&mut [0], from + page)?;
        }
        at = hole;
    }
    Ok(())
}

/// The guest's beats, by this host's clock.
struct Beats {
    heard: Arc<(Mutex<Heard>, Condvar)>,
}

#[derive(Clone, Copy, Default)]
struct Heard {
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Beats {
    fn listen(path: &std::path::Path) -> anyhow::Result<Self> {
        let mut stream = UnixStream::connect(path)?;
        let heard = Arc::new((Mutex::new(Heard::default()), Condvar::new()));
        let telling = Arc::clone(&heard);
        std::thread::Builder::new().name("beats".into()).spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(1..) = stream.read(&mut bytes) {
                let now = Instant::now();
                let mut heard = telling.0.lock().unwrap_or_else(PoisonError::into_inner);
                heard.first.get_or_insert(now);
                heard.last = Some(now);
                drop(heard);
                telling.1.notify_all();
            }
        })?;
        Ok(Self { heard })
    }

    /// The first beat here, awaited.
    fn first(&self) -> Option<Instant> {
        let heard = self.heard.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited =
            self.heard.1.wait_timeout_while(heard, PATIENCE, |heard| heard.first.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.first
    }

    /// The last beat so far.
    fn last(&self) -> Option<Instant> {
        self.heard.0.lock().unwrap_or_else(PoisonError::into_inner).last
    }
}
