//! A benchmark that is interrupted by a signal cleans up.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::command;

/// Starts a benchmark whose temporary files are in this directory.
fn start(name: &str, directory: &Path) -> Child {
    command(&[name, "--quick"])
        .env("TMPDIR", directory)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The IDs of the child processes that the main thread of a process has started.
fn children_of(child: &Child) -> Vec<String> {
    let path = format!("/proc/{0}/task/{0}/children", child.id());
    let list = std::fs::read_to_string(path).unwrap_or_default();
    list.split_whitespace().map(str::to_owned).collect()
}

fn command_line(process: &str) -> String {
    let bytes = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn transport_ends_its_processes_and_deletes_its_files() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = start("transport", directory.path());
    let mut messages = BufReader::new(child.stderr.take().unwrap()).lines();
    let first_pass = messages.find(|line| line.as_ref().is_ok_and(|line| line.contains("pass 1")));
    assert!(first_pass.is_some(), "the benchmark ended before its first pass");
    let sides = children_of(&child);
    assert_eq!(sides.len(), 3, "source, destination and attacker");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let rest: Vec<String> = messages.map_while(Result::ok).collect();
    assert!(!child.wait().unwrap().success());
    assert!(rest.iter().any(|line| line.contains("interrupted")), "{rest:?}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "files are left");
    for side in sides {
        assert!(!command_line(&side).contains("transport"), "{side} still runs");
    }
}

/// Needs the `vmferry` command in the directory of the benchmark.
#[test]
fn qemu_ends_its_processes_and_deletes_its_memory_files() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = start("qemu", directory.path());
    let qemus = loop {
        assert_eq!(child.try_wait().unwrap(), None, "the benchmark ended before it started QEMU");
        let processes = children_of(&child).into_iter().map(|it| (command_line(&it), it));
        let qemus: Vec<(String, String)> =
            processes.filter(|(command, _)| command.contains("qemu-system")).collect();
        if qemus.len() > 1 {
            break qemus;
        }
        // The start of a process cannot be waited for.
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    let messages = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && messages.contains("interrupted"), "{messages}");
    assert!(!messages.contains("panicked"), "{messages}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "files are left");
    let mut memory = Vec::new();
    for (command, process) in &qemus {
        assert_ne!(command_line(process), *command, "{process} still runs");
        memory.extend(command.split([',', '=', '\0']).filter(|word| word.starts_with("/dev/shm/")));
    }
    assert!(!memory.is_empty(), "no guest has its memory in a file: {qemus:?}");
    let left: Vec<_> = memory.iter().filter(|file| Path::new(file).exists()).collect();
    assert!(left.is_empty(), "{left:?}");
}
