//! Real QEMU processes, fetched by `scripts/setup-qemu`, with a real Linux that is emulated, or
//! with the bare-metal guest of `crates/microvm/guest/` on KVM. Both guests report their state on
//! the serial port ([`Said`]).

mod bare_metal;
mod booted;
mod fuse_image;
mod huge;
mod initramfs;
mod loop_device;
mod machine;
mod monitor;
mod slow_disk;

pub use fuse_image::FuseImage;
pub use huge::{HugePages, Mounted};
pub use loop_device::LoopDevice;
pub use machine::{Backend, Fixture, Guest, Machine};
pub use monitor::Monitor;
pub use slow_disk::SlowDisk;

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::Errno;
use tempfile::TempDir;

/// How long any step in a guest may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// How often a state is looked at whose change causes no wake-up.
const LOOK_PERIOD: Duration = Duration::from_millis(10);

/// A QEMU version under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// From Debian bookworm.
    V7_2,
    /// From bookworm-backports.
    V10_0,
}

impl Version {
    /// All versions.
    pub const ALL: [Self; 2] = [Self::V7_2, Self::V10_0];

    fn directory(self) -> &'static str {
        match self {
            Self::V7_2 => "7.2",
            Self::V10_0 => "10.0",
        }
    }
}

/// Where the packages are unpacked.
fn packages() -> &'static Path {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    FOUND.get_or_init(|| vmferry_kit::packages("qemu"))
}

/// A directory for one test's sockets and files; its memory files are on a tmpfs.
pub struct World {
    /// Sockets, logs and disks.
    pub directory: TempDir,
    memory: TempDir,
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl World {
    /// Creates one.
    pub fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
            memory: tempfile::Builder::new()
                .prefix("vmferry-test-")
                .tempdir_in("/dev/shm")
                .unwrap(),
        }
    }

    /// Gives everything to a user, whose QEMUs and vmferry processes then work here.
    ///
    /// # Errors
    /// File system errors.
    pub fn give_to(&self, user: u32) -> std::io::Result<()> {
        for directory in [self.directory.path(), self.memory.path()] {
            std::os::unix::fs::chown(directory, Some(user), Some(user))?;
        }
        Ok(())
    }

    /// A node of `/dev/kvm` that every user may open. Only QEMU 10.0 accepts another path.
    ///
    /// # Panics
    /// If this process may not create device nodes.
    #[must_use]
    pub fn kvm(&self) -> PathBuf {
        self.node("/dev/kvm")
    }

    /// A node of a character device that every user may open.
    ///
    /// # Panics
    /// If this process may not create device nodes.
    #[must_use]
    pub fn node(&self, device: &str) -> PathBuf {
        let path = self.path(&device.replace('/', "-"));
        let number = std::fs::metadata(device).expect("the device is there").rdev();
        match mknodat(CWD, &path, FileType::CharacterDevice, Mode::empty(), number) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => panic!("no node of {device}: {error}"),
        }
        std::fs::set_permissions(&path, Permissions::from_mode(0o666)).expect("it is ours");
        path
    }

    /// An empty disk on storage that both hosts can access, and that supports direct I/O.
    pub fn disk(&self, mib: u64) -> PathBuf {
        let path = self.path("disk.raw");
        let disk = std::fs::File::create(&path).expect("a disk can be made");
        disk.set_len(mib << 20).expect("a disk can be made");
        path
    }

    /// The same as a qcow2 image without data.
    pub fn qcow2(&self, name: &str, mib: u64) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, qcow2_image(mib)).expect("a disk can be made");
        path
    }

    /// A file on a tmpfs.
    pub fn path_on_tmpfs(&self, name: &str) -> PathBuf {
        self.memory.path().join(name)
    }

    /// A file in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

/// The content of a qcow2 image without data.
///
/// Source: QEMU `docs/interop/qcow2.rst`; version 3, clusters of 64 KiB: the header, the refcount
/// table, one refcount block, and an L1 table without entries.
pub fn qcow2_image(mib: u64) -> Vec<u8> {
    const CLUSTER: u64 = 64 << 10;
    let mut image = b"QFI\xfb".to_vec();
    image.extend(3_u32.to_be_bytes());
    // No backing file.
    image.extend([0; 12]);
    image.extend(16_u32.to_be_bytes());
    image.extend((mib << 20).to_be_bytes());
    // No encryption; the number of L1 entries, each of which maps 512 MiB.
    image.extend(0_u32.to_be_bytes());
    image.extend((mib.div_ceil(512) as u32).to_be_bytes());
    image.extend((3 * CLUSTER).to_be_bytes());
    image.extend(CLUSTER.to_be_bytes());
    image.extend(1_u32.to_be_bytes());
    // No snapshots and no features.
    image.extend([0; 12 + 24]);
    // The order of the refcounts' width, and the length of the header.
    image.extend(4_u32.to_be_bytes());
    image.extend(104_u32.to_be_bytes());
    image.resize(CLUSTER as usize, 0);
    image.extend((2 * CLUSTER).to_be_bytes());
    image.resize(2 * CLUSTER as usize, 0);
    image.extend([1_u16; 4].map(u16::to_be_bytes).concat());
    image.resize(4 * CLUSTER as usize, 0);
    image
}

/// A QEMU process, killed on drop.
pub struct Qemu {
    /// The process.
    pub child: Child,
    /// Its QMP socket.
    pub qmp: PathBuf,
    console: PathBuf,
    log: PathBuf,
    /// Its memory files. They are removed on drop, or they would fill the tmpfs.
    memory: Vec<PathBuf>,
}

/// A report of the guest about itself.
#[derive(Clone, Debug, Default)]
pub struct Said(BTreeMap<String, u64>);

impl Said {
    /// The last whole report in a file that a guest's serial console writes.
    pub fn last(console: &Path) -> Option<Self> {
        let text = String::from_utf8_lossy(&std::fs::read(console).ok()?).into_owned();
        let whole = &text[..=text.rfind('\n')?];
        let line = whole.lines().rev().find(|line| line.contains("vmferry-guest rounds"))?;
        let pairs = line.split_whitespace().filter_map(|word| word.split_once('='));
        Some(Self(pairs.filter_map(|(k, v)| Some((k.to_owned(), v.parse().ok()?))).collect()))
    }

    /// A figure; 0 if it was not reported.
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// Waits with `wait_for` until the guest has checked all of its memory once more, without an
    /// error.
    pub fn check(mut wait_for: impl FnMut(&str, &dyn Fn(&Self) -> bool) -> Self) -> Self {
        let before = wait_for("works", &|said| said.get("checked") > 0);
        let more = |said: &Self, name: &str| {
            before.get(name) == 0 || said.get(name) >= before.get(name) + 2
        };
        let after = wait_for("checks all its memory", &|said| {
            said.get("uptime_us") > before.get("uptime_us") + 300_000
                && more(said, "rounds")
                && more(said, "static_rounds")
        });
        assert_eq!(after.get("corruptions"), 0, "{after:?}");
        after
    }
}

impl Qemu {
    /// The guest's last report.
    pub fn said(&self) -> Option<Said> {
        Said::last(&self.console)
    }

    /// What QEMU itself has printed, and its exit status if it has ended.
    pub fn last_words(&mut self) -> String {
        let ended = self.child.try_wait().ok().flatten();
        let said = std::fs::read_to_string(&self.log).unwrap_or_default();
        ended.map_or_else(|| said.clone(), |status| format!("{status}: {said}"))
    }

    /// Kills QEMU. It may have ended by itself.
    pub fn kill(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }

    /// Ends QEMU over its monitor.
    pub fn quit(&mut self, monitor: Monitor) {
        let told = monitor.quit();
        let status = self.child.wait().expect("a child can be awaited");
        assert!(told.is_ok() && status.success(), "{told:?}, then {}", self.last_words());
    }

    /// Waits until the guest has reported what is wanted.
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
            let console = || last_lines(&self.console, 5);
            assert!(Instant::now() < deadline, "never {what}: {} {}", log(), console());
            // Files and sockets cause no wake-up.
            std::thread::sleep(LOOK_PERIOD);
        }
    }

    /// Its memory files.
    #[must_use]
    pub fn memory_files(&self) -> &[PathBuf] {
        &self.memory
    }

    /// Waits until the guest has checked all of its memory once more, without an error.
    pub fn check_guest(&mut self) -> Said {
        Said::check(|what, wanted| self.wait_for(what, wanted))
    }
}

/// The last lines of a file, which may be long.
fn last_lines(path: &Path, count: usize) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // Neither is needed if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for file in &self.memory {
            let _ = std::fs::remove_file(file);
        }
    }
}
