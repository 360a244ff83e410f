//! Real etcd clusters, fetched by `scripts/setup-etcd`, on loopback addresses of their own. Clients
//! and members have certificates of an authority that `vmferry_transport::pki` makes.

#![forbid(unsafe_code)]

mod disk;
mod member;

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vmferry_transport::pki::{self, IssueRequest, Validity};

use self::disk::SmallDisk;
use self::member::Member;

/// How long a step may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A cluster of etcd members. They are killed on drop, and also when the thread that started them
/// ends.
#[derive(Debug)]
pub struct EtcdCluster {
    members: Vec<Member>,
    /// Where the members' data are, if a test fills it.
    disk: Option<SmallDisk>,
    directory: TempDir,
    /// Restored clusters have another `--initial-cluster-token`, unless a test says otherwise.
    token: String,
}

/// The token of a cluster that is restored from a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoredToken {
    /// Another one, so the restored cluster has another number.
    Other,
    /// The same one. With the same addresses the restored cluster has the same number.
    Same,
}

impl EtcdCluster {
    /// Starts a cluster, and waits until it has a leader.
    ///
    /// # Panics
    /// If etcd was not fetched, or does not start.
    #[must_use]
    pub fn start(members: u16) -> Self {
        Self::start_at(members, false)
    }

    /// Starts a cluster whose members share a disk that can be [filled](Self::fill_disk), which
    /// needs root.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    #[must_use]
    pub fn start_on_a_small_disk(members: u16) -> Self {
        Self::start_at(members, true)
    }

    fn start_at(members: u16, on_small_disk: bool) -> Self {
        static PORTS: AtomicU16 = AtomicU16::new(2379);
        let directory =
            tempfile::Builder::new().prefix("vmferry-etcd-").tempdir().expect("a directory");
        let address = own_address();
        let authority = directory.path().join("authority");
        let ok = "certificates can be made";
        pki::init(&authority, "etcd", Validity::days(2)).expect(ok);
        let mut request = IssueRequest::new("etcd", Validity::days(2));
        // Members check that a certificate has the address that they see, and connections to a
        // loopback address come from the first one.
        request.addresses = vec![address.to_string(), Ipv4Addr::LOCALHOST.to_string()];
        pki::issue(&authority, &directory.path().join("server"), &request).expect(ok);
        let data = directory.path().join("data");
        let disk = match on_small_disk {
            true => Some(SmallDisk::mount(&data)),
            false => std::fs::create_dir(&data).map(|()| None).expect("a directory"),
        };
        let members = (0..members).map(|number| {
            let port = PORTS.fetch_add(3, Ordering::Relaxed);
            let inside = disk.as_ref().map(SmallDisk::inside).unwrap_or_default();
            Member::new(directory.path(), &data, inside, number, address, port)
        });
        let (members, token) = (members.collect::<Vec<_>>(), "token-1".to_owned());
        let mut cluster = Self { members, disk, directory, token };
        cluster.start_all();
        cluster
    }

    /// The addresses that clients use.
    #[must_use]
    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(Member::client_url).collect()
    }

    /// A directory with `ca.pem`, and `host.pem` and `host.key` of a client. Its certificate has
    /// `user` as the common name, which is a user of etcd once authentication is enabled.
    ///
    /// # Panics
    /// If files can't be written.
    #[must_use]
    pub fn client(&self, user: &str) -> PathBuf {
        let out = self.directory.path().join("clients").join(user);
        if !out.exists() {
            let request = IssueRequest::new(user, Validity::days(2));
            pki::issue(&self.directory.path().join("authority"), &out, &request)
                .expect("certificates can be made");
        }
        out
    }

    /// The metrics of each member, in the text format of Prometheus.
    ///
    /// # Errors
    /// A member does not answer.
    pub fn metrics(&self) -> io::Result<Vec<String>> {
        self.members.iter().map(|member| get(member.metrics_address(), "/metrics")).collect()
    }

    /// Leaves no room on the disk of all members.
    ///
    /// # Panics
    /// If they have no [small one](Self::start_on_a_small_disk).
    pub fn fill_disk(&self) {
        self.disk.as_ref().expect("a small disk").fill();
    }

    /// Makes room on the disk, and starts the members that have ended without it.
    ///
    /// # Panics
    /// As [`fill_disk`](Self::fill_disk), or if they can't be started.
    pub fn free_disk(&mut self) {
        self.disk.as_ref().expect("a small disk").free();
        for number in 0..self.members.len() {
            if self.members[number].has_ended() {
                self.restart(number);
            }
        }
    }

    /// Kills a member (SIGKILL).
    ///
    /// # Panics
    /// If it does not run.
    pub fn kill(&mut self, member: usize) {
        self.members[member].kill();
    }

    /// Starts a member that was killed, with the data that it had.
    ///
    /// # Panics
    /// If it runs or can't be started.
    pub fn restart(&mut self, member: usize) {
        let initial = self.initial_cluster();
        self.members[member].start(self.directory.path(), &initial, &self.token);
    }

    /// Stops a member (SIGSTOP): its connections stay open and are silent when this returns.
    ///
    /// # Panics
    /// If it does not run.
    pub fn stop(&self, member: usize) {
        self.members[member].stop();
    }

    /// Continues a stopped member.
    ///
    /// # Panics
    /// If it does not run.
    pub fn resume(&self, member: usize) {
        self.members[member].signal(rustix::process::Signal::CONT);
    }

    /// Runs `etcdctl` with the certificate of `root`.
    ///
    /// # Panics
    /// If it can't be started.
    pub fn etcdctl(&self, arguments: &[&str]) -> Output {
        self.etcdctl_at(&self.endpoints().join(","), arguments)
    }

    /// The same; returns what it prints.
    ///
    /// # Panics
    /// If it fails.
    pub fn etcdctl_ok(&self, arguments: &[&str]) -> String {
        let output = self.etcdctl(arguments);
        let problem = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "etcdctl {arguments:?}: {problem}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Makes the user `root` and enables authentication: clients then need roles.
    ///
    /// # Panics
    /// If etcdctl fails.
    pub fn enable_authentication(&self) {
        self.etcdctl_ok(&["user", "add", "root", "--no-password"]);
        self.etcdctl_ok(&["user", "grant-role", "root", "root"]);
        self.etcdctl_ok(&["auth", "enable"]);
    }

    /// Saves a snapshot.
    ///
    /// # Panics
    /// If etcdctl fails.
    pub fn snapshot(&self) -> PathBuf {
        let path = self.directory.path().join("snapshot.db");
        let save = ["snapshot", "save", path.to_str().expect("a path is text")];
        let saved = self.etcdctl_at(&self.members[0].client_url(), &save);
        assert!(saved.status.success(), "{saved:?}");
        path
    }

    /// Replaces the data of the cluster by those of a snapshot, as an administrator does who has
    /// lost etcd.
    ///
    /// # Panics
    /// If etcd does not start.
    pub fn restore(&mut self, snapshot: &Path, token: RestoredToken) {
        for member in &mut self.members {
            member.kill();
        }
        if token == RestoredToken::Other {
            self.token.push_str("-restored");
        }
        let initial = self.initial_cluster();
        for member in &self.members {
            member.restore(snapshot, &initial, &self.token);
        }
        self.start_all();
    }

    fn start_all(&mut self) {
        let initial = self.initial_cluster();
        for member in &mut self.members {
            member.start(self.directory.path(), &initial, &self.token);
        }
        for number in 0..self.members.len() {
            self.wait_for(number);
        }
    }

    /// Waits until a member answers: it knows a leader then.
    ///
    /// # Panics
    /// If it does not within minutes.
    pub fn wait_for(&self, member: usize) {
        let deadline = Instant::now() + PATIENCE;
        let url = self.members[member].client_url();
        loop {
            let output = self.etcdctl_at(&url, &["get", "x"]);
            if output.status.success() {
                return;
            }
            let log = self.members[member].log();
            let problem = String::from_utf8_lossy(&output.stderr);
            assert!(Instant::now() < deadline, "etcd does not answer: {problem}\n{log}");
            // That it serves causes no wake-up here.
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn etcdctl_at(&self, endpoints: &str, arguments: &[&str]) -> Output {
        let client = self.client("root");
        let mut command = Command::new(program("etcdctl"));
        command.env("ETCDCTL_API", "3").args(["--endpoints", endpoints]);
        for (option, file) in
            [("--cacert", "ca.pem"), ("--cert", "host.pem"), ("--key", "host.key")]
        {
            command.arg(option).arg(client.join(file));
        }
        command.args(arguments).output().expect("etcdctl can be started")
    }

    fn initial_cluster(&self) -> String {
        let members = self.members.iter().map(|one| format!("{}={}", one.name(), one.peer_url()));
        members.collect::<Vec<_>>().join(",")
    }
}

/// An address of this machine that no other running process has: all of 127.0.0.0/8 is local.
fn own_address() -> Ipv4Addr {
    // Process numbers have 22 bits. Addresses with less than 64 may be used by others.
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 64 + high, middle, low)
}

/// The answer to an HTTP request, with its header.
fn get(address: SocketAddrV4, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    // The server of HTTP/1.0 ends the answer by closing the connection, and does not divide it.
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    match answer.starts_with("HTTP/1.0 200") {
        true => Ok(answer),
        false => Err(io::Error::other(format!("{address}{path}: {answer:.200}"))),
    }
}

fn program(name: &str) -> PathBuf {
    vmferry_kit::packages("etcd").join("3.4/usr/bin").join(name)
}
