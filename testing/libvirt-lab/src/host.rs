//! A host: namespaces with a libvirt daemon.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use parking_lot::Mutex;
use tempfile::TempDir;

use crate::boot::BootFiles;
use crate::{LibvirtVersion, PATIENCE, last_lines, poll};

/// The driver that commands use.
const DRIVER: &str = "qemu:///system";

/// The user that a host's libvirt runs QEMU as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QemuUser {
    /// `root`, which may use `/dev/kvm` and userfaultfd everywhere.
    Root,
    /// `libvirt-qemu`, as Debian's packages configure it. libvirt gives it the files of each guest.
    LibvirtQemu,
}

impl QemuUser {
    /// The user's name, which is also the name of its group.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Root => "root",
            Self::LibvirtQemu => "libvirt-qemu",
        }
    }
}

/// A host with a libvirt daemon. Every process on it is killed on drop, and also if the process of
/// the test is killed.
#[derive(Debug)]
pub struct LibvirtHost {
    name: String,
    version: LibvirtVersion,
    network: Option<PathBuf>,
    boot: BootFiles,
    libvirtd: Mutex<Option<Child>>,
    /// The process that keeps the namespaces until its standard input ends.
    keeper: Child,
    /// What the keeper and the daemon print, and the files that the host has changed.
    directory: TempDir,
}

impl LibvirtHost {
    /// Starts a host with a running daemon, in a network namespace or in the caller's network. A
    /// path such as [`Namespaces::source_path`] names the namespace, which must exist until the
    /// host is dropped.
    ///
    /// [`Namespaces::source_path`]: ../vmferry_net_lab/struct.Namespaces.html#method.source_path
    ///
    /// # Panics
    /// If the caller is not root, packages are missing, or the daemon does not start.
    #[must_use]
    pub fn start(name: &str, version: LibvirtVersion, network: Option<&Path>) -> Self {
        Self::start_with(name, version, network, QemuUser::Root)
    }

    /// The same with a user for QEMU.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    #[must_use]
    pub fn start_with(
        name: &str,
        version: LibvirtVersion,
        network: Option<&Path>,
        user: QemuUser,
    ) -> Self {
        let directory =
            tempfile::Builder::new().prefix("vmferry-libvirt-").tempdir().expect("a directory");
        let mut keeper = spawn_keeper(name, version, network, directory.path(), user);
        let output = keeper.stdout.take().expect("it is a pipe");
        let mut line = String::new();
        let read = BufReader::new(output).read_line(&mut line);
        let mut host = Self {
            name: name.to_owned(),
            version,
            network: network.map(Path::to_owned),
            boot: BootFiles::default(),
            libvirtd: Mutex::new(None),
            keeper,
            directory,
        };
        assert!(
            line.trim() == "ready",
            "the namespaces of a libvirt host can't be made; this needs root: {read:?}: {}",
            last_lines(&host.keeper_log(), 5)
        );
        host.boot = BootFiles::copied(|path| host.path(path));
        host.start_libvirtd();
        host
    }

    /// The host's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The version of its libvirt.
    pub fn version(&self) -> LibvirtVersion {
        self.version
    }

    /// The files that guests boot, on this host.
    pub(crate) fn boot(&self) -> &BootFiles {
        &self.boot
    }

    /// A command that runs a program on the host, with `/` as the working directory. The started
    /// process becomes the program, so its identifier and its end are those of the program.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.keeper.id())).args(["--mount", "--uts"]);
        if self.network.is_some() {
            command.arg("--net");
        }
        command.arg("--").arg(program);
        command
    }

    /// Runs `virsh` on the host. A command that does not end within minutes is ended, with exit
    /// status 124.
    ///
    /// # Panics
    /// If it can't be started.
    pub fn virsh(&self, arguments: &[&str]) -> Output {
        self.virsh_command(arguments).output().expect("virsh can be started")
    }

    /// The same as a command, for tests that do something while it runs.
    pub fn virsh_command(&self, arguments: &[&str]) -> Command {
        let mut command = self.command("timeout");
        command.arg(PATIENCE.as_secs().to_string());
        command.args(["virsh", "--quiet", "--connect", DRIVER]).args(arguments);
        command.stdin(Stdio::null());
        command
    }

    /// Runs `virsh` and returns what it prints.
    ///
    /// # Panics
    /// If it fails.
    pub fn virsh_ok(&self, arguments: &[&str]) -> String {
        let output = self.virsh(arguments);
        let problem = String::from_utf8_lossy(&output.stderr);
        let name = &self.name;
        assert!(
            output.status.success(),
            "virsh {} on {name}: {}: {problem}{}",
            arguments.join(" "),
            output.status,
            last_lines(&self.path("/var/log/libvirt/libvirtd.log"), 5)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// How processes outside the host, and on other hosts, reach an absolute path of the host. The
    /// path is valid until the host is dropped.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        let relative = path.strip_prefix("/").expect("a path on a host is absolute");
        Path::new("/proc").join(self.keeper.id().to_string()).join("root").join(relative)
    }

    /// The same for a path in the host's `/run`, which the path is relative to.
    pub fn path_in_run(&self, path: impl AsRef<Path>) -> PathBuf {
        self.path(Path::new("/run").join(path))
    }

    /// The daemon's socket, by a path that other hosts can use.
    pub fn socket(&self) -> PathBuf {
        self.path_in_run("libvirt/libvirt-sock")
    }

    /// The connection URI by which other hosts reach the daemon at its socket.
    pub fn uri(&self) -> String {
        format!("qemu+unix:///system?socket={}", self.socket().display())
    }

    /// Starts the daemon, and waits until it serves.
    ///
    /// # Panics
    /// If it runs already or does not start.
    pub fn start_libvirtd(&self) {
        let mut libvirtd = self.libvirtd.lock();
        assert!(libvirtd.is_none(), "{}: libvirtd runs already", self.name);
        let path = self.directory.path().join("libvirtd.out");
        let log = File::create(&path).expect("a log can be made");
        let mut child = self
            .command("libvirtd")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor can be duplicated"))
            .stderr(log)
            .spawn()
            .expect("libvirtd can be started");
        let problem = || {
            let own = last_lines(&self.path("/var/log/libvirt/libvirtd.log"), 5);
            format!("libvirtd on {}: {}\n{own}", self.name, last_lines(&path, 5))
        };
        poll(
            || {
                let ended = child.try_wait().expect("a child can be waited for");
                assert!(ended.is_none(), "libvirtd has ended: {ended:?}: {}", problem());
                UnixStream::connect(self.socket()).ok()
            },
            problem,
        );
        *libvirtd = Some(child);
        drop(libvirtd);
        // The daemon listens before its QEMU driver can serve.
        self.virsh_ok(&["version"]);
    }

    /// Kills the daemon (SIGKILL). Its domains run on.
    ///
    /// # Panics
    /// If it does not run.
    pub fn kill_libvirtd(&self) {
        let mut child = self.libvirtd.lock().take().expect("libvirtd runs");
        child.kill().expect("libvirtd can be killed");
        child.wait().expect("libvirtd can be waited for");
    }

    /// The daemon's process.
    ///
    /// # Panics
    /// If it does not run.
    pub fn libvirtd_pid(&self) -> u32 {
        self.libvirtd.lock().as_ref().expect("libvirtd runs").id()
    }

    fn keeper_log(&self) -> PathBuf {
        self.directory.path().join("keeper.log")
    }
}

/// Starts the process that makes and keeps the host's namespaces.
fn spawn_keeper(
    name: &str,
    version: LibvirtVersion,
    network: Option<&Path>,
    directory: &Path,
    user: QemuUser,
) -> Child {
    let capabilities = vmferry_kit::packages("libvirt").join("capabilities");
    // libvirt finds other capabilities as a user who may not use `/dev/kvm`.
    let capabilities = capabilities.join(match user {
        QemuUser::Root => version.number().to_owned(),
        user => format!("{}-{}", version.number(), user.name()),
    });
    std::fs::create_dir_all(&capabilities).expect("a directory can be made");
    let mut command;
    if let Some(network) = network {
        command = Command::new("nsenter");
        let mut argument = std::ffi::OsString::from("--net=");
        argument.push(network);
        command.arg(argument).args(["--", "unshare"]);
    } else {
        command = Command::new("unshare");
    }
    command.args(["--mount", "--uts", "--propagation", "private", "sh", "-c"]);
    command.args([include_str!("host.sh"), "host", name]);
    command.args([&version.libvirt(), &version.qemu(), directory, &capabilities]);
    command.arg(user.name());
    let log = File::create(directory.join("keeper.log")).expect("a log can be made");
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .expect("a host needs nsenter and unshare of util-linux")
}

impl Drop for LibvirtHost {
    fn drop(&mut self) {
        // The keeper kills every process of the host, and then ends.
        drop(self.keeper.stdin.take());
        let ended = self.keeper.wait();
        if let Some(mut child) = self.libvirtd.lock().take() {
            let _ = child.wait();
        }
        if !ended.as_ref().is_ok_and(std::process::ExitStatus::success) {
            eprintln!("{}: {ended:?}: {}", self.name, last_lines(&self.keeper_log(), 5));
        }
    }
}
