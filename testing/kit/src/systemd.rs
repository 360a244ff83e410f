//! A real systemd, with a host's directories, processes and control groups of its own. It needs
//! root, and shares this machine's network.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a step may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running systemd. All its processes are killed on drop, and also when the thread that started
/// it ends.
#[derive(Debug)]
pub struct Systemd {
    /// `unshare`, which waits for systemd.
    process: Child,
    /// systemd, which has the number 1 in its own namespace.
    pid: u32,
    cgroup: String,
}

/// Gives a process a control group of its own, with the name `$1`, and runs the second script.
const ENTER: &str = r#"
set -e
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir "/sys/fs/cgroup/$1"
echo $$ >"/sys/fs/cgroup/$1/cgroup.procs"
exec unshare --fork --pid --mount --uts --ipc --cgroup --kill-child sh -c "$2" sh "$3"
"#;

/// Hides this machine's own directories and units, and starts systemd with the files in `$1` laid
/// over /etc. Only `lab.target` and its units are there.
const BOOT: &str = r#"
set -e
mount -t proc proc /proc
# The kernel's settings are those of the whole machine.
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
umount /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t overlay -o "lowerdir=$1:/etc" overlay /etc
mount --bind "$1/systemd" /etc/systemd
for directory in /run /var/lib; do mount -t tmpfs -o mode=755 tmpfs $directory; done
mkdir -p /run/systemd/system
export container=lab SYSTEMD_UNIT_PATH=/etc/systemd/system
export SYSTEMD_GENERATOR_PATH=/etc/systemd/none SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/etc/systemd/none
exec /lib/systemd/systemd --system --unit=lab.target --log-target=console --log-level=notice
"#;

/// Removes the control groups of processes that have ended.
const REMOVE: &str = r#"
set -e
mount -t cgroup2 cgroup2 /sys/fs/cgroup
find "/sys/fs/cgroup/$1" -depth -type d -exec rmdir {} +
"#;

impl Systemd {
    /// Starts systemd. `etc` is laid over this machine's /etc, except that its `systemd/system`
    /// has all units that there are.
    ///
    /// # Panics
    /// If it does not start: without root, control groups (version 2), overlays or systemd.
    #[must_use]
    pub fn boot(etc: &Path) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let units = etc.join("systemd/system");
        std::fs::create_dir_all(&units).expect("units can be written");
        // What units need by default, without this machine's own services.
        for name in ["lab", "sysinit", "basic", "network-online", "multi-user", "shutdown"] {
            let text = "[Unit]\nDefaultDependencies=no\n";
            std::fs::write(units.join(format!("{name}.target")), text).expect("they can");
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let cgroup = format!("vmferry-lab-{}-{number}", std::process::id());
        let process = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "unshare", "--mount", "sh", "-c", ENTER, "sh", &cgroup])
            .arg(BOOT)
            .arg(etc)
            .stdin(Stdio::null())
            .spawn()
            .expect("this test needs setpriv and unshare");
        let mut systemd = Self { process, pid: 0, cgroup };
        let deadline = Instant::now() + PATIENCE;
        while !systemd.serves() {
            let ended = systemd.process.try_wait().expect("a child");
            assert!(ended.is_none(), "systemd does not start: {ended:?}; this test needs root");
            assert!(Instant::now() < deadline, "systemd never serves");
            // That it serves causes no wake-up here.
            std::thread::sleep(Duration::from_millis(20));
        }
        systemd
    }

    /// Runs `systemctl`.
    ///
    /// # Panics
    /// If it can't be started.
    pub fn systemctl(&self, arguments: &[&str]) -> Output {
        let target = self.pid.to_string();
        let mut command = Command::new("nsenter");
        command.args(["--target", &target, "--pid", "--mount", "--cgroup", "systemctl"]);
        command.arg("--no-pager").args(arguments).output().expect("this test needs nsenter")
    }

    /// The same; returns what it prints.
    ///
    /// # Panics
    /// If it fails.
    pub fn systemctl_ok(&self, arguments: &[&str]) -> String {
        let output = self.systemctl(arguments);
        assert!(output.status.success(), "systemctl {arguments:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// This path as systemd's processes see it.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.pid))
    }

    fn serves(&mut self) -> bool {
        if self.pid == 0 {
            let unshare = self.process.id();
            let children =
                std::fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children"));
            let is_systemd = |pid: &u32| {
                let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
                name.is_ok_and(|name| name.trim() == "systemd")
            };
            let children = children.unwrap_or_default();
            let found = children.split_whitespace().filter_map(|pid| pid.parse().ok());
            let Some(found) = found.into_iter().find(is_systemd) else { return false };
            self.pid = found;
        }
        self.systemctl(&["is-active", "--quiet", "lab.target"]).status.success()
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        // All processes of its namespace end with the first one.
        let script = ["-c", "kill -KILL $1", "sh", &self.pid.to_string()].map(str::to_owned);
        let _ = match self.pid {
            0 => self.process.kill(),
            _ => Command::new("sh").args(script).status().map(drop),
        };
        let _ = self.process.wait();
        let remove = ["--mount", "sh", "-c", REMOVE, "sh", &self.cgroup];
        let _ = Command::new("unshare").args(remove).status();
    }
}
