//! An etcd, and two hosts whose daemons have joined a fleet there.

use std::path::{Path, PathBuf};

use serde_json::Value;
use vmferry_etcd_lab::EtcdCluster;

use crate::support::proxy::{Message, Proxy};
use crate::support::trial::GUEST;
use crate::support::{Host, Running, World, run_ok, text};

/// The name in the hosts' certificate.
const HOST: &str = "spiffe://vmferry/host/test-host";

/// A host with a daemon.
pub struct Member {
    pub host: Host,
    pub daemon: Running,
    config: PathBuf,
    /// Of the daemon's command.
    prefix: Vec<String>,
    /// The socket of its witness.
    pub witness: PathBuf,
    /// Where it listens.
    pub address: String,
}

/// The hosts. Guests are sent from `a` to `b`.
pub struct Place {
    pub a: Member,
    pub b: Member,
    pub world: World,
    pub etcd: EtcdCluster,
    /// A file with the fleet's table, for commands.
    pub table: PathBuf,
}

/// A guest that is being sent, and the receiver.
pub struct Move {
    pub guest: Running,
    pub send: Running,
    pub receive: Running,
    pub proxy: Proxy,
}

impl Place {
    pub fn new() -> Self {
        let (world, etcd) = (World::new(), EtcdCluster::start(1));
        let table = init(&world, &etcd, "/vmferry");
        let [a, b] = ["a", "b"].map(|name| Member::start(&world, name, &etcd, "/vmferry"));
        Self { a, b, world, etcd, table }
    }

    /// Sends a guest to a receiver, and holds back this message on its way.
    pub fn send(&self, held: Message) -> Move {
        self.send_guest(&GUEST, held, &[])
    }

    /// The same with another guest and further options.
    pub fn send_guest(&self, guest: &[&str], held: Message, options: &[&str]) -> Move {
        let guest = self.a.host.guest("web", guest);
        let receive = ["--listen", "tcp:127.0.0.1:0", "--plain", "--once"];
        let witness = ["--witness", text(&self.b.witness)];
        let (receive, address) = self.b.host.receive(&[&receive[..], &witness].concat());
        let proxy = Proxy::holding(&address, "127.0.0.1", Some(held));
        let send = ["send", "web", "--to", &proxy.address, "--plain"];
        let witness = ["--witness", text(&self.a.witness)];
        let send = self.a.host.start(&[&send[..], &witness, options].concat());
        proxy.await_held();
        Move { guest, send, receive, proxy }
    }

    /// The registers of all sessions.
    pub fn registers(&self) -> Vec<String> {
        registers(&self.etcd)
    }
}

/// The registers of all sessions of the fleet.
pub fn registers(etcd: &EtcdCluster) -> Vec<String> {
    let keys = ["get", "--prefix", "--print-value-only", "/vmferry/sessions/"];
    let objects = etcd.etcdctl_ok(&keys);
    let register = |line: &str| {
        let object: Value = serde_json::from_str(line).unwrap();
        object["register"].as_str().unwrap().to_owned()
    };
    objects.lines().filter(|line| !line.is_empty()).map(register).collect()
}

/// Makes a fleet, and returns a file with its table.
pub fn init(world: &World, etcd: &EtcdCluster, prefix: &str) -> PathBuf {
    let file = world.path(&format!("fleet{}.toml", prefix.replace('/', "-")));
    std::fs::write(&file, table(etcd, prefix)).unwrap();
    run_ok(&world.host("operator"), &["fleet", "init", "--config", text(&file)]);
    file
}

impl Member {
    /// Starts a daemon that joins the fleet at the prefix.
    pub fn start(world: &World, name: &str, etcd: &EtcdCluster, prefix: &str) -> Self {
        Self::start_as(world, name, etcd, prefix, name)
    }

    /// The same under another name in the fleet.
    pub fn start_as(
        world: &World,
        name: &str,
        etcd: &EtcdCluster,
        prefix: &str,
        host: &str,
    ) -> Self {
        let mut member = Self::spawn(world, name, etcd, prefix, host);
        member.has_joined();
        member
    }

    /// The same, and waits for nothing.
    pub fn spawn(world: &World, name: &str, etcd: &EtcdCluster, prefix: &str, host: &str) -> Self {
        let policy = world.path("policy.toml");
        let allow = format!("[[allow]]\nsource = {HOST:?}\nguests = [\"*\"]\n");
        std::fs::write(&policy, allow).unwrap();
        let link = format!("tls = {:?}\npolicy = {policy:?}\n", world.tls());
        Self::spawn_with(world, name, &link, &host_table(etcd, prefix, host))
    }

    /// Starts a daemon with these lines about its links, and these tables, which joins its fleet.
    pub fn start_with(world: &World, name: &str, link: &str, tables: &str) -> Self {
        let mut member = Self::spawn_with(world, name, link, tables);
        member.has_joined();
        member
    }

    /// The same with a prefix of the daemon's command.
    pub fn start_under(
        world: &World,
        name: &str,
        link: &str,
        tables: &str,
        prefix: &[String],
    ) -> Self {
        let mut member = Self::spawn_under(world, name, link, tables, prefix);
        member.has_joined();
        member
    }

    /// The same as [`start_with`](Self::start_with), and waits for nothing.
    pub fn spawn_with(world: &World, name: &str, link: &str, tables: &str) -> Self {
        Self::spawn_under(world, name, link, tables, &[])
    }

    fn spawn_under(world: &World, name: &str, link: &str, tables: &str, prefix: &[String]) -> Self {
        let host = world.host(name);
        let config = world.path(&format!("{name}.toml"));
        let written = format!(
            "listen = \"127.0.0.1:0\"\n{link}directory = {:?}\nqemu_user = \"root\"\n{tables}",
            world.path(&format!("peers-{name}")),
        );
        std::fs::write(&config, written).unwrap();
        let prefix = prefix.to_vec();
        let daemon = host.start_under(&prefix, &["daemon", "--config", text(&config)]);
        let witness = host.runtime.join("witness");
        Self { host, daemon, config, prefix, witness, address: String::new() }
    }

    /// Starts the daemon again after its end, and waits until it has joined.
    pub fn restart(&mut self) {
        self.start_again();
        self.has_joined();
    }

    /// Starts the daemon again.
    pub fn start_again(&mut self) {
        let command = ["daemon", "--config", text(&self.config)];
        self.daemon = self.host.start_under(&self.prefix, &command);
    }

    /// Waits until the daemon listens and its agent has joined, in either order.
    fn has_joined(&mut self) {
        let mut wanted = vec!["listening", "fleet-joined"];
        while !wanted.is_empty() {
            let event =
                self.daemon.event_where(|event| wanted.iter().any(|name| event["event"] == *name));
            wanted.retain(|name| event["event"] != *name);
            if let Some(address) = event["address"].as_str() {
                self.address = address.to_owned();
            }
        }
    }

    /// The agent's process.
    pub fn agent(&self) -> i32 {
        let pid = self.daemon.child.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let is_agent = |pid: &&str| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).any(|word| word == b"join-fleet")
        };
        children.split_whitespace().find(is_agent).expect("an agent runs").parse().unwrap()
    }
}

/// The table `[fleet]`.
pub fn table(etcd: &EtcdCluster, prefix: &str) -> String {
    let client: &Path = &etcd.client("host");
    format!("[fleet]\netcd = {:?}\ntls = {client:?}\nprefix = {prefix:?}\n", etcd.endpoints())
}

/// The same with the host's address and further lines.
pub fn host_table_at(
    etcd: &EtcdCluster,
    prefix: &str,
    host: &str,
    address: &str,
    more: &str,
) -> String {
    format!("{}host = {host:?}\naddress = {address:?}\n{more}", table(etcd, prefix))
}

/// The same, with what it says of a host.
pub fn host_table(etcd: &EtcdCluster, prefix: &str, host: &str) -> String {
    host_table_at(etcd, prefix, host, "127.0.0.1:7002", "[fleet.labels]\nrack = \"r1\"\n")
}
