//! Hosts, each a directory of its own, and the `vmferry` processes on them.

#![allow(dead_code, reason = "each test uses a part of it")]

pub mod clock;
pub mod faults;
pub mod inject;
pub mod leftovers;
pub mod outcomes;
pub mod proxy;
pub mod scene;
pub mod stops;
pub mod strikes;
pub mod traces;
pub mod trial;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use vmferry_microvm::report::Report;

/// A phase of a migration, by the source's events. The rounds are slow enough to be hit.
pub type Moment = (&'static str, fn(&Value) -> bool);

pub const BEFORE_COMMIT: [Moment; 4] = [
    ("connected", |event| event["event"] == "connected"),
    ("first round", |event| event["event"] == "round-started" && event["round"] == 1),
    ("second round", |event| event["event"] == "round-started" && event["round"] == 2),
    ("paused", |event| event["event"] == "round-started" && event["paused"] == true),
];

/// Bounds every wait: reaching it is a failure.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bounds the wait for a process's next line. It is longer than any wait of that process itself;
/// the longest is a destination's 60 s wait for COMMIT.
const SILENCE: Duration = Duration::from_secs(150);

/// Whether the full matrices are run (`make test-all`).
pub fn all() -> bool {
    std::env::var_os("VMFERRY_TEST_ALL").is_some()
}

/// Several hosts on one machine, and certificates for them.
pub struct World {
    pub directory: TempDir,
}

impl World {
    /// A world without certificates.
    pub fn without_certificates() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    pub fn new() -> Self {
        let world = Self::without_certificates();
        world.authority("ca");
        world.certificate("ca", "good");
        world
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn host(&self, name: &str) -> Host {
        Host { runtime: self.path(&format!("host-{name}")) }
    }

    pub fn authority(&self, name: &str) {
        let directory = self.path(name);
        run_ok(&self.host("pki"), &["pki", "init", "--dir", text(&directory)]);
    }

    /// A certificate for 127.0.0.1; returns its directory.
    pub fn certificate(&self, authority: &str, name: &str) -> PathBuf {
        self.certificate_of("test-host", authority, name)
    }

    /// The same for a host with this name.
    pub fn certificate_of(&self, host: &str, authority: &str, name: &str) -> PathBuf {
        let (from, out) = (self.path(authority), self.path(name));
        let arguments = [
            "pki",
            "issue",
            host,
            "--dir",
            text(&from),
            "--out",
            text(&out),
            "--address",
            "127.0.0.1",
        ];
        run_ok(&self.host("pki"), &arguments);
        out
    }

    pub fn tls(&self) -> String {
        self.path("good").display().to_string()
    }
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A host: the directory of its guests.
#[derive(Clone)]
pub struct Host {
    pub runtime: PathBuf,
}

/// How a command ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub lines: Vec<Value>,
}

impl Ended {
    /// The last object that it printed.
    pub fn last(&self) -> &Value {
        self.lines.last().expect("the command printed something")
    }

    /// Its exit status, for the tables of outcomes.
    pub fn in_words(&self) -> String {
        self.code.map_or_else(|| "killed".into(), |code| format!("exit {code}"))
    }

    /// Writes what it printed to a file, as a shell would.
    pub fn save(&self, file: &Path) {
        let lines: String = self.lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(file, lines).unwrap();
    }

    /// Checks its exit status.
    #[track_caller]
    pub fn exited(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:?}");
        self
    }

    /// Checks a failure: its exit status and a part of its message.
    pub fn failed(&self, code: i32, message: &str) {
        assert_eq!(self.code, Some(code), "{self:?}");
        let said = self.last()["error"]["message"].as_str().unwrap_or_default();
        assert!(said.contains(message), "`{said}` does not say `{message}`");
    }
}

/// The wrapper that runs a command in a network namespace.
pub fn inside(namespace: &Path) -> [String; 2] {
    ["nsenter".into(), format!("--net={}", namespace.display())]
}

impl Host {
    pub fn command(&self, arguments: &[&str]) -> Command {
        self.command_under(&[], arguments)
    }

    /// A command under wrapper programs such as `nsenter --net=PATH`.
    pub fn command_under(&self, prefix: &[String], arguments: &[&str]) -> Command {
        let vmferry = env!("CARGO_BIN_EXE_vmferry");
        let mut command = match prefix.split_first() {
            None => Command::new(vmferry),
            Some((program, rest)) => {
                let mut command = Command::new(program);
                command.args(rest).arg(vmferry);
                command
            }
        };
        command.arg("--json").args(arguments).env("VMFERRY_RUNTIME_DIR", &self.runtime);
        command.env_remove("VMFERRY_STATE_DIR");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        command
    }

    /// Runs a command to its end.
    pub fn run(&self, arguments: &[&str]) -> Ended {
        self.start(arguments).finish()
    }

    /// Starts a command and leaves it running.
    pub fn start(&self, arguments: &[&str]) -> Running {
        Self::spawn(self.command(arguments))
    }

    /// The same as another user.
    pub fn start_as(&self, user: u32, arguments: &[&str]) -> Running {
        let mut command = self.command(arguments);
        command.uid(user).gid(user);
        Self::spawn(command)
    }

    /// The same as [`start`](Self::start) under wrapper programs.
    pub fn start_under(&self, prefix: &[String], arguments: &[&str]) -> Running {
        Self::spawn(self.command_under(prefix, arguments))
    }

    /// Starts a prepared command.
    pub fn spawn(mut command: Command) -> Running {
        let mut child = command.spawn().unwrap();
        let stdout = child.stdout.take().unwrap();
        Running { child, lines: BufReader::new(stdout), seen: Vec::new() }
    }

    /// Starts a guest and waits until its memory is populated.
    pub fn guest(&self, name: &str, flags: &[&str]) -> Running {
        let mut arguments = vec!["run", name];
        arguments.extend(flags);
        let mut guest = self.start(&arguments);
        guest.event("serving");
        self.wait_for(name, |status| status["report"]["populated"] == true);
        guest
    }

    /// Starts a destination and returns it with its address.
    pub fn receive(&self, flags: &[&str]) -> (Running, String) {
        let mut arguments = vec!["receive"];
        arguments.extend(flags);
        let mut destination = self.start(&arguments);
        let listening = destination.event("listening");
        let address = listening["address"].as_str().unwrap().to_owned();
        (destination, address)
    }

    pub fn status(&self, name: &str) -> Value {
        run_ok(self, &["status", name])
    }

    /// Polls a guest's status until it is as wanted.
    pub fn wait_for(&self, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status(name);
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "never came: {status}");
            // The guest reports through its memory, which notifies no reader.
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Checks that the guest runs, checks all its memory once more, and has found no corruption.
    pub fn check_guest(&self, name: &str) {
        let report = |status: &Value| -> Report {
            serde_json::from_value(status["report"].clone()).unwrap()
        };
        let before = self.wait_for(name, |status| status["migration"].is_null());
        assert_eq!(before["phase"], "running", "{before}");
        let before = report(&before);
        let after = self.wait_for(name, |status| report(status).has_checked_all_since(&before));
        assert_eq!(after["report"]["corruptions"], 0, "{after}");
        assert_eq!(after["crash"], Value::Null);
    }
}

/// Runs cases with QEMUs side by side; they mostly wait.
pub fn in_parallel<T: Send>(cases: Vec<T>, run: impl Fn(T) + Sync) {
    /// Other tests run beside this one: more QEMUs at once would compete for the processors.
    const AT_ONCE: usize = 2;
    several_at_once(AT_ONCE, cases, run);
}

/// Runs `at_once` cases at a time, in the given order. The first failure fails all.
pub fn several_at_once<T: Send>(at_once: usize, cases: Vec<T>, run: impl Fn(T) + Sync) {
    let left = Mutex::new(cases.into_iter());
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let next = left.lock().next();
                    let Some(case) = next else { return };
                    run(case);
                }
            });
        }
    });
}

pub fn run_ok(host: &Host, arguments: &[&str]) -> Value {
    let ended = host.run(arguments);
    assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
    ended.last().clone()
}

/// A running process, ended on drop.
pub struct Running {
    pub child: Child,
    lines: BufReader<ChildStdout>,
    seen: Vec<Value>,
}

impl Running {
    /// The next line that it prints, or `None` at its end.
    pub fn line(&mut self) -> Option<Value> {
        if self.lines.buffer().is_empty() {
            let mut polled = [PollFd::new(self.lines.get_ref(), PollFlags::IN)];
            let timeout = Timespec::try_from(SILENCE).unwrap();
            let heard = poll(&mut polled, Some(&timeout)).unwrap();
            assert!(heard > 0, "it hangs; its last line was: {:?}", self.seen.last());
        }
        let mut line = String::new();
        if self.lines.read_line(&mut line).unwrap() == 0 {
            return None;
        }
        let value: Value =
            serde_json::from_str(&line).unwrap_or_else(|_| panic!("no JSON: {line}"));
        self.seen.push(value.clone());
        Some(value)
    }

    /// Waits for an event by name.
    pub fn event(&mut self, name: &str) -> Value {
        self.event_where(|event| event["event"] == name)
    }

    /// Waits for an event.
    pub fn event_where(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        loop {
            match self.line() {
                Some(event) if wanted(&event) => return event,
                Some(_) => {}
                None => panic!("it ended before its event: {:?}", self.seen),
            }
        }
    }

    /// Stops or continues it.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Kills it, as a crash would.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Reads all its output and waits for its end.
    pub fn finish(mut self) -> Ended {
        self.finish_by_ref()
    }

    /// The same by reference.
    pub fn finish_by_ref(&mut self) -> Ended {
        while self.line().is_some() {}
        self.ended()
    }

    /// Waits for its end, after its output was read.
    pub fn ended(&mut self) -> Ended {
        let deadline = Instant::now() + PATIENCE;
        let code = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status.code();
            }
            assert!(
                Instant::now() < deadline,
                "it has closed its output and does not end: {:?}",
                self.seen
            );
            // A wait for a child with a time limit must poll.
            std::thread::sleep(Duration::from_millis(5));
        };
        Ended { code, lines: std::mem::take(&mut self.seen) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A process that has ended needs neither.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let mut unread = Vec::new();
        let _ = self.lines.read_to_end(&mut unread);
        if std::thread::panicking() {
            // For the report of the failed test.
            let unread = String::from_utf8_lossy(&unread);
            eprintln!("process {} had printed, unread: {unread}", self.child.id());
        }
    }
}
