//! Clients that die, links that break and hosts that freeze while guests of `vmferry run` fetch
//! their pages, at seeded moments.

use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::Signal;
use serde_json::Value;
use vmferry_kit::need_kvm;

use crate::support::proxy::Proxy;
use crate::support::strikes::{Plan, Strike, Tally};
use crate::support::{Host, Running, World, several_at_once};

/// A host that has lost its VMM has lost the memory of its guest, which no recovery brings back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// `vmferry send` is killed, which only watches.
    Client,
    Link,
    LinkAndClient,
    /// The VMM at the source stops as a host does that has no time for it.
    FrozenSource,
    FrozenDestination,
}

const FAULTS: [Fault; 5] = [
    Fault::Client,
    Fault::Link,
    Fault::LinkAndClient,
    Fault::FrozenSource,
    Fault::FrozenDestination,
];

/// Kinds of guests and of their memory.
const GUESTS: [[&str; 2]; 6] = [
    ["process", "private"],
    ["process", "memfd"],
    ["process", "thp"],
    ["kvm", "private"],
    ["kvm", "memfd"],
    ["kvm", "thp"],
];

/// It rewrites its memory slowly, so that its faults, which the cap does not delay, do not fetch
/// everything at once.
const WORKLOAD: &str = "fill=16,text hot=32,random,rate=1000 ticks";

struct Fetching {
    b: Host,
    source: Running,
    destination: Running,
    proxy: Proxy,
    send: Option<Running>,
    /// The pages that were missing when the guest had started.
    missing: f64,
    _world: World,
}

/// Enough missing pages for three faults among them.
const ENOUGH: f64 = 2000.0;

impl Fetching {
    /// On a busy host a guest may have too little processor time to write enough: it is moved again
    /// then.
    fn begin(guest: [&str; 2]) -> Self {
        let mut moves = std::iter::repeat_with(|| Self::move_once(guest)).take(5);
        let moved = moves.find(|moved| moved.missing > ENOUGH);
        moved.unwrap_or_else(|| panic!("{guest:?}: the guest never lacks enough pages"))
    }

    fn move_once([guest, kind]: [&str; 2]) -> Self {
        let world = World::without_certificates();
        let (a, b) = (world.host("a"), world.host("b"));
        let flags = ["--guest", guest, "--memory", "64M", "--memory-kind", kind];
        let source = a.guest("web", &[&flags[..], &["--workload", WORKLOAD]].concat());
        let listen = ["--listen", "tcp:127.0.0.1:0", "--plain", "--memory-kind", kind];
        let (mut destination, address) = b.receive(&listen);
        let proxy = Proxy::holding(&address, "127.0.0.1", None);
        let to = ["send", "web", "--plain", "--to", &proxy.address, "--compress", "none"];
        let limits = ["--max-bandwidth", "5M", "--post-copy", "now", "--downtime-limit", "5ms"];
        let mut send = a.start(&[&to[..], &limits].concat());
        send.event("serving");
        let missing = destination.event("fetching")["pages"].as_f64().unwrap();
        Self { b, source, destination, proxy, send: Some(send), missing, _world: world }
    }

    /// Waits until this share of the missing pages has arrived. Returns how many are missing.
    fn await_share(&self, share: f64) -> u64 {
        let remaining = |status: &Value| status["fetch"]["remaining_pages"].as_u64().unwrap_or(0);
        let most = (self.missing * (1.0 - share)) as u64;
        remaining(&self.b.wait_for("web", |status| remaining(status) <= most))
    }

    /// Returns false if the fault has nothing to strike, because it struck before.
    fn strike(&mut self, strike: &Strike<Fault>) -> bool {
        match strike.fault {
            Fault::Client => return self.kill_client(),
            Fault::Link => self.cut_for(strike.lasts),
            Fault::LinkAndClient => {
                self.proxy.cut();
                self.kill_client();
                self.cut_for(strike.lasts);
            }
            Fault::FrozenSource => freeze(&self.source, strike.lasts),
            Fault::FrozenDestination => freeze(&self.destination, strike.lasts),
        }
        true
    }

    fn kill_client(&mut self) -> bool {
        let Some(mut send) = self.send.take() else { return false };
        send.kill();
        true
    }

    fn cut_for(&self, lasts: Duration) {
        self.proxy.cut();
        // The fault is a link that is cut for so long.
        std::thread::sleep(lasts);
        self.proxy.heal();
    }

    /// The guest has every page and runs at one host only.
    fn arrives(mut self) {
        self.destination.event("received");
        if let Some(send) = self.send.take() {
            send.finish().exited(0);
        }
        self.source.finish().exited(0);
        assert!(self.b.status("web")["fetch"].is_null(), "nothing is fetched any more");
        self.b.check_guest("web");
    }
}

/// Stops a process for this time, which is the fault.
fn freeze(process: &Running, lasts: Duration) {
    process.signal(Signal::STOP);
    std::thread::sleep(lasts);
    process.signal(Signal::CONT);
}

/// Each migration has three faults. The kinds of guests take turns.
#[test]
fn faults_lose_no_guest_that_fetches_and_no_page() {
    need_kvm();
    let plans = Plan::all(6, 24, &FAULTS);
    let (migrations, tally) = (plans.len(), Mutex::new(Tally::default()));
    several_at_once(6, plans, |plan| {
        let kind = GUESTS[plan.seed as usize % GUESTS.len()];
        println!("{kind:?}: {plan:?}");
        let mut fetching = Fetching::begin(kind);
        for strike in &plan.strikes {
            // What strikes after the last page is no fault of a fetch.
            if fetching.await_share(strike.arrived) > 0 && fetching.strike(strike) {
                tally.lock().add(kind[0], &format!("{:?}", strike.fault));
            }
        }
        fetching.arrives();
    });
    tally.into_inner().print(migrations);
}
