//! One member of a cluster.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};

use crate::{PATIENCE, program};

/// A member, running or not.
#[derive(Debug)]
pub struct Member {
    name: String,
    address: Ipv4Addr,
    /// For clients. The next one is for the other members, and the one after that for metrics.
    port: u16,
    data: PathBuf,
    /// Of its command.
    prefix: Vec<String>,
    log: PathBuf,
    process: Option<Child>,
}

impl Member {
    pub fn new(
        directory: &Path,
        data: &Path,
        prefix: Vec<String>,
        number: u16,
        address: Ipv4Addr,
        port: u16,
    ) -> Self {
        let name = format!("etcd-{number}");
        let log = directory.join(format!("{name}.log"));
        Self { data: data.join(&name), prefix, name, address, port, log, process: None }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn client_url(&self) -> String {
        format!("https://{}:{}", self.address, self.port)
    }

    pub fn peer_url(&self) -> String {
        format!("https://{}:{}", self.address, self.port + 1)
    }

    /// Where it serves its metrics, without TLS.
    pub fn metrics_address(&self) -> SocketAddrV4 {
        SocketAddrV4::new(self.address, self.port + 2)
    }

    /// The end of what it has printed.
    pub fn log(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(5)..].join("\n")
    }

    pub fn start(&mut self, directory: &Path, initial_cluster: &str, token: &str) {
        assert!(self.process.is_none(), "{} runs already", self.name);
        let log = File::options().append(true).create(true).open(&self.log);
        let log = log.expect("a log can be made");
        // A test that is killed leaves no etcd.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).args(&self.prefix).arg(program("etcd"));
        let (client, peer) = (self.client_url(), self.peer_url());
        let metrics = format!("http://{}", self.metrics_address());
        for (option, value) in [
            ("--name", self.name.as_str()),
            ("--listen-client-urls", &client),
            ("--advertise-client-urls", &client),
            ("--listen-peer-urls", &peer),
            ("--listen-metrics-urls", &metrics),
            ("--initial-advertise-peer-urls", &peer),
            ("--initial-cluster", initial_cluster),
            ("--initial-cluster-token", token),
            ("--logger", "zap"),
            ("--log-level", "warn"),
        ] {
            command.arg(option).arg(value);
        }
        command.arg("--data-dir").arg(&self.data);
        let server = directory.join("server");
        for prefix in ["", "peer-"] {
            for (option, file) in
                [("trusted-ca-file", "ca.pem"), ("cert-file", "host.pem"), ("key-file", "host.key")]
            {
                command.arg(format!("--{prefix}{option}")).arg(server.join(file));
            }
            command.arg(format!("--{prefix}client-cert-auth"));
        }
        command.stdin(Stdio::null());
        command.stdout(log.try_clone().expect("a descriptor can be duplicated")).stderr(log);
        self.process = Some(command.spawn().expect("etcd needs setpriv of util-linux"));
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        let ended = |process: &mut Child| process.try_wait().expect("a child").is_some();
        self.process.take_if(ended).is_some()
    }

    pub fn kill(&mut self) {
        let mut process = self.process.take().expect("etcd runs");
        process.kill().expect("etcd can be killed");
        process.wait().expect("etcd can be waited for");
    }

    pub fn signal(&self, signal: Signal) {
        let process = self.process.as_ref().expect("etcd runs");
        let pid = Pid::from_raw(process.id().cast_signed()).expect("a process has a number");
        kill_process(pid, signal).expect("etcd can be signalled");
    }

    /// Stops it, and waits until each of its threads has stopped.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let deadline = Instant::now() + PATIENCE;
        while !self.is_stopped() {
            assert!(Instant::now() < deadline, "{} does not stop", self.name);
            std::thread::yield_now();
        }
    }

    fn is_stopped(&self) -> bool {
        let pid = self.process.as_ref().expect("etcd runs").id();
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("etcd lives");
        threads.flatten().all(|thread| {
            // A thread that has ended does nothing any more.
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['T', 'Z', 'X']))
        })
    }

    /// Replaces its data by a snapshot's.
    pub fn restore(&self, snapshot: &Path, initial_cluster: &str, token: &str) {
        let _ = std::fs::remove_dir_all(&self.data);
        let mut command = Command::new(program("etcdctl"));
        command.env("ETCDCTL_API", "3").args(["snapshot", "restore"]).arg(snapshot);
        command.args(["--name", &self.name, "--initial-cluster", initial_cluster]);
        command.args(["--initial-cluster-token", token]);
        command.args(["--initial-advertise-peer-urls", &self.peer_url()]);
        let output = command.arg("--data-dir").arg(&self.data).output();
        let output = output.expect("etcdctl can be started");
        assert!(output.status.success(), "{output:?}");
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if self.process.is_some() {
            self.kill();
        }
    }
}
