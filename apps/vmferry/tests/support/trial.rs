//! One fault in one phase of one migration, and its expected outcome.

use std::collections::BTreeSet;
use std::sync::{Mutex, OnceLock};

use rustix::process::Signal;
use serde_json::Value;

use super::leftovers::{Descriptors, Living, descriptors_at_rest, left, processes};
use super::outcomes::{Outcome, Owner};
use super::proxy::{Message, Proxy};
use super::{Host, Running, World, run_ok, several_at_once};

/// A phase of a migration.
#[derive(Clone, Copy, Debug)]
pub struct Phase {
    pub name: &'static str,
    at: At,
}

#[derive(Clone, Copy, Debug)]
enum At {
    /// The source has reported this event.
    Event(fn(&Value) -> bool),
    /// This message is held back on its way.
    Held(Message),
    /// COMMIT was lost, and the link is cut.
    Doubt,
}

pub const CONNECTED: Phase =
    Phase { name: "connected", at: At::Event(|event| event["event"] == "connected") };
pub const FIRST_ROUND: Phase = Phase {
    name: "first round",
    at: At::Event(|event| event["event"] == "round-started" && event["round"] == 1),
};
pub const SECOND_ROUND: Phase = Phase {
    name: "second round",
    at: At::Event(|event| event["event"] == "round-started" && event["round"] == 2),
};
pub const PAUSED: Phase = Phase {
    name: "paused",
    at: At::Event(|event| event["event"] == "round-started" && event["paused"] == true),
};
pub const STATE: Phase = Phase { name: "state on its way", at: At::Held(Message::Final) };
pub const READY: Phase = Phase { name: "READY on its way", at: At::Held(Message::Ready) };
pub const COMMIT: Phase = Phase { name: "COMMIT on its way", at: At::Held(Message::Commit) };
pub const DOUBT: Phase = Phase { name: "in doubt", at: At::Doubt };
pub const RUNNING: Phase =
    Phase { name: "running at the destination", at: At::Held(Message::Running) };

/// The phases in which the link may be connected again.
pub const ROUNDS: [Phase; 4] = [CONNECTED, FIRST_ROUND, SECOND_ROUND, PAUSED];

impl Phase {
    fn held(&self) -> Option<Message> {
        match self.at {
            At::Event(_) => None,
            At::Held(message) => Some(message),
            At::Doubt => Some(Message::Commit),
        }
    }

    /// The same phase under another name.
    pub fn called(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// Whether a message is held back in it.
    pub fn holds(&self) -> bool {
        matches!(self.at, At::Held(_))
    }

    pub fn is(&self, other: &Phase) -> bool {
        self.name == other.name
    }
}

/// How the processes are started, and in which network.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// Prefix of the guest's VMM and its clients.
    pub source: Vec<String>,
    /// Prefix of the destination.
    pub destination: Vec<String>,
}

/// A migration that has reached a phase.
pub struct Trial {
    pub fault: &'static str,
    pub phase: Phase,
    pub world: World,
    pub a: Host,
    pub b: Host,
    pub proxy: Proxy,
    pub guest: Running,
    pub send: Running,
    pub destination: Running,
    before: Descriptors,
    serves: bool,
    /// The processes that were killed: their exit status is not checked.
    killed: BTreeSet<&'static str>,
}

/// Memory that is written once and then walked slowly, so that many guests can share two
/// processors.
pub const GUEST: [&str; 4] = ["--memory", "64M", "--workload", "hot=2,rate=4000,sequential ticks"];

/// A migration whose rounds take a second each, including the paused one.
pub const SLOW: [&str; 12] = [
    "--compress",
    "none",
    "--max-bandwidth",
    "3M",
    "--max-rounds",
    "2",
    "--when-stuck",
    "switch-over",
    "--downtime-limit",
    "20ms",
    "--channels",
    "2",
];

impl Trial {
    /// Begins a migration with this reconnect timeout and waits for the phase.
    pub fn begin(fault: &'static str, phase: Phase, reconnect: &str) -> Self {
        Self::begin_at(fault, phase, reconnect, &Place::default(), ["127.0.0.1", "127.0.0.1"])
    }

    /// The same with separate networks. The destination listens at the first address, and its proxy
    /// at the second.
    pub fn begin_at(
        fault: &'static str,
        phase: Phase,
        reconnect: &str,
        place: &Place,
        [listen, reached]: [&str; 2],
    ) -> Self {
        let world = World::without_certificates();
        let (a, b) = (world.host("a"), world.host("b"));
        let mut arguments = vec!["run", "web"];
        arguments.extend(GUEST);
        let mut guest = a.start_under(&place.source, &arguments);
        guest.event("serving");
        a.wait_for("web", |status| status["report"]["populated"] == true);
        let before = descriptors_at_rest(guest.child.id());
        let listen = format!("tcp:{listen}:0");
        let mut destination = b.start_under(
            &place.destination,
            &["receive", "--listen", &listen, "--plain", "--once"],
        );
        let address = destination.event("listening")["address"].as_str().unwrap().to_owned();
        let proxy = Proxy::holding(&address, reached, phase.held());
        let mut arguments = vec!["send", "web", "--to", &proxy.address, "--plain"];
        arguments.extend(["--reconnect-timeout", reconnect]);
        arguments.extend(SLOW);
        let mut send = a.start(&arguments);
        match phase.at {
            At::Event(wanted) => drop(send.event_where(wanted)),
            At::Held(_) => proxy.await_held(),
            At::Doubt => {
                proxy.await_held();
                proxy.cut();
                send.event("in-doubt");
                let status = a.status("web");
                assert_eq!(status["phase"], "paused", "{status}");
                assert_eq!(status["migration"]["in_doubt"], true, "{status}");
            }
        }
        let (serves, killed) = (false, BTreeSet::new());
        Self { fault, phase, world, a, b, proxy, guest, send, destination, before, serves, killed }
    }

    pub fn kill_source(&mut self) {
        self.guest.kill();
        self.killed.insert("source");
    }

    pub fn kill_client(&mut self) {
        self.send.kill();
        self.killed.insert("client");
    }

    pub fn kill_destination(&mut self) {
        self.destination.kill();
        self.killed.insert("destination");
    }

    /// Starts another process on the destination's host, with the same journals and at the same
    /// address.
    pub fn restart_destination(&mut self) {
        let address = self.proxy.target();
        self.killed.insert("destination's first process");
        self.destination = self.b.receive(&["--listen", &address, "--plain"]).0;
    }

    /// Forwards the held message, if there is one.
    pub fn release(&self) {
        if self.phase.holds() {
            self.proxy.release();
        }
    }

    /// Waits until the destination runs the guest.
    pub fn serving(&mut self) {
        while !self.serves {
            match self.destination.line() {
                Some(event) => self.serves = event["event"] == "serving",
                None => panic!(
                    "{}: {:?}; the source says {:?}",
                    self.about(),
                    self.destination.finish_by_ref(),
                    self.send.finish_by_ref()
                ),
            }
        }
    }

    /// Checks that the guest stays at the source.
    pub fn stays(mut self) {
        let sent = self.end_of_send();
        let received = self.end_of_destination();
        self.check(Owner::Source, sent, received);
    }

    /// Checks that the guest runs at the destination.
    pub fn arrives(mut self) {
        self.serving();
        let sent = self.end_of_send();
        if !self.killed.contains("client") && !self.killed.contains("source") {
            assert_eq!(sent, "exit 0", "{}", self.about());
        }
        if !self.killed.contains("source") {
            assert_eq!(self.guest.finish_by_ref().code, Some(0), "{}", self.about());
        }
        self.check(Owner::Destination, sent, "runs the guest".into());
    }

    /// Checks that the guest died with its process.
    pub fn crashes(mut self) {
        let sent = self.end_of_send();
        let received = self.end_of_destination();
        if !self.killed.contains("source") {
            assert_eq!(self.guest.finish_by_ref().code, Some(0), "{}", self.about());
        }
        self.check(Owner::Crashed, sent, received);
    }

    pub fn about(&self) -> String {
        format!("{} at {}", self.fault, self.phase.name)
    }

    fn end_of_send(&mut self) -> String {
        let ended = self.send.finish_by_ref();
        if self.killed.contains("client") { "killed".into() } else { ended.in_words() }
    }

    /// Ends a destination that listens for others, and checks that it does not claim to run a
    /// guest.
    fn end_of_destination(&mut self) -> String {
        let restarted = self.killed.contains("destination's first process");
        if restarted {
            self.destination.signal(Signal::TERM);
        }
        let ended = self.destination.finish_by_ref();
        let runs = ended.lines.iter().any(|event| event["event"] == "running");
        assert!(!runs || self.killed.contains("destination"), "{}: {ended:?}", self.about());
        match (restarted, self.killed.contains("destination")) {
            (true, true) => "killed, started again".into(),
            (true, false) => "ended, started again".into(),
            (false, true) => "killed".into(),
            (false, false) => ended.in_words(),
        }
    }

    /// Checks which host has the guest by both hosts, the guest's memory, and that nothing else is
    /// left over.
    fn check(mut self, owner: Owner, source: String, destination: String) {
        let about = self.about();
        println!("{about}: {owner:?}, {source}, {destination}");
        let (here, there) = (claim(&self.a), claim(&self.b));
        let both = format!("{about}: {owner:?}, and by status {here:?}, {there:?}");
        assert!(!(here.runs && there.runs), "TWO OWNERS: {both}");
        assert!(!(here.has && there.has), "TWO OWNERS by the journals: {both}");
        assert_eq!(here.runs, owner == Owner::Source, "{both}");
        assert_eq!(there.runs, owner == Owner::Destination, "{both}");
        let mut living = Vec::new();
        match owner {
            Owner::Source => {
                assert!(here.has, "{both}");
                self.a.check_guest("web");
                let (host, pid, descriptors) =
                    (&self.a, self.guest.child.id(), self.before.clone());
                living.push(Living { host, pid, descriptors });
            }
            Owner::Destination => {
                assert!(there.has, "{both}");
                self.b.check_guest("web");
                let (host, pid) = (&self.b, self.destination.child.id());
                living.push(Living { host, pid, descriptors: of_a_destination() });
            }
            Owner::Crashed => {}
        }
        let mut stale = Vec::new();
        if self.killed.contains("source") {
            stale.push(&self.a);
        }
        if self.killed.contains("destination") {
            stale.push(&self.b);
        }
        let found = left(self.world.directory.path(), &[&self.a, &self.b], &living, &stale);
        assert!(found.is_empty(), "{about}: {found:#?}");
        let (fault, phase) = (self.fault, self.phase.name);
        if fault != NO_FAULT {
            Outcome { guest: "microvm", fault, phase, source, destination, owner }.note();
        }
        let owner = match owner {
            Owner::Source => Some((&self.a, &mut self.guest)),
            Owner::Destination => Some((&self.b, &mut self.destination)),
            Owner::Crashed => None,
        };
        if let Some((host, vmm)) = owner {
            run_ok(host, &["quit", "web"]);
            assert_eq!(vmm.finish_by_ref().code, Some(0), "{about}");
        }
        let found = processes(self.world.directory.path());
        assert!(found.is_empty(), "{about}: {found:#?}");
    }
}

/// A host's answer about the guest.
#[derive(Debug)]
pub struct Claim {
    /// The guest runs there.
    pub runs: bool,
    /// The last session says that the guest is this host's.
    pub has: bool,
    /// The last session's verdict.
    pub verdict: Option<String>,
}

pub fn claim(host: &Host) -> Claim {
    let status = run_ok(host, &["status"]);
    let guests = status["guests"].as_array().unwrap();
    let runs = guests.iter().any(|guest| guest["name"] == "web" && guest["phase"] == "running");
    let sessions = run_ok(host, &["status", "--sessions"]);
    let last = sessions["sessions"].as_array().unwrap().last();
    let verdict = last.map(|last| last["verdict"].as_str().unwrap().to_owned());
    Claim { runs, has: verdict.as_deref() == Some("here"), verdict }
}

const NO_FAULT: &str = "none";

/// The open descriptors of a destination that runs a guest after a migration without a fault.
pub fn of_a_destination() -> Descriptors {
    static FOUND: OnceLock<Descriptors> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            let mut trial = Trial::begin(NO_FAULT, CONNECTED, "1s");
            trial.destination.event("serving");
            trial.send.finish_by_ref().exited(0);
            trial.guest.finish_by_ref().exited(0);
            trial.b.check_guest("web");
            descriptors_at_rest(trial.destination.child.id())
        })
        .clone()
}

/// Runs jobs side by side, because most of each is waiting, and names the ones that failed.
pub fn side_by_side<J>(at_once: usize, jobs: Vec<J>, work: impl Fn(&J) + Sync)
where
    J: std::fmt::Debug + Send + Sync,
{
    let failed = Mutex::new(Vec::new());
    several_at_once(at_once, jobs, |job| {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&job)));
        if done.is_err() {
            failed.lock().unwrap().push(format!("{job:?}"));
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "failed: {failed:#?}");
}
