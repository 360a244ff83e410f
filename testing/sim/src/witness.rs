//! The simulated witness, and the requests to it: they are slow, their answers are lost, and each
//! host is cut off from it.

use std::time::Duration;

use vmferry_handover::{Register, VmError, WitnessId, WitnessRequest};

use crate::host::Host;
use crate::network::{Event, Network};
use crate::plan::{Fault, Sabotage};

/// A host that has no answer by then takes the request for failed.
const DEADLINE: Duration = Duration::from_secs(2);

/// The longest way of a request or an answer while the witness is slow.
const SLOW: Duration = Duration::from_secs(6);

/// The name of the witness.
#[must_use]
pub fn witness_id() -> WitnessId {
    WitnessId::new("simulated").expect("it is a name")
}

/// The witness of a schedule's session.
#[derive(Debug)]
pub struct Witness {
    /// The session's register; `None` if its data was lost.
    pub register: Option<Register>,
    /// For each host, until when it is cut off.
    cut_until: [Duration; 2],
    /// Requests of hosts that are cut off arrive, and their answers are lost.
    takes_requests: bool,
    slow_until: Duration,
    sabotage: Option<Sabotage>,
}

/// A request on its way to the witness.
#[derive(Clone, Copy, Debug)]
pub struct Asking {
    /// The host that asks.
    pub from: Host,
    /// The number of the process that asks; `None` for the host's agent.
    pub process: Option<u64>,
    /// The change that it asks for.
    request: Option<WitnessRequest>,
    /// How long the answer takes; `None` if it is lost.
    answered_in: Option<Duration>,
}

impl Witness {
    /// A witness that was not asked yet.
    #[must_use]
    pub fn new(sabotage: Option<Sabotage>) -> Self {
        Self {
            register: Some(Register::Unopened),
            cut_until: [Duration::ZERO; 2],
            takes_requests: false,
            slow_until: Duration::ZERO,
            sabotage,
        }
    }

    /// Opens the session's register, before the destination accepts the guest.
    pub fn open(&mut self) {
        self.register = self.register.map(|register| register.after(WitnessRequest::Open));
    }

    /// From when on both hosts reach it without delay.
    #[must_use]
    pub fn is_well_from(&self) -> Duration {
        self.cut_until[0].max(self.cut_until[1]).max(self.slow_until)
    }

    /// Applies a fault.
    pub fn strike(&mut self, now: Duration, fault: Fault) {
        match fault {
            Fault::WitnessCut { ways, lasts, answers_only, .. } => {
                self.takes_requests = answers_only;
                for host in [Host::Source, Host::Destination] {
                    if ways.cover(host) {
                        let until = &mut self.cut_until[host as usize];
                        *until = (*until).max(now + lasts);
                    }
                }
            }
            Fault::WitnessSlow { lasts, .. } => self.slow_until = self.slow_until.max(now + lasts),
            Fault::WitnessLost { .. } if self.sabotage == Some(Sabotage::TrustRestored) => {
                self.register = Some(Register::Open);
            }
            Fault::WitnessLost { .. } => self.register = None,
            _ => {}
        }
    }

    /// All faults end, except that what is lost stays lost.
    pub fn heal(&mut self) {
        (self.cut_until, self.slow_until) = ([Duration::ZERO; 2], Duration::ZERO);
    }
}

impl Network {
    /// A process of a host asks the witness, or its agent does.
    pub fn ask_witness(
        &mut self,
        from: Host,
        process: Option<u64>,
        request: Option<WitnessRequest>,
    ) {
        let [there, back] = [(); 2].map(|()| self.witness_delay());
        let now = self.now();
        let Some(witness) = &self.witness else { return };
        let (cut, takes) = (witness.cut_until[from as usize], witness.takes_requests);
        let is_in_time = now >= cut && there + back < DEADLINE;
        let answered_in = is_in_time.then_some(back);
        self.note(|| format!("{from:?}: asks the witness {request:?}"));
        if !is_in_time && let Some(process) = process {
            self.after(DEADLINE, answer(from, process, Err("no answer".into())));
        }
        if now >= cut || takes {
            let asking = Asking { from, process, request, answered_in };
            self.after(there, Event::Witness(asking));
        }
    }

    /// A request reaches the witness.
    pub fn witness_takes(&mut self, asking: Asking) {
        let Asking { from, process, request, answered_in } = asking;
        let Some(witness) = &mut self.witness else { return };
        if let (Some(register), Some(request)) = (&mut witness.register, request) {
            *register = register.after(request);
        }
        let (register, sabotage) = (witness.register, witness.sabotage);
        self.note(|| format!("witness: takes {request:?} of {from:?}, and has {register:?}"));
        let (Some(process), Some(answered_in)) = (process, answered_in) else { return };
        let result = match (register, sabotage) {
            (Some(Register::Claimed), Some(Sabotage::ClaimedIsOwns)) if from == Host::Source => {
                Ok(Register::Owns)
            }
            (Some(register), _) => Ok(register),
            (None, _) => Err("its data was lost".into()),
        };
        self.after(answered_in, answer(from, process, result));
    }

    fn witness_delay(&mut self) -> Duration {
        let is_slow = self.witness.as_ref().is_some_and(|witness| self.now() < witness.slow_until);
        if is_slow { SLOW.mul_f64(self.rng.f64()) } else { self.delay() }
    }
}

/// The event of an answer.
fn answer(to: Host, process: u64, result: Result<Register, VmError>) -> Event {
    match to {
        Host::Source => {
            Event::Source(process, vmferry::machine::source::io::Input::Register(result))
        }
        Host::Destination => {
            Event::Destination(process, vmferry::machine::destination::io::Input::Claimed(result))
        }
    }
}
