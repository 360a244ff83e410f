//! Two hosts, a QEMU guest on the first, and a daemon on the second that receives it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vmferry_kit::Cable;
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Said, Version};

use crate::support::scene::{Scene, Way};
use crate::support::{Host, Running, text};

/// Bounds every wait: reaching it is a failure.
const PATIENCE: Duration = Duration::from_secs(120);

/// The name in the hosts' certificate.
pub const HOST: &str = "spiffe://vmferry/host/test-host";

/// The hosts, and the cable to the daemon's port.
pub struct Place {
    pub scene: Scene,
    pub cable: Cable,
    pub daemon: Running,
    config: PathBuf,
    tls: bool,
}

/// A guest that has arrived, in its QEMU. It is ended with the test.
pub struct Arrived {
    pub qmp: PathBuf,
    pid: Pid,
    console: PathBuf,
}

impl Place {
    pub fn new(way: Way) -> Self {
        Self::with(Scene::new(Version::V10_0, way), true, "")
    }

    /// A daemon without TLS.
    pub fn plain(way: Way) -> Self {
        Self::with(Scene::new(Version::V10_0, way), false, "")
    }

    /// The configuration has these further lines ahead of the template `usual`.
    pub fn with(scene: Scene, tls: bool, more: &str) -> Self {
        let world = &scene.world;
        let policy = format!("[[allow]]\nsource = {HOST:?}\nguests = [\"tested\"]\n");
        std::fs::write(world.path("policy.toml"), policy).unwrap();
        let link = match tls {
            true => format!("tls = {:?}\npolicy = {:?}\n", world.tls(), world.path("policy.toml")),
            false => "plain = true\n".to_owned(),
        };
        let config = world.path("daemon.toml");
        let written = format!(
            "listen = \"127.0.0.1:0\"\n{link}directory = {:?}\nqemu_user = \"root\"\n{more}\n\
             [[receive]]\nname = \"usual\"\nexec = '''{}'''\n",
            world.path("peers"),
            command(&scene),
        );
        std::fs::write(&config, written).unwrap();
        let cable = Cable::new();
        let daemon = start(&scene.b, &config, &cable);
        Self { scene, cable, daemon, config, tls }
    }

    /// Adds lines to the configuration, which is in use from the next receiver on.
    pub fn configure(&self, more: &str) {
        let mut text = std::fs::read_to_string(&self.config).unwrap();
        text.push_str(more);
        std::fs::write(&self.config, text).unwrap();
    }

    /// Kills the daemon, and starts another one.
    pub fn restart(&mut self) {
        self.daemon.kill();
        self.daemon = start(&self.scene.b, &self.config, &self.cable);
    }

    /// The daemon's address.
    pub fn address(&self) -> String {
        let scheme = if self.tls { "tls" } else { "tcp" };
        format!("{scheme}:{}", self.cable.address)
    }

    /// A migration with few, slow rounds, from `host`.
    pub fn send_from(&self, host: &Host, address: &str, template: &str) -> Running {
        let tls = self.scene.world.tls();
        let link = if self.tls { vec!["--tls", &tls] } else { vec!["--plain"] };
        let link = [&link[..], &["--template", template]].concat();
        host.start(&self.scene.arguments(address, &link, "30M"))
    }

    pub fn send(&self, template: &str) -> Running {
        self.send_from(&self.scene.a, &self.address(), template)
    }

    /// Waits for an event of a receiver.
    pub fn receiver_says(&mut self, name: &str) -> Value {
        let event = self
            .daemon
            .event_where(|event| event["event"] == "receiver" && event["said"]["event"] == name);
        event["said"].clone()
    }

    /// Waits until the guest has arrived.
    pub fn received(&mut self) -> Arrived {
        let received = self.receiver_says("received");
        Arrived::at(&self.scene, &received)
    }

    /// The guests of which the journals say that they are here. A receiver whose first daemon was
    /// killed tells nobody.
    pub fn left_by_receivers(&self) -> Vec<Arrived> {
        let directory = self.scene.b.runtime.clone();
        let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
        let qmp = names.filter(|path| path.extension().is_some_and(|ending| ending == "qmp"));
        qmp.map(|qmp| Arrived::at(&self.scene, &serde_json::json!({ "qmp": qmp }))).collect()
    }

    /// Waits until no receiver is left.
    pub fn no_receiver_is_left(&self) {
        let directory = self.scene.b.runtime.join("receivers");
        let deadline = Instant::now() + PATIENCE;
        let left = || std::fs::read_dir(&directory).unwrap().count();
        while left() > 0 {
            assert!(Instant::now() < deadline, "receivers are left");
            // A directory causes no wake-up.
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Starts a daemon that is reached through a cable.
pub fn start(host: &Host, config: &std::path::Path, cable: &Cable) -> Running {
    let mut daemon = host.start(&["daemon", "--config", text(config)]);
    let listening = daemon.event("listening");
    let address = listening["address"].as_str().unwrap();
    cable.lead_to(address.split_once(':').unwrap().1.parse().unwrap());
    daemon
}

/// The command line of a QEMU like the guest's. The shell replaces variables, so that each QEMU has
/// its own files.
pub fn command(scene: &Scene) -> String {
    scene.machine.template(&scene.lab, "arrived-$VMFERRY_GUEST-$$")
}

impl Arrived {
    /// The guest of which a receiver says that it was `received` or `found`.
    pub fn at(scene: &Scene, event: &Value) -> Self {
        let qmp = PathBuf::from(event["qmp"].as_str().unwrap());
        Self::with_console(qmp, |pid| scene.lab.path(&format!("arrived-tested-{pid}.out")))
    }

    /// The guest of the QEMU at a socket, with the file that its console writes.
    pub fn with_console(qmp: PathBuf, console: impl FnOnce(u32) -> PathBuf) -> Self {
        let pid = Qmp::connect(&qmp).unwrap().pid().unwrap();
        let console = console(pid);
        Self { qmp, pid: Pid::from_raw(pid.try_into().unwrap()).unwrap(), console }
    }

    /// Waits until the guest has checked all of its memory once more, without an error.
    pub fn check(&self) {
        let deadline = Instant::now() + PATIENCE;
        Said::check(|what, wanted| {
            loop {
                if let Some(said) = Said::last(&self.console).filter(|said| wanted(said)) {
                    return said;
                }
                assert!(Instant::now() < deadline, "never {what}");
                // A file causes no wake-up.
                std::thread::sleep(Duration::from_millis(10));
            }
        });
    }

    /// Ends its QEMU.
    pub fn quit(&self) {
        Qmp::connect(&self.qmp).unwrap().quit().unwrap();
    }
}

impl Drop for Arrived {
    fn drop(&mut self) {
        let program = std::fs::read_link(format!("/proc/{}/exe", self.pid.as_raw_nonzero()));
        if program.is_ok_and(|path| path.ends_with("qemu-system-x86_64")) {
            let _ = kill_process(self.pid, Signal::KILL);
        }
    }
}
