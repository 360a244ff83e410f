//! Real QEMU processes with a real Linux in them, as `scripts/setup-qemu` has fetched them.

#![allow(dead_code, reason = "each test uses a part of it")]

pub mod hop;
pub mod initramfs;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// How long anything in a guest may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// A QEMU to be tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Of Debian bookworm.
    V7_2,
    /// Of bookworm-backports.
    V10_0,
}

impl Version {
    pub const ALL: [Self; 2] = [Self::V7_2, Self::V10_0];

    fn directory(self) -> &'static str {
        match self {
            Self::V7_2 => "7.2",
            Self::V10_0 => "10.0",
        }
    }
}

/// Where packages were unpacked; fetches them the first time.
fn packages() -> &'static Path {
    static FETCHED: OnceLock<PathBuf> = OnceLock::new();
    FETCHED.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
        let fetched = Command::new(root.join("scripts/setup-qemu")).status().unwrap();
        assert!(fetched.success(), "scripts/setup-qemu has not fetched what the tests need");
        root.join("target/qemu")
    })
}

/// A directory for one test's sockets and files; its memory files are on a tmpfs.
pub struct World {
    pub directory: TempDir,
    memory: TempDir,
}

impl World {
    pub fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
            memory: tempfile::Builder::new()
                .prefix("vmferry-test-")
                .tempdir_in("/dev/shm")
                .unwrap(),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

/// What a QEMU is started with.
#[derive(Clone, Debug)]
pub struct Machine {
    pub version: Version,
    pub kind: &'static str,
    pub mib: u64,
    pub vcpus: u32,
    pub backend: Backend,
    /// The kernel's command line, beyond what every guest has.
    pub workload: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    File,
    Memfd,
    Private,
    TwoNodes,
}

impl Machine {
    pub fn new(version: Version, workload: &str) -> Self {
        Self {
            version,
            kind: "q35",
            mib: 256,
            vcpus: 1,
            backend: Backend::File,
            workload: workload.to_owned(),
        }
    }

    /// Starts it.
    pub fn start(&self, world: &World, name: &str, extra: &[&str]) -> Qemu {
        let packages = packages().join(self.version.directory());
        let mut command = Command::new(packages.join("usr/bin/qemu-system-x86_64"));
        command.env("LD_LIBRARY_PATH", packages.join("usr/lib/x86_64-linux-gnu"));
        for part in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
            command.arg("-L").arg(packages.join(part));
        }
        let file = |part: &str| world.memory.path().join(format!("{name}-{part}"));
        let backend = |id: &str, mib: u64| match self.backend {
            Backend::File | Backend::TwoNodes => format!(
                "memory-backend-file,id={id},size={mib}M,share=on,mem-path={}",
                file(id).display()
            ),
            Backend::Memfd => format!("memory-backend-memfd,id={id},size={mib}M,share=on"),
            Backend::Private => format!("memory-backend-ram,id={id},size={mib}M"),
        };
        if self.backend == Backend::TwoNodes {
            let half = self.mib / 2;
            command.args(["-machine", self.kind]);
            for node in ["node0", "node1"] {
                command.args(["-object", &backend(node, half)]);
            }
            command.args(["-numa", "node,nodeid=0,memdev=node0,cpus=0"]);
            command.args(["-numa", "node,nodeid=1,memdev=node1"]);
        } else {
            command.args(["-machine", &format!("{},memory-backend=ram", self.kind)]);
            command.args(["-object", &backend("ram", self.mib)]);
        }
        let (qmp, console) =
            (world.path(&format!("{name}.qmp")), world.path(&format!("{name}.out")));
        command
            .args(["-accel", "tcg", "-display", "none", "-nodefaults", "-no-user-config"])
            .args(["-name", "tested", "-uuid", "6b1f7a4c-0000-4000-8000-000000000007"])
            .args(["-m", &format!("{}M", self.mib), "-smp", &self.vcpus.to_string()])
            .args(["-serial", &format!("file:{}", console.display())])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", qmp.display())])
            .arg("-kernel")
            .arg(kernel())
            .arg("-initrd")
            .arg(initramfs::path(packages_root()))
            .args(["-append", &format!("console=ttyS0 quiet panic=-1 {}", self.workload)])
            .args(extra);
        let log = File::create(world.path(&format!("{name}.log"))).unwrap();
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut qemu = Qemu { child, qmp, console, log: world.path(&format!("{name}.log")) };
        qemu.wait_until("listens", |qemu| qemu.qmp.exists());
        qemu
    }

    /// One that waits for a guest.
    pub fn incoming(&self, world: &World, name: &str) -> Qemu {
        self.start(world, name, &["-incoming", "defer"])
    }
}

fn packages_root() -> &'static Path {
    packages()
}

fn kernel() -> PathBuf {
    let boot = packages().join("kernel/boot");
    let mut found = std::fs::read_dir(boot).unwrap().flatten().map(|entry| entry.path());
    found.find(|path| path.to_string_lossy().contains("vmlinuz")).unwrap()
}

/// A QEMU process; ended when dropped.
pub struct Qemu {
    pub child: Child,
    pub qmp: PathBuf,
    console: PathBuf,
    log: PathBuf,
}

/// What the guest says of itself.
#[derive(Clone, Debug, Default)]
pub struct Said(BTreeMap<String, u64>);

impl Said {
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }
}

impl Qemu {
    /// The last thing that the guest said.
    pub fn said(&self) -> Option<Said> {
        let text = String::from_utf8_lossy(&std::fs::read(&self.console).ok()?).into_owned();
        let whole = &text[..=text.rfind('\n')?];
        let line = whole.lines().rev().find(|line| line.contains("vmferry-guest rounds"))?;
        let pairs = line.split_whitespace().filter_map(|word| word.split_once('='));
        Some(Said(pairs.filter_map(|(k, v)| Some((k.to_owned(), v.parse().ok()?))).collect()))
    }

    /// Waits until the guest has said what is wanted.
    pub fn wait_for(&mut self, what: &str, wanted: impl Fn(&Said) -> bool) -> Said {
        let mut last = Said::default();
        self.wait_until(what, |qemu| {
            let Some(said) = qemu.said() else { return false };
            let enough = wanted(&said);
            last = said;
            enough
        });
        last
    }

    fn wait_until(&mut self, what: &str, mut wanted: impl FnMut(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !wanted(self) {
            let ended = self.child.try_wait().unwrap();
            let log = || std::fs::read_to_string(&self.log).unwrap_or_default();
            assert!(ended.is_none(), "QEMU has ended before it {what}: {ended:?}: {}", log());
            let console = || std::fs::read_to_string(&self.console).unwrap_or_default();
            assert!(Instant::now() < deadline, "never {what}: {} {}", log(), console());
            // Files and sockets wake nobody.
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The guest has gone over all of its memory since now, and found nothing wrong.
    pub fn check_guest(&mut self) -> Said {
        let before = self.wait_for("works", |said| said.get("checked") > 0);
        let more = |said: &Said, name: &str| {
            before.get(name) == 0 || said.get(name) >= before.get(name) + 2
        };
        let after = self.wait_for("checks all its memory", |said| {
            said.get("uptime_us") > before.get("uptime_us") + 300_000
                && more(said, "rounds")
                && more(said, "static_rounds")
        });
        assert_eq!(after.get("corruptions"), 0, "{after:?}");
        after
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // One that has ended needs neither.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
