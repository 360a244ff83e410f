//! A receiver that crashes leaves no guest memory on the disk.

#[path = "../../../crates/memory/tests/dumps/mod.rs"]
mod dumps;
mod support;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};

use dumps::{Mapping, mappings};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use support::inject::fault;
use support::{Host, Running, World, text};

/// The part of the guest's memory that is filled, in MiB.
const FILLED_MIB: u64 = 24;

/// Whether this system writes core dumps into the working directory. If it pipes them to a program
/// or has one directory for all, the test reads the receiver's memory instead.
fn dumps_are_files() -> bool {
    let target = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if target.starts_with(['|', '@']) || target.contains('/') {
        return false;
    }
    // The caller of a receiver may want dumps: the limits are inherited.
    let hard = getrlimit(Resource::Core).maximum;
    assert!(
        hard.is_none_or(|bytes| bytes >= 1 << 30),
        "this test needs core dumps, which are limited to {hard:?} bytes here (`ulimit -Hc \
         unlimited`)"
    );
    setrlimit(Resource::Core, Rlimit { current: hard, maximum: hard }).unwrap();
    true
}

/// A receiver in its own directory that has received a guest, and the first bytes of the guest's
/// memory there.
fn received(world: &World, name: &str, how: &str) -> (Running, PathBuf) {
    let (a, b) = (world.host(&format!("a-{name}")), world.host(name));
    let workload = format!("fill={FILLED_MIB},incompressible");
    let _guest = a.guest("web", &["--memory", "64M", "--workload", &workload]);
    let directory = world.path(&format!("cwd-{name}"));
    std::fs::create_dir(&directory).unwrap();
    let socket = format!("unix:{}", world.path(&format!("s-{name}")).display());
    let receive = ["receive", "--listen", &socket, "--sandbox", how];
    let mut receiving = b.start_in(&directory, &receive);
    receiving.event("listening");
    a.run(&["send", "web", "--to", &socket, "--verify"]).exited(0);
    receiving.event("serving");
    (receiving, directory)
}

/// Crashes a process. Returns whether the kernel has written a dump, and the dump in its directory.
fn crash(mut running: Running, signal: Signal, directory: &Path) -> (bool, Option<PathBuf>) {
    let pid = running.child.id();
    if signal == Signal::SEGV {
        // By a fault: the standard library's handler ignores a signal that was sent with kill.
        fault(pid);
    } else {
        kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    }
    let status = running.child.wait().unwrap();
    assert_eq!(status.signal(), Some(signal.as_raw()), "{status}");
    let dump = std::fs::read_dir(directory).unwrap().next().map(|entry| entry.unwrap().path());
    (status.core_dumped(), dump)
}

/// Bytes of the file that are stored: a dump has holes.
fn stored_bytes(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap()) * 512
}

#[test]
fn crashing_receiver_leaves_no_dump() {
    let are_files = dumps_are_files();
    let world = World::new();
    for (name, signal) in [("segv", Signal::SEGV), ("abort", Signal::ABORT)] {
        let (running, directory) = received(&world, name, "auto");
        assert_eq!(crash(running, signal, &directory), (false, None), "{signal:?}");
    }
    // Without the sandbox there is a dump, but the guest is not in it.
    // (`crates/memory/tests/core_dumps.rs` searches the dump for each page, and finds the pages
    // where the protection is undone.)
    let (running, directory) = received(&world, "off", "off");
    let resident = |which: fn(&Mapping) -> bool| -> u64 {
        let mappings = mappings(&running.child.id().to_string());
        mappings.iter().filter(|one| which(one)).map(|one| one.resident_bytes).sum()
    };
    let (left_out, dumped) = (resident(Mapping::is_left_out), resident(Mapping::is_dumped));
    assert!(left_out >= FILLED_MIB << 20, "{left_out} bytes are left out of dumps");
    assert!(dumped < FILLED_MIB << 20, "{dumped} bytes are dumped: the guest's memory is in it");
    let (written, dump) = crash(running, Signal::SEGV, &directory);
    if !are_files {
        return;
    }
    assert!(written, "without the sandbox there is a dump");
    let dump = dump.expect("a dump in the working directory");
    let bytes = std::fs::read(&dump).unwrap();
    let has = |needle: &[u8]| bytes.windows(needle.len()).any(|window| window == needle);
    assert!(has(text(&world.path("s-off")).as_bytes()), "it is of this process");
    let stored = stored_bytes(&dump);
    assert!(stored < FILLED_MIB << 20, "{stored} bytes: the guest's memory is in it");
}

/// A host whose commands are started in a directory.
trait StartIn {
    fn start_in(&self, directory: &Path, arguments: &[&str]) -> Running;
}

impl StartIn for Host {
    fn start_in(&self, directory: &Path, arguments: &[&str]) -> Running {
        let mut command = self.command(arguments);
        command.current_dir(directory);
        Self::spawn(command)
    }
}
