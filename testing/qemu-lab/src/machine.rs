//! Starting QEMUs.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::{Qemu, Version, World, bare_metal, initramfs, monitor, packages};

/// Part of the command line of a Linux guest whose workload has no `rest=`: it computes for as long
/// as its test takes, and leaves the processors to other tests.
pub(crate) const REST: &str = "rest=2000";

/// The configuration of a QEMU.
#[derive(Clone, Debug)]
pub struct Machine {
    /// QEMU's version.
    pub version: Version,
    /// The software that runs in it, with its accelerator.
    pub guest: Guest,
    /// `q35`, `pc` or `microvm`.
    pub kind: &'static str,
    /// Memory.
    pub mib: u64,
    /// KiB by which its memory is smaller. How QEMU loses writes of an emulated guest in its own
    /// migration depends on whether the size of a block is a multiple of 256 KiB.
    pub less_kib: u64,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The backend of its memory.
    pub backend: Backend,
    /// Further options of its memory backends, each after a comma.
    pub backend_options: &'static str,
    /// The guest's command line: for Linux, in addition to what every guest has (`linux/main.c`);
    /// for the bare-metal guest, see `crates/microvm/guest/workload.h`.
    pub workload: String,
    /// Further arguments, such as devices and a sandbox.
    pub devices: Vec<String>,
    /// The directory of its memory files; `None` for a tmpfs with small pages.
    pub memory_directory: Option<PathBuf>,
    /// The user that it runs as; `None` for the current one.
    pub user: Option<u32>,
    /// The network namespace that it runs in; `None` for the current one.
    pub namespace: Option<PathBuf>,
}

/// The software that runs in a QEMU, with its accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// Linux, emulated (TCG): for tests that need drivers.
    Linux,
    /// The same, with one thread for all its vCPUs.
    LinuxOfOneThread,
    /// The bare-metal guest of `crates/microvm/guest/`, with KVM. It boots in a fraction of the
    /// time, and writes and checks memory at the speed of the CPU.
    BareMetal,
}

/// The backend of a QEMU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// A file on a tmpfs.
    File,
    /// A memfd.
    Memfd,
    /// Shared memory that QEMU creates, since 9.1.
    Shm,
    /// Private memory of QEMU.
    Private,
    /// Two NUMA nodes with a file each.
    TwoNodes,
}

impl Machine {
    /// A machine with 256 MiB and one vCPU.
    pub fn new(version: Version, workload: &str) -> Self {
        Self {
            version,
            guest: Guest::Linux,
            kind: "q35",
            mib: 256,
            less_kib: 0,
            vcpus: 1,
            backend: Backend::File,
            backend_options: "",
            workload: workload.to_owned(),
            devices: Vec::new(),
            memory_directory: None,
            user: None,
            namespace: None,
        }
    }

    /// A machine with 128 MiB and one vCPU, on KVM.
    pub fn on_kvm(version: Version, workload: &str) -> Self {
        Self { guest: Guest::BareMetal, mib: 128, ..Self::new(version, workload) }
    }

    /// The same with further devices.
    #[must_use]
    pub fn with(mut self, devices: &[&str]) -> Self {
        self.devices.extend(devices.iter().map(|&device| device.to_owned()));
        self
    }

    /// Starts it.
    pub fn start(&self, world: &World, name: &str) -> Qemu {
        self.spawn(world, name, &[])
    }

    /// Starts a QEMU that waits for a guest.
    pub fn incoming(&self, world: &World, name: &str) -> Qemu {
        self.spawn(world, name, &["-incoming", "defer"])
    }

    pub(crate) fn spawn(&self, world: &World, name: &str, extra: &[&str]) -> Qemu {
        self.spawn_with(world, name, extra, &[])
    }

    pub(crate) fn spawn_with(
        &self,
        world: &World,
        name: &str,
        extra: &[&str],
        under: &[&str],
    ) -> Qemu {
        let qmp = world.path(&format!("{name}.qmp"));
        let line = self.command_line(world, name);
        let mut words = under.iter().map(OsString::from).chain(line);
        let mut command = Command::new(words.next().expect("QEMU's program is named"));
        command.args(words).args(extra);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", qmp.display()));
        if let Some(libraries) = self.libraries() {
            command.env("LD_LIBRARY_PATH", libraries);
        }
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
        let log_path = world.path(&format!("{name}.log"));
        let log = File::create(&log_path).expect("a log can be made");
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor can be duplicated"))
            .stderr(log);
        let child = self.spawn_inside(command);
        let memory =
            ["ram", "node0", "node1"].map(|part| self.memory_file(world, name, part)).into();
        let console = console(world, name);
        let mut qemu = Qemu { child, qmp, console, log: log_path, memory };
        qemu.wait_until("executes orders", |qemu| monitor::executes_orders(&qemu.qmp));
        qemu
    }

    /// Starts QEMU in its namespace, from a thread that enters the namespace.
    fn spawn_inside(&self, mut command: Command) -> Child {
        let spawn = || {
            if let Some(path) = &self.namespace {
                let namespace = File::open(path).expect("the namespace is there");
                vmferry_net_lab::enter(namespace.as_fd()).expect("it can be entered");
            }
            command.spawn().expect("QEMU can be started")
        };
        std::thread::scope(|scope| scope.spawn(spawn).join().expect("QEMU can be started"))
    }

    /// The directory of this QEMU's libraries.
    pub fn libraries(&self) -> Option<PathBuf> {
        Some(packages().join(self.version.directory()).join("usr/lib/x86_64-linux-gnu"))
    }

    fn memory_file(&self, world: &World, name: &str, part: &str) -> PathBuf {
        let directory = self.memory_directory.as_deref().unwrap_or(world.memory.path());
        directory.join(format!("{name}-{part}"))
    }

    /// The command line, without QMP.
    pub fn command_line(&self, world: &World, name: &str) -> Vec<OsString> {
        let packages = packages().join(self.version.directory());
        let mut line: Vec<OsString> = vec![packages.join("usr/bin/qemu-system-x86_64").into()];
        let mut add = |words: &[&dyn AsRef<std::ffi::OsStr>]| {
            line.extend(words.iter().map(|word| word.as_ref().to_owned()));
        };
        for part in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
            add(&[&"-L", &packages.join(part)]);
        }
        let file = |part: &str| self.memory_file(world, name, part);
        let kib = (self.mib << 10) - self.less_kib;
        let backend = |id: &str, kib: u64| match self.backend {
            Backend::File | Backend::TwoNodes => format!(
                "memory-backend-file,id={id},size={kib}K,share=on,mem-path={}",
                file(id).display()
            ),
            Backend::Memfd => format!("memory-backend-memfd,id={id},size={kib}K,share=on"),
            Backend::Shm => format!("memory-backend-shm,id={id},size={kib}K,share=on"),
            Backend::Private => format!("memory-backend-ram,id={id},size={kib}K"),
        };
        if self.backend == Backend::TwoNodes {
            let half = kib / 2;
            add(&[&"-machine", &self.kind]);
            for node in ["node0", "node1"] {
                add(&[&"-object", &(backend(node, half) + self.backend_options)]);
            }
            let cpus = format!("node,nodeid=0,memdev=node0,cpus=0-{}", self.vcpus - 1);
            add(&[&"-numa", &cpus]);
            add(&[&"-numa", &"node,nodeid=1,memdev=node1"]);
        } else {
            add(&[&"-machine", &format!("{},memory-backend=ram", self.kind)]);
            add(&[&"-object", &(backend("ram", kib) + self.backend_options)]);
        }
        add(&[&"-display", &"none", &"-nodefaults", &"-no-user-config"]);
        add(&[&"-name", &"tested", &"-uuid", &"6b1f7a4c-0000-4000-8000-000000000007"]);
        add(&[&"-m", &format!("{kib}K"), &"-smp", &self.vcpus.to_string()]);
        add(&[&"-serial", &format!("file:{}", console(world, name).display())]);
        match self.guest {
            Guest::Linux | Guest::LinuxOfOneThread => {
                let one = self.guest == Guest::LinuxOfOneThread;
                add(&[&"-accel", &if one { "tcg,thread=single" } else { "tcg" }]);
                add(&[&"-kernel", &kernel(), &"-initrd", &initramfs::path(crate::packages())]);
                // On a busy machine the kernel's check of its timer fails. Its tests of its own
                // cryptography are a sixth of its boot.
                let quiet = "console=ttyS0 quiet panic=-1 no_timer_check cryptomgr.notests";
                // The guest takes the first `rest=`.
                add(&[&"-append", &format!("{quiet} {} {REST}", self.workload)]);
            }
            Guest::BareMetal => {
                let kvm = self.user.map_or_else(
                    || "kvm".to_owned(),
                    |_| format!("kvm,device={}", world.kvm().display()),
                );
                add(&[&"-accel", &kvm, &"-kernel", &bare_metal::path(crate::packages())]);
                // Firmware runs at CPL 0, which PVM emulates: SeaBIOS takes three seconds of CPU
                // time, and qboot a fifth of a second. A later `-bios` overrides it.
                add(&[&"-append", &self.workload, &"-bios", &"qboot.rom"]);
            }
        }
        for device in &self.devices {
            add(&[device]);
        }
        line
    }

    /// The command line for a template of `vmferry daemon`. A shell replaces variables in `name`.
    pub fn template(&self, world: &World, name: &str) -> String {
        let mut command = String::from("env");
        if let Some(libraries) = self.libraries() {
            command += &format!(" LD_LIBRARY_PATH={}", libraries.display());
        }
        for word in self.command_line(world, name) {
            // Templates may have several lines.
            command += &format!("\n  \"{}\"", word.display());
        }
        command
    }
}

/// The paths of QEMU 10.0 and its guest, for callers that start them in another way.
#[derive(Clone, Debug)]
pub struct Fixture {
    /// The program.
    pub qemu: PathBuf,
    /// Its libraries.
    pub libraries: PathBuf,
    /// Its data.
    pub firmware: PathBuf,
    /// SeaBIOS.
    pub roms: PathBuf,
    /// The guest's kernel.
    pub kernel: PathBuf,
    /// The guest's initramfs, which has all its files.
    pub initramfs: PathBuf,
    /// The bare-metal guest, for KVM.
    pub bare_metal: PathBuf,
}

impl Fixture {
    /// Fetches and builds what is missing.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "it downloads packages")]
    pub fn new() -> Self {
        let at = packages().join(Version::V10_0.directory());
        Self {
            qemu: at.join("usr/bin/qemu-system-x86_64"),
            libraries: at.join("usr/lib/x86_64-linux-gnu"),
            firmware: at.join("usr/share/qemu"),
            roms: at.join("usr/share/seabios"),
            kernel: kernel(),
            initramfs: initramfs::path(packages()).to_owned(),
            bare_metal: bare_metal::path(packages()).to_owned(),
        }
    }
}

/// The file that a guest's serial console writes.
fn console(world: &World, name: &str) -> PathBuf {
    world.path(&format!("{name}.out"))
}

pub(crate) fn kernel() -> PathBuf {
    let boot: &Path = &packages().join("kernel/boot");
    let mut found = std::fs::read_dir(boot).expect("a kernel").flatten().map(|entry| entry.path());
    found.find(|path| path.to_string_lossy().contains("vmlinuz")).expect("a kernel's image")
}
