//! A disk that a test fills.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Of etcd's files, 64 MiB are its log, which it makes in advance, twice for each member.
const MOUNT: &str =
    "mount -t tmpfs -o size=640m tmpfs \"$1\" && echo mounted && exec sleep infinity";

/// A small tmpfs that only its own processes see. It needs root, and ends with the thread that has
/// mounted it.
#[derive(Debug)]
pub struct SmallDisk {
    /// Keeps the mount namespace.
    process: Child,
    path: PathBuf,
}

impl SmallDisk {
    /// Mounts it at `path`, for processes that are started [inside](Self::inside).
    pub fn mount(path: &Path) -> Self {
        std::fs::create_dir(path).expect("a directory");
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--mount", "sh", "-c", MOUNT, "sh"]);
        command.arg(path).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("it needs setpriv of util-linux");
        let mut said = String::new();
        let output = process.stdout.take().expect("it is piped");
        BufReader::new(output).read_line(&mut said).expect("it can be read");
        assert_eq!(said.trim(), "mounted", "this test needs root");
        Self { process, path: path.to_owned() }
    }

    /// The prefix of a command that sees it.
    pub fn inside(&self) -> Vec<String> {
        let target = self.process.id().to_string();
        ["nsenter", "--mount", "--target", &target].map(str::to_owned).into()
    }

    fn filler(&self) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.process.id()));
        root.join(self.path.strip_prefix("/").expect("an absolute path")).join("filler")
    }

    /// Leaves no room on it.
    pub fn fill(&self) {
        let mut filler = File::options().create(true).append(true).open(self.filler());
        let file = filler.as_mut().expect("a file can be made");
        for block in [1 << 20, 1 << 12, 1] {
            while file.write_all(&vec![0; block]).is_ok() {}
        }
    }

    /// Makes room on it.
    pub fn free(&self) {
        // It may not have been filled.
        let _ = std::fs::remove_file(self.filler());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
