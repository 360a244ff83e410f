//! Two daemons without libvirt, and a rule that carries connections from the first to the second.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Host, Running, World, text};

/// The name in the hosts' certificate.
const HOST: &str = "spiffe://vmferry/host/test-host";

/// Bounds the waits: reaching it is a failure.
const PATIENCE: Duration = Duration::from_secs(60);

/// A daemon, its configuration and its address.
pub struct Daemon {
    pub host: Host,
    pub config: PathBuf,
    pub running: Running,
    pub listening: Value,
}

/// The daemons.
pub struct Place {
    pub a: Daemon,
    pub b: Daemon,
    pub world: World,
}

impl Place {
    /// Both daemons restrict themselves as `how` says. The first one knows the second.
    pub fn new(how: &str) -> Self {
        let mut place = Self::apart(how);
        place.introduce();
        place
    }

    /// The first daemon has no peer and no rule yet.
    pub fn apart(how: &str) -> Self {
        let world = World::new();
        let b = Daemon::start(&world, "b", how, &Self::exit(&world));
        let a = Daemon::start(&world, "a", how, "");
        serve(&world.path("out.sock"));
        Self { a, b, world }
    }

    /// The rule at the second daemon.
    fn exit(world: &World) -> String {
        let socket = world.path("out.sock");
        format!("[[forward]]\nname = \"echo\"\nconnect = {socket:?}\nfrom = [\"*\"]\n")
    }

    /// The peer and the rule at the first daemon.
    pub fn entrance(&self) -> String {
        let address = self.b.listening["address"].as_str().unwrap().split_once(':').unwrap().1;
        let socket = self.world.path("in.sock");
        format!(
            "[[peer]]\nname = \"b\"\naddress = {address:?}\nid = {HOST:?}\n\
             [[forward]]\nname = \"echo\"\nlisten = {socket:?}\npeer = \"b\"\n"
        )
    }

    /// Adds them, and waits until they are in use.
    pub fn introduce(&mut self) {
        let entrance = self.entrance();
        let text = std::fs::read_to_string(&self.a.config).unwrap();
        // As an editor does: another file takes its place.
        let fresh = self.world.path("fresh.toml");
        std::fs::write(&fresh, text + &entrance).unwrap();
        std::fs::rename(&fresh, &self.a.config).unwrap();
        let said = self.a.running.event("configuration");
        assert!(said["message"].as_str().unwrap().contains("is in use"), "{said}");
    }

    /// Bytes go to the second host, and come back.
    pub fn carries(&self) {
        let mut stream = self.connect();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(b"there and back").unwrap();
        let mut bytes = [0; 14];
        stream.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"there and back");
    }

    /// The second host closes a connection without an answer.
    pub fn is_refused(&self) {
        let mut stream = self.connect();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let read = stream.read(&mut [0]);
        let closed = matches!(&read, Err(error) if error.kind() == ErrorKind::ConnectionReset);
        assert!(closed || matches!(read, Ok(0)), "{read:?}");
    }

    /// A connection to the rule's socket.
    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.world.path("in.sock")).unwrap()
    }
}

impl Daemon {
    /// Starts a daemon with these further lines in its configuration.
    pub fn start(world: &World, name: &str, how: &str, more: &str) -> Self {
        let host = world.host(name);
        let config = configure(world, name, "127.0.0.1:0", more);
        let mut running = host.start(&arguments(&config, how));
        let listening = running.event("listening");
        Self { host, config, running, listening }
    }

    /// Starts it again after its end.
    pub fn restart(&mut self, how: &str) {
        self.running = self.host.start(&arguments(&self.config, how));
        self.listening = self.running.event("listening");
    }

    pub fn pid(&self) -> u32 {
        self.running.child.id()
    }

    /// The process beside it that runs this hidden command.
    pub fn beside(&self, command: &str) -> u32 {
        let deadline = Instant::now() + PATIENCE;
        let path = format!("/proc/{0}/task/{0}/children", self.pid());
        loop {
            let children = std::fs::read_to_string(&path).unwrap();
            for pid in children.split_whitespace() {
                let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                if line.split(|byte| *byte == 0).any(|word| word == command.as_bytes()) {
                    return pid.parse().unwrap();
                }
            }
            // Between `fork` and `execve` a process has the daemon's command line.
            assert!(Instant::now() < deadline, "no {command} among {children}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Writes a configuration, and returns its path.
pub fn configure(world: &World, name: &str, listen: &str, more: &str) -> PathBuf {
    let policy = world.path("policy.toml");
    std::fs::write(&policy, format!("[[allow]]\nsource = {HOST:?}\nguests = [\"*\"]\n")).unwrap();
    let config = world.path(&format!("{name}.toml"));
    let written = format!(
        "listen = {listen:?}\ntls = {:?}\npolicy = {policy:?}\ndirectory = {:?}\n\
         qemu_user = \"root\"\n{more}",
        world.tls(),
        world.path(&format!("peers-{name}")),
    );
    std::fs::write(&config, written).unwrap();
    config
}

/// The command line of a daemon.
pub fn arguments<'a>(config: &'a std::path::Path, how: &'a str) -> [&'a str; 5] {
    ["daemon", "--config", text(config), "--sandbox", how]
}

/// Sends back what it receives on each connection.
fn serve(path: &std::path::Path) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                let mut bytes = [0; 64];
                while let Ok(count @ 1..) = stream.read(&mut bytes) {
                    if stream.write_all(&bytes[..count]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}
