//! Migrations with a witness, which is in memory here.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use vmferry::witness::{Register, Witness, WitnessId, WitnessRequest};
use vmferry::{ErrorClass, VmError, chain};
use vmferry_handover::journal::Record;
use vmferry_handover::{GuestIdentity, SessionId, SessionWord};

use crate::support::cutter::{Channels, Cutter};
use crate::support::{
    DestinationGuest, Scenario, given, journals, kept, nothing, owned, running_guest,
};

#[derive(Debug)]
struct Registers {
    name: &'static str,
    /// Requests take effect, and nobody learns that.
    is_deaf: bool,
    sessions: Mutex<BTreeMap<SessionId, Register>>,
}

impl Registers {
    fn new(name: &'static str, is_deaf: bool) -> Arc<Self> {
        Arc::new(Self { name, is_deaf, sessions: Mutex::default() })
    }

    fn all(&self) -> Vec<Register> {
        self.sessions.lock().values().copied().collect()
    }
}

impl Witness for Registers {
    fn id(&self) -> WitnessId {
        WitnessId::new(self.name).unwrap()
    }

    fn open(&self, session: SessionId, _: &GuestIdentity) -> Result<Register, VmError> {
        self.sessions.lock().insert(session, Register::Open);
        Ok(Register::Open)
    }

    fn ask(
        &self,
        session: SessionId,
        request: Option<WitnessRequest>,
    ) -> Result<Register, VmError> {
        let mut sessions = self.sessions.lock();
        let register = sessions.entry(session).or_insert(Register::Unopened);
        if let Some(request) = request {
            *register = register.after(request);
        }
        if self.is_deaf { Err("it does not answer".into()) } else { Ok(*register) }
    }
}

fn with(source: Option<&Arc<Registers>>, destination: Option<&Arc<Registers>>) -> Scenario {
    let mut scenario = Scenario::new();
    scenario.source.witness = source.map(|witness| Arc::clone(witness) as Arc<dyn Witness>);
    scenario.destination.witness =
        destination.map(|witness| Arc::clone(witness) as Arc<dyn Witness>);
    scenario
}

#[test]
fn guest_is_claimed_at_the_witness() {
    let witness = Registers::new("w", false);
    let scenario = with(Some(&witness), Some(&witness));
    let (outcome, received) = scenario.run(running_guest(100), DestinationGuest::default(), |_| {});
    given(outcome);
    assert_eq!(witness.all(), [Register::Claimed]);
    owned(received).vm.guest.unwrap().pause();
    for session in journals(scenario.directory.path()) {
        assert_eq!(session.witness().map(WitnessId::as_str), Some("w"), "{session:?}");
    }
}

/// The claim is granted, and the answer is lost: the guest stays at the source all the same.
#[test]
fn guest_stays_if_the_witness_does_not_answer() {
    let witness = Registers::new("w", true);
    let mut scenario = with(Some(&witness), Some(&witness));
    scenario.destination.timeouts.claim = Duration::from_millis(400);
    let (outcome, received) = scenario.run(running_guest(100), DestinationGuest::default(), |_| {});
    let (vm, error) = kept(outcome);
    assert!(vm.guest.is_running());
    assert!(chain(&error).contains("the witness w did not answer"), "{}", chain(&error));
    assert_eq!(error.class(), ErrorClass::LinkLost);
    nothing(received);
    let sessions = journals(scenario.directory.path());
    let has = |wanted: fn(&Record) -> bool| {
        sessions.iter().any(|session| session.records.iter().any(wanted))
    };
    assert!(has(|record| matches!(record, Record::Aborted { .. })), "{sessions:?}");
    assert!(!has(|record| matches!(record, Record::RunIntent)), "{sessions:?}");
}

#[test]
fn hosts_with_different_witnesses_move_nothing() {
    let (a, b) = (Registers::new("a", false), Registers::new("b", false));
    for (source, destination) in [(Some(&a), Some(&b)), (Some(&a), None), (None, Some(&b))] {
        let scenario = with(source, destination);
        let (outcome, received) =
            scenario.run(running_guest(100), DestinationGuest::default(), |_| {});
        let (vm, error) = kept(outcome);
        assert!(vm.guest.is_running());
        assert!(error.to_string().contains("witness is"), "{error}");
        assert_eq!(error.class(), ErrorClass::Incompatible);
        nothing(received);
    }
    assert_eq!([a.all(), b.all()], [const { Vec::new() }; 2], "nobody was asked");
}

/// The destination's way to the witness: when it claims the guest, the link is cut for good.
#[derive(Debug)]
struct CutAtClaim {
    registers: Arc<Registers>,
    link: Link,
    /// Whether the claim reaches the witness.
    arrives: bool,
}

struct Link(Weak<Cutter>);

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Link")
    }
}

impl Witness for CutAtClaim {
    fn id(&self) -> WitnessId {
        self.registers.id()
    }

    fn open(&self, session: SessionId, guest: &GuestIdentity) -> Result<Register, VmError> {
        self.registers.open(session, guest)
    }

    fn ask(
        &self,
        session: SessionId,
        request: Option<WitnessRequest>,
    ) -> Result<Register, VmError> {
        let link = self.link.0.upgrade().expect("the test has it");
        link.cut_now(Channels::All, Duration::from_secs(3600));
        if self.arrives { self.registers.ask(session, request) } else { Err("cut off".into()) }
    }
}

/// A scenario whose link is cut for good when the destination claims the guest. The link must be
/// dropped before the scenario's directory.
fn cut_at_claim(registers: &Arc<Registers>, arrives: bool) -> (Scenario, Arc<Cutter>) {
    let mut scenario = with(Some(registers), None);
    let path = scenario.directory.path().join("link.sock");
    let cutter = Arc::new(Cutter::start(path, &scenario.listen_at, Vec::new()));
    scenario.dial = Some(cutter.address());
    let registers = Arc::clone(registers);
    let link = Link(Arc::downgrade(&cutter));
    scenario.destination.witness = Some(Arc::new(CutAtClaim { registers, link, arrives }));
    scenario.destination.timeouts.claim = Duration::from_millis(400);
    scenario.source.timeouts.take_back = Duration::from_millis(100);
    scenario.source.timeouts.ask = Duration::from_millis(100);
    (scenario, cutter)
}

#[test]
fn guest_is_taken_back_while_the_link_is_cut_for_good() {
    let registers = Registers::new("w", false);
    let (scenario, _link) = cut_at_claim(&registers, false);
    let (outcome, received) = scenario.run(running_guest(100), DestinationGuest::default(), |_| {});
    let (vm, _) = kept(outcome);
    assert!(vm.guest.is_running());
    nothing(received);
    assert_eq!(registers.all(), [Register::TakenBack]);
}

/// An agent at the destination's host tells the witness what the journal there says.
#[test]
fn guest_is_given_away_while_the_link_is_cut_for_good() {
    let registers = Registers::new("w", false);
    let (scenario, _link) = cut_at_claim(&registers, true);
    let session = scenario.source.session;
    let (outcome, received) = std::thread::scope(|scope| {
        scope.spawn(|| {
            let has_promised = || {
                let all = journals(scenario.directory.path());
                all.iter().any(|session| session.records.contains(&Record::RunIntent))
            };
            // Nothing tells an agent that a record was written.
            while !has_promised() {
                std::thread::sleep(Duration::from_millis(20));
            }
            let report = WitnessRequest::Report(SessionWord::Owns);
            registers.ask(session, Some(report)).unwrap();
        });
        scenario.run(running_guest(100), DestinationGuest::default(), |_| {})
    });
    given(outcome);
    owned(received).vm.guest.unwrap().pause();
    assert_eq!(registers.all(), [Register::Owns]);
}
