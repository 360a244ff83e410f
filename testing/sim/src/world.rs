//! Runs a schedule from its start until no event is left.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use vmferry::config::{ChannelCount, PostCopy, RoundLimit, WhenStuck};
use vmferry::machine::{destination, source};
use vmferry::{SourceConfig, Timeouts};
use vmferry_handover::journal::Side;
use vmferry_handover::{DestinationState, SessionWord, WitnessRequest};
use vmferry_wire::SessionId;

use crate::destination_host::DestinationHost;
use crate::disk::Disk;
use crate::guest::{Fetched, Guest, Ledger};
use crate::host::Host;
use crate::network::{Event, Network};
use crate::plan::{Fault, Plan, Sabotage, VmCall};
use crate::source_host::{SourceEnd, SourceHost};

/// When all faults end: long after the last one has begun.
const HEAL_AT: Duration = Duration::from_secs(600);

/// From then on everything must be decided within this time: the longest chain of bounded waits.
const SETTLED_AFTER: Duration = Duration::from_secs(300);

/// How long after the guest's death an operator gives it up.
const GIVE_UP_AFTER: Duration = Duration::from_secs(20);

/// How long doubt may last once both hosts reach the witness.
const DECIDED_WITHIN: Duration = Duration::from_secs(15);

/// How often an agent looks at the journals of its host.
const AGENT_LOOKS: Duration = Duration::from_secs(2);

/// Longer than any schedule.
const NEVER: Duration = Duration::from_secs(3600);

/// More events than any schedule has; a schedule that exceeds it loops.
const MAX_EVENTS: u64 = 50_000;

/// The outcome of a schedule.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Where the guest is in the end.
    pub end: SourceEnd,
    /// Whether the source was in doubt at any time.
    pub was_in_doubt: bool,
    /// Whether the guest crashed with the destination's process.
    pub crashed_there: bool,
    /// Faults that happened.
    pub struck: u64,
    /// Messages that were sent.
    pub messages: u64,
    /// Cuts that happened.
    pub cuts: u64,
    /// How often the source reported that it was connected.
    pub connected: u64,
    /// Channels that were reconnected.
    pub restored: u64,
    /// How often a paused guest was resumed because of a lost link.
    pub recalls: u64,
    /// Frames that were sent again.
    pub resent: u64,
    /// Whether the guest ever ran at the destination and lacked pages.
    pub fetching: bool,
    /// Cuts that happened then.
    pub fetching_cuts: u64,
    /// How often a restarted destination took over a guest that lacked pages.
    pub taken_over: u64,
    /// How often a restarted source had to serve pages.
    pub served_again: u64,
    /// Whether an operator gave up the guest, because it died while it lacked pages.
    pub given_up: bool,
    /// What it has fetched.
    pub fetched: Fetched,
    /// Whether the link was the only fault, and never for too long: the guest must be handed over.
    pub must_be_given: bool,
    /// The simulated time until everything was decided.
    pub took: Duration,
    /// The violations of the promises; empty if there are none.
    pub violations: Vec<String>,
    /// The trace, if it was requested.
    pub trace: Vec<String>,
}

/// Runs a schedule. `traced` keeps a trace.
#[must_use]
pub fn run(plan: &Plan, traced: bool) -> Outcome {
    World::new(plan, traced).run()
}

struct World {
    network: Network,
    source: SourceHost,
    destination: DestinationHost,
    ledger: Arc<Mutex<Ledger>>,
    write_faults: u64,
    mild: bool,
    outlives: bool,
    /// The only fault is one slow step, and the source must not give up because of it.
    slow: bool,
    /// The guest was seen to be paused while the link was down.
    waited: bool,
    /// The guest was seen to run at the destination while it lacked pages.
    fetching: bool,
    /// Cuts that happened then.
    fetching_cuts: u64,
    /// The guest died while it lacked pages, and an operator has given it up.
    given_up: bool,
    /// The guest has crashed at the destination while it lacked pages.
    crashed_lacking: bool,
    /// The source has freed them before an operator said so.
    freed_early: bool,
    /// Doubt must end soon after both hosts reach the witness.
    decided_soon: bool,
    /// Since when the source is in doubt.
    doubt_since: Option<Duration>,
    /// The destination's agent will look at its journals.
    agent_looks: bool,
}

impl World {
    fn new(plan: &Plan, traced: bool) -> Self {
        let mut network = Network::new(plan, traced);
        let ledger = Arc::new(Mutex::new(Ledger::default()));
        let session = SessionId(*b"a simulated one!");
        let mut config = SourceConfig::new("simulated".into());
        config.session = session;
        config.channels = ChannelCount::new(plan.lanes).expect("plans are in range");
        config.verify = plan.verify;
        // Never reached, so that every schedule of a kind has the same rounds.
        config.downtime_limit = Duration::from_nanos(1);
        config.max_rounds = RoundLimit::new(plan.rounds).expect("plans are in range");
        config.when_stuck = WhenStuck::SwitchOver;
        if plan.post_copy {
            config.when_stuck = WhenStuck::PostCopy;
            config.downtime_abort = Some(NEVER);
            // After all rounds, or after the first one.
            config.post_copy = if plan.rounds > 1 { PostCopy::Never } else { PostCopy::Now };
        }
        config.timeouts = Timeouts {
            verify: Duration::from_secs(60),
            reconnect: plan.reconnect,
            ..Timeouts::default()
        };
        let timeouts = config.timeouts;
        let here = Guest::running(&ledger, &mut network.rng);
        if plan.quiet {
            here.be_quiet();
        }
        let there = Guest::absent(Host::Destination, &ledger);
        if plan.protocol > 1 {
            // In version 1 memories are compared after that.
            there.load_writes();
        }
        let disks = [Disk::new(Side::Source), Disk::new(Side::Destination)];
        for fault in &plan.faults {
            match *fault {
                Fault::Write { host, number, how, crash } => {
                    disks[host as usize].fail(number, how, crash);
                }
                Fault::Vm {
                    call: call @ (VmCall::Pause | VmCall::Save | VmCall::Resume | VmCall::Compress),
                } => {
                    here.fail(call);
                }
                Fault::Vm { call } => there.fail(call),
                _ => {}
            }
        }
        match plan.sabotage {
            Some(Sabotage::ForgetPages) => here.forget_pages(),
            Some(Sabotage::LyingDisk) => disks[Host::Destination as usize].lie(),
            _ => {}
        }
        let control = network.open();
        let [disk_here, disk_there] = disks;
        let mut destination =
            DestinationHost::new(there, disk_there, session, timeouts, control, plan, &mut network);
        let mut source = SourceHost::new(here, disk_here, config, control, plan.sabotage, &network);
        for fault in &plan.faults {
            if let Fault::Slow { step, takes } = *fault {
                match step.host() {
                    Host::Source => source.absence.slow_down(step, takes),
                    Host::Destination => destination.absence.slow_down(step, takes),
                }
            }
        }
        let write_faults =
            plan.faults.iter().filter(|fault| fault.message().is_none()).count() as u64;
        let (mild, slow) = (plan.is_mild(), plan.is_borne());
        Self {
            network,
            source,
            destination,
            ledger,
            write_faults,
            mild,
            slow,
            outlives: plan.outlives,
            waited: false,
            fetching: false,
            fetching_cuts: 0,
            given_up: false,
            crashed_lacking: false,
            freed_early: false,
            decided_soon: plan.is_decided_soon(),
            doubt_since: None,
            agent_looks: false,
        }
    }

    fn run(mut self) -> Outcome {
        self.network.after(HEAL_AT, Event::Heal);
        self.source.tell(source::io::Input::Tick, &mut self.network);
        let mut settled = None;
        for event in 0.. {
            self.destination.pump(&mut self.network);
            self.check_pause();
            self.check_remains();
            self.check_doubt();
            if !self.agent_looks && self.word_to_report().is_some() {
                self.agent_looks = true;
                self.network.after(AGENT_LOOKS, Event::AgentReports);
            }
            self.work();
            self.destination.request_faults(&mut self.network);
            let rest = !self.source.is_busy() && !self.destination.is_busy();
            let decided = rest && self.source.ended.is_some() && self.destination.listens();
            if decided && settled.is_none() {
                settled = Some(self.network.now());
            }
            if decided && self.network.next_time().is_none_or(|next| next > HEAL_AT) {
                break;
            }
            if self.network.now() > HEAL_AT + SETTLED_AFTER || event > MAX_EVENTS {
                let text = format!(
                    "nothing is decided after {:?} and {event} events: the source is in {}, the \
                     destination in {}",
                    self.network.now(),
                    self.source.phase(),
                    self.destination.phase()
                );
                self.violation(text);
                break;
            }
            let fetching = self.destination.guest.is_fetching();
            self.fetching |= fetching;
            let cuts = self.network.cuts.len() as u64;
            let ticks = [self.source.next_tick(), self.destination.next_tick()];
            let tick = ticks.into_iter().flatten().min();
            match self.network.next(tick) {
                Some(event) => self.happens(event),
                None if tick.is_some() => {
                    self.source.tell(source::io::Input::Tick, &mut self.network);
                    self.destination.tell(destination::io::Input::Tick, &mut self.network);
                }
                None if decided => break,
                None => {
                    self.violation("no event is left, and nothing is decided".into());
                    break;
                }
            }
            if fetching {
                self.fetching_cuts += self.network.cuts.len() as u64 - cuts;
            }
        }
        self.end(settled)
    }

    /// Lets the running guests write.
    fn work(&mut self) {
        for guest in [&self.source.guest, &self.destination.guest] {
            let writes = self.network.rng.usize(..3);
            guest.work(&mut self.network.rng, writes);
        }
    }

    fn happens(&mut self, event: Event) {
        let event = match event.listener() {
            Some(Host::Source) => self.source.absence.keep(event),
            Some(Host::Destination) => self.destination.absence.keep(event),
            None => Some(event),
        };
        let Some(event) = event else { return };
        let network = &mut self.network;
        match event {
            Event::Deliver { channel, to, bytes } if network.carries(channel, to) => match to {
                Host::Source => self.source.deliver(channel, &bytes, network),
                Host::Destination if self.destination.listens() => {
                    self.destination.deliver(channel, &bytes, network);
                }
                Host::Destination => network.close(channel, Host::Destination),
            },
            Event::Deliver { .. } => {}
            Event::Closed { channel, at: Host::Source } => self.source.closed(channel, network),
            Event::Closed { channel, at: Host::Destination } => {
                self.destination.closed(channel, network);
            }
            Event::Source(process, input) => self.source.input(process, input, network),
            Event::Destination(process, input) => self.destination.input(process, input, network),
            Event::Dial { process, dial } => {
                self.source.dial(process, dial, self.destination.listens(), network);
            }
            Event::DialFailed { process, dial, error } => {
                self.source.dial_failed(process, dial, error, network);
            }
            Event::Forged { to: Host::Source, number } => self.source.forged(number, network),
            Event::Forged { to: Host::Destination, number } => {
                self.destination.forged(number, network);
            }
            Event::Crash(host, back_after) => {
                network.note(|| format!("{host:?}: crashes"));
                network.after(back_after, Event::Restart(host));
                match host {
                    Host::Source => self.source.crash(network),
                    Host::Destination => self.destination.crash(network),
                }
            }
            Event::Restart(Host::Source) => self.source.restart(network),
            Event::Restart(Host::Destination) => {
                self.destination.restart(network);
                if self.destination.lost_the_guest() && !self.crashed_lacking {
                    self.crashed_lacking = true;
                    network.after(GIVE_UP_AFTER, Event::GiveUp);
                }
            }
            Event::GuestCrash => {
                if self.destination.guest_crashes(network) {
                    self.crashed_lacking = true;
                    network.after(GIVE_UP_AFTER, Event::GiveUp);
                }
            }
            Event::GiveUp if self.source.ended.is_none() => {
                self.given_up = true;
                self.source.tell(source::io::Input::GiveUp, network);
                // The source's process may be dead, or may not know yet where the guest is.
                network.after(GIVE_UP_AFTER, Event::GiveUp);
            }
            Event::GiveUp => {}
            Event::Cancel(Host::Source) => {
                self.source.tell(source::io::Input::Cancel, network);
            }
            Event::Cancel(Host::Destination) => {
                self.destination.tell(destination::io::Input::Cancel, network);
            }
            Event::StepEnds(host, process) => {
                let heard = match host {
                    Host::Source => self.source.step_ended(process, network),
                    Host::Destination => self.destination.step_ended(process, network),
                };
                heard.into_iter().for_each(|event| self.happens(event));
            }
            Event::SignOfLife(Host::Source, process) => {
                self.source.sign_of_life(process, network);
            }
            Event::SignOfLife(Host::Destination, process) => {
                self.destination.sign_of_life(process, network);
            }
            Event::Witness(asking) => network.witness_takes(asking),
            Event::AgentReports => {
                self.agent_looks = false;
                if let Some(word) = self.word_to_report() {
                    let request = Some(WitnessRequest::Report(word));
                    self.network.ask_witness(Host::Destination, None, request);
                }
            }
            Event::Heal => network.heal(),
        }
    }

    /// What the destination's journal says and the witness does not know yet.
    fn word_to_report(&self) -> Option<SessionWord> {
        let register = self.network.witness.as_ref()?.register?;
        let word = self.destination.recovered()?.word();
        (register.after(WitnessRequest::Report(word)) != register).then_some(word)
    }

    /// Once both hosts reach the witness, doubt ends soon.
    fn check_doubt(&mut self) {
        let Some(witness) = self.network.witness.as_ref().filter(|_| self.decided_soon) else {
            return;
        };
        let (now, well) = (self.network.now(), witness.is_well_from());
        if !self.source.is_in_doubt() {
            self.doubt_since = None;
            return;
        }
        let since = (*self.doubt_since.get_or_insert(now)).max(well);
        if now > since + DECIDED_WITHIN {
            self.decided_soon = false;
            self.violation("the witness was there, and the doubt did not end".into());
        }
    }

    /// A guest that belongs to the source is never paused for a link that is known to be down.
    fn check_pause(&mut self) {
        if self.source.lets_the_guest_wait() && !std::mem::replace(&mut self.waited, true) {
            self.violation("the guest waits for a link that is down".into());
        }
    }

    /// What a crashed guest lacked is freed by an operator only.
    fn check_remains(&mut self) {
        let is_freed = self.source.ended == Some(SourceEnd::Given);
        if self.crashed_lacking
            && is_freed
            && !self.given_up
            && !std::mem::replace(&mut self.freed_early, true)
        {
            self.violation("the source frees what a crashed guest lacked".into());
        }
    }

    /// Whether the link was the only fault, was down for less than the source's reconnect timeout,
    /// and was down only while lost messages can be sent again: from the start of the dirty log
    /// until the destination is READY. The destination can't undo that it has loaded the state, so
    /// a loss that the source has not noticed, or has not reported to the destination, before READY
    /// is too late.
    fn must_be_given(&self) -> bool {
        let cuts = &self.network.cuts;
        let begun = |at: Duration| self.source.links.begun.is_some_and(|begun| begun < at);
        let noticed = cuts.iter().map(|cut| cut.noticed).max().unwrap_or_default();
        let links = &self.source.links;
        let whole = if links.away.is_empty() { links.whole_since } else { Duration::MAX };
        let settled = noticed.max(whole).max(self.destination.withdrawn_at);
        // A doubt in which the witness has given the guest back does not count.
        let taken_back =
            self.network.witness.as_ref().is_some_and(|witness| {
                witness.register == Some(vmferry_handover::Register::TakenBack)
            });
        self.mild
            && !taken_back
            && cuts.iter().all(|cut| begun(cut.at))
            && self.destination.ready_at.is_none_or(|ready| ready > settled)
    }

    fn violation(&self, text: String) {
        self.ledger.lock().violations.push(text);
    }

    fn end(mut self, settled: Option<Duration>) -> Outcome {
        self.source.guest.check();
        // A guest that was still arriving when its receiver died does not count.
        if self.destination.guest.is_running() || self.destination.guest.waits() {
            self.destination.guest.check();
        }
        let gone = self.given_up && self.destination.lost_the_guest();
        let owned = [DestinationState::Owns, DestinationState::Ended];
        let owns = gone || self.destination.recovered().is_some_and(|it| owned.contains(&it));
        let here = self.source.guest.is_running();
        if here == owns {
            let who = if here { "both hosts have the guest" } else { "no host has the guest" };
            self.violation(format!("in the end {who}"));
        }
        let end = if owns { SourceEnd::Given } else { SourceEnd::Kept };
        if self.source.ended.is_some_and(|ended| ended != end) {
            self.violation(format!("the source says {:?}, and it is {end:?}", self.source.ended));
        }
        let must_be_given = self.must_be_given();
        if must_be_given && end != SourceEnd::Given {
            self.violation(
                "the link was down for a while, and the guest was not handed over".into(),
            );
        }
        if self.outlives && owns && self.destination.guest.waits() {
            self.violation("the guest outlived its receiver, and no host ran it".into());
        }
        if !owns && self.destination.guest.waits() {
            self.violation("a guest that never runs is left at the destination".into());
        }
        if self.slow && (self.source.doubted_silence || self.source.links.restored > 0) {
            self.violation("a host in a slow step was treated as lost".into());
        }
        if self.source.links.connected > 1 || self.source.links.ready_unconnected {
            let times = self.source.links.connected;
            self.violation(format!("the source reported {times} times that it was connected"));
        }
        let crashed_there = owns && !self.destination.guest.is_running();
        let violations = std::mem::take(&mut self.ledger.lock().violations);
        Outcome {
            end,
            was_in_doubt: self.source.was_in_doubt,
            crashed_there,
            struck: self.network.struck + self.write_faults,
            messages: self.network.messages,
            cuts: self.network.cuts.len() as u64,
            connected: self.source.links.connected,
            restored: self.source.links.restored,
            recalls: self.source.links.recalls,
            resent: self.source.links.resent,
            fetching: self.fetching,
            fetching_cuts: self.fetching_cuts,
            taken_over: self.destination.taken_over,
            served_again: self.source.served_again,
            given_up: self.given_up,
            fetched: self.ledger.lock().fetched,
            must_be_given,
            took: settled.unwrap_or(self.network.now()),
            violations,
            trace: self.network.trace.take().unwrap_or_default(),
        }
    }
}
