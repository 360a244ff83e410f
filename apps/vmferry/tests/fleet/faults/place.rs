//! Two hosts of a fleet with an etcd of three members, and all that can fail in it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vmferry_etcd_lab::EtcdCluster;
use vmferry_kit::Cable;
use vmferry_qemu_lab::{Machine, Version};

use super::Fault;
use crate::place::{Member, host_table_at, init};
use crate::receivers::{Arrived, command};
use crate::running::{self, Watch};
use crate::support::clock::Clock;
use crate::support::proxy::{Message, Proxy};
use crate::support::scene::{Scene, Way};
use crate::support::{Host, Running, run_ok, text};

/// When the first fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    Ordered,
    Admitted,
    Sending,
    /// The source has sent COMMIT, and the destination does not have it.
    Commit,
    /// The destination runs the guest, and the source does not know it.
    Running,
}

impl Moment {
    pub const ALL: [Self; 5] =
        [Self::Ordered, Self::Admitted, Self::Sending, Self::Commit, Self::Running];

    fn message(self) -> Option<Message> {
        match self {
            Self::Commit => Some(Message::Commit),
            Self::Running => Some(Message::Running),
            _ => None,
        }
    }
}

pub struct Place {
    scene: Scene,
    pub watch: Watch,
    a: Member,
    b: Member,
    /// From `a` to the daemon of `b`, through the proxy.
    cable: Cable,
    proxy: Proxy,
    operator: Host,
    table: PathBuf,
    etcd: EtcdCluster,
    clock: Clock,
    /// Processes that were stopped.
    stopped: Vec<Pid>,
    killed_members: Vec<usize>,
    silent_members: Vec<usize>,
    /// Whose daemons have ended.
    ended: [bool; 2],
}

impl Place {
    pub fn new(moment: Moment) -> Self {
        let etcd = EtcdCluster::start_on_a_small_disk(3);
        let sockets = tempfile::tempdir().unwrap();
        let machine = Machine::on_kvm(Version::V10_0, "freed=40 hot=8,rate=40000");
        let [option, value] = running::arguments(sockets.path());
        let scene = Scene::of(machine.with(&[&option, &value]), Way::Attached);
        let watch = Watch::begin(sockets);
        let table = init(&scene.world, &etcd, "/vmferry");
        let cable = Cable::new();
        let to_cable = format!("tcp:{}", cable.address);
        let proxy = Proxy::holding(&to_cable, "127.0.0.1", moment.message());
        let clock = Clock::make(scene.world.directory.path(), "clock");
        let plain = "plain = true\n";
        let template =
            format!("[[receive]]\nname = \"default\"\nexec = '''{}'''\n", command(&scene));
        let address = proxy.address.strip_prefix("tcp:").unwrap();
        let tables = host_table_at(&etcd, "/vmferry", "b", address, "") + &template;
        let b = Member::start_with(&scene.world, "b", plain, &tables);
        let directory = format!("qemu = [{:?}]\n", scene.here.qmp.parent().unwrap());
        let tables = host_table_at(&etcd, "/vmferry", "a", "127.0.0.1:1", &directory);
        let a = Member::start_under(&scene.world, "a", plain, &tables, &clock.prefix);
        let operator = scene.world.host("operator");
        let (stopped, killed_members, silent_members) = (Vec::new(), Vec::new(), Vec::new());
        let place = Self {
            scene,
            watch,
            a,
            b,
            cable,
            proxy,
            operator,
            table,
            etcd,
            clock,
            stopped,
            killed_members,
            silent_members,
            ended: [false; 2],
        };
        place.connect();
        place.until(Instant::now() + Duration::from_secs(60), "the guest is shown", || {
            place.guests().is_some_and(|all| all == [("a".to_owned(), "running".to_owned())])
        });
        place
    }

    fn connect(&self) {
        let (_, port) = self.b.address.rsplit_once(':').unwrap();
        self.cable.lead_to(format!("127.0.0.1:{port}").parse().unwrap());
    }

    pub fn order(&self) -> Running {
        let config = ["--config", text(&self.table)];
        let order = ["fleet", "move", "tested", "--max-bandwidth", "30M"];
        self.operator.start(&[&order[..], &config].concat())
    }

    /// Waits until the move has come this far.
    pub fn reaches(&self, moment: Moment, order: &mut Running) {
        let is_phase =
            |event: &Value, phase: &str| event["event"] == "move" && event["phase"] == phase;
        match moment {
            Moment::Ordered => drop(order.event_where(|event| is_phase(event, "ordered"))),
            // Steps that follow each other at once may be shown as one.
            Moment::Admitted => drop(
                order
                    .event_where(|event| is_phase(event, "admitted") || is_phase(event, "sending")),
            ),
            Moment::Sending => drop(order.event_where(|event| is_phase(event, "sending"))),
            Moment::Commit | Moment::Running => self.proxy.await_held(),
        }
    }

    pub fn strike(&mut self, fault: Fault) {
        match fault {
            Fault::AgentOfSourceKilled => self.end(0, |member| Some(member.agent())),
            Fault::AgentOfDestinationKilled => self.end(1, |member| Some(member.agent())),
            Fault::DaemonOfSourceKilled => self.end(0, |_| None),
            Fault::DaemonOfDestinationKilled => self.end(1, |_| None),
            Fault::AgentOfSourceStopped if !self.ended[0] => self.stop(Some(self.a.agent())),
            Fault::AgentOfDestinationStopped if !self.ended[1] => self.stop(Some(self.b.agent())),
            Fault::AgentOfSourceStopped | Fault::AgentOfDestinationStopped => {}
            Fault::SenderKilled => kill(process_of(&self.a.host, "send")),
            Fault::SenderStopped => self.stop(process_of(&self.a.host, "send")),
            Fault::ReceiverKilled => kill(process_of(&self.b.host, "receive")),
            Fault::ReceiverStopped => self.stop(process_of(&self.b.host, "receive")),
            Fault::EtcdMinorityKilled => self.kill_members(1),
            Fault::EtcdMajorityKilled => self.kill_members(2),
            Fault::EtcdSilent => {
                for member in 0..3 {
                    if !self.killed_members.contains(&member)
                        && !self.silent_members.contains(&member)
                    {
                        self.etcd.stop(member);
                        self.silent_members.push(member);
                    }
                }
            }
            Fault::EtcdDiskFull => self.etcd.fill_disk(),
            Fault::LinkCut => self.cable.cut(),
            Fault::LinkFrozen => self.cable.freeze(),
            Fault::ClockAnHourAhead => self.clock.set(3600),
        }
    }

    /// Kills a host's daemon, or only this process, with which the daemon ends.
    fn end(&mut self, host: usize, process: impl Fn(&Member) -> Option<i32>) {
        if std::mem::replace(&mut self.ended[host], true) {
            return;
        }
        let member = if host == 0 { &mut self.a } else { &mut self.b };
        match process(member) {
            Some(process) => {
                kill(Some(process));
                member.daemon.finish_by_ref();
            }
            None => member.daemon.kill(),
        }
    }

    fn stop(&mut self, process: Option<i32>) {
        let Some(pid) = process.and_then(Pid::from_raw) else { return };
        if kill_process(pid, Signal::STOP).is_ok() {
            self.stopped.push(pid);
        }
    }

    fn kill_members(&mut self, number: usize) {
        for member in 0..number {
            if !self.killed_members.contains(&member) {
                self.silent_members.retain(|silent| *silent != member);
                self.etcd.kill(member);
                self.killed_members.push(member);
            }
        }
    }

    /// Ends all faults. What was killed and has nobody who starts it again stays dead.
    pub fn heal(&mut self) {
        for member in std::mem::take(&mut self.silent_members) {
            self.etcd.resume(member);
        }
        for member in std::mem::take(&mut self.killed_members) {
            self.etcd.restart(member);
        }
        self.etcd.free_disk();
        self.etcd.wait_for(2);
        for pid in std::mem::take(&mut self.stopped) {
            // It may have been killed since.
            let _ = kill_process(pid, Signal::CONT);
        }
        self.cable.mend();
        for (host, ended) in std::mem::take(&mut self.ended).into_iter().enumerate() {
            if ended {
                let member = if host == 0 { &mut self.a } else { &mut self.b };
                member.restart();
            }
        }
        self.connect();
        self.proxy.release();
    }

    /// Waits until the order is over and the guest is on one host only, where it is checked. Returns
    /// whether it has moved.
    pub fn settles(&mut self, order: Running, deadline: Instant) -> bool {
        // It says what became of the guest, which agents publish later.
        let moved = order.finish().code == Some(0);
        let host = if moved { "b" } else { "a" };
        self.until(deadline, "the guest is shown where it is", || {
            self.guests().is_some_and(|all| all == [(host.to_owned(), "running".to_owned())])
        });
        let status = ["fleet", "status", "--config", text(&self.table)];
        let status = run_ok(&self.operator, &status);
        assert_eq!((&status["moves"], &status["problems"]), (&json!([]), &json!([])), "{status}");
        self.check(host);
        moved
    }

    fn check(&mut self, host: &str) {
        if host == "a" {
            self.scene.here.check_guest();
            return;
        }
        let shown = run_ok(&self.operator, &["fleet", "guests", "--config", text(&self.table)]);
        let qmp = json!({ "qmp": shown["guests"][0]["socket"] });
        let arrived = Arrived::at(&self.scene, &qmp);
        arrived.check();
        assert!(self.scene.here.child.wait().unwrap().success());
        arrived.quit();
    }

    /// Host and phase of each guest; `None` if etcd does not answer.
    fn guests(&self) -> Option<Vec<(String, String)>> {
        let shown = self.operator.run(&["fleet", "guests", "--config", text(&self.table)]);
        let guests = (shown.code == Some(0)).then(|| shown.last()["guests"].clone())?;
        let word = |guest: &Value, name: &str| guest[name].as_str().unwrap().to_owned();
        let all = guests.as_array()?.iter();
        Some(all.map(|guest| (word(guest, "host"), word(guest, "phase"))).collect())
    }

    fn until(&self, deadline: Instant, what: &str, wanted: impl Fn() -> bool) {
        while !wanted() {
            assert!(Instant::now() < deadline, "never: {what}");
            // What agents publish notifies no reader of the command.
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A failed test leaves no stopped process behind.
        for pid in &self.stopped {
            let _ = kill_process(*pid, Signal::CONT);
        }
    }
}

fn kill(process: Option<i32>) {
    if let Some(pid) = process.and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// The `vmferry` process of a host with this command.
fn process_of(host: &Host, command: &str) -> Option<i32> {
    let runtime = format!("VMFERRY_RUNTIME_DIR={}", host.runtime.display());
    let is_it = |pid: &i32| {
        let read = |name: &str| std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let has = |bytes: &[u8], word: &[u8]| bytes.split(|byte| *byte == 0).any(|it| it == word);
        let line = read("cmdline");
        let is_vmferry = line
            .split(|byte| *byte == 0)
            .next()
            .is_some_and(|program| program.ends_with(b"vmferry") || program == b"/proc/self/exe");
        is_vmferry && has(&line, command.as_bytes()) && has(&read("environ"), runtime.as_bytes())
    };
    let numbers = std::fs::read_dir("/proc").unwrap().flatten();
    numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(is_it)
}
