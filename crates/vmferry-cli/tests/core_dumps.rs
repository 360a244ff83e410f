//! A receiver that crashes leaves nothing of its guest on the disk.

mod support;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use support::inject::fault;
use support::{Host, Running, World, text};

/// Memory of the guest that holds something, in MiB.
const FILLED_MIB: u64 = 24;

/// Whether a crash leaves a file in the working directory; says so if not.
fn dumps_are_files() -> bool {
    let target = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if target.starts_with(['|', '@']) || target.contains('/') {
        eprintln!("SKIPPED: core dumps of this system go to {}", target.trim());
        return false;
    }
    // Whoever starts a receiver may want dumps: these limits are inherited.
    let hard = getrlimit(Resource::Core).maximum;
    setrlimit(Resource::Core, Rlimit { current: hard, maximum: hard }).unwrap();
    if hard.is_some_and(|bytes| bytes < 1 << 30) {
        eprintln!("SKIPPED: core dumps are limited to {hard:?} bytes here");
        return false;
    }
    true
}

/// A receiver in a directory of its own, to which a guest has come; and what the guest's memory began with there.
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
    let sent = a.run(&["send", "web", "--to", &socket, "--verify"]);
    assert_eq!(sent.code, Some(0), "{sent:?}");
    receiving.event("serving");
    (receiving, directory)
}

/// Crashes a process; its dump, if it leaves one.
fn crash(mut running: Running, signal: Signal, directory: &Path) -> Option<PathBuf> {
    let pid = running.child.id();
    if signal == Signal::SEGV {
        // By a fault: the standard library's handler takes a signal that somebody sends for none.
        fault(pid);
    } else {
        kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    }
    let status = running.child.wait().unwrap();
    assert_eq!(status.signal(), Some(signal.as_raw()), "{status}");
    let dump = std::fs::read_dir(directory).unwrap().next().map(|entry| entry.unwrap().path());
    assert_eq!(dump.is_some(), status.core_dumped(), "{status}");
    dump
}

/// Bytes of the file that are stored: a dump has holes.
fn stored_bytes(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap()) * 512
}

#[test]
fn a_receiver_that_crashes_leaves_no_dump() {
    if !dumps_are_files() {
        return;
    }
    let world = World::new();
    for (name, signal) in [("segv", Signal::SEGV), ("abort", Signal::ABORT)] {
        let (running, directory) = received(&world, name, "auto");
        assert_eq!(crash(running, signal, &directory), None, "{signal:?}");
    }
    // Without the sandbox there is one; but the guest is not in it (`vmferry-memory/tests/core_dumps.rs` looks for
    // each page, and finds it where the protection is undone).
    let (running, directory) = received(&world, "off", "off");
    let dump = crash(running, Signal::SEGV, &directory).expect("a dump, without the sandbox");
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
