//! Simulated time and network. Channels are ordered streams, each with its own delay, until a fault
//! cuts, swallows, delays, repeats or damages their messages.

mod channel;
mod silence;

use std::collections::BTreeMap;
use std::time::Duration;

use fastrand::Rng;
use vmferry::MigrateError;
use vmferry::machine::{destination, source};
use vmferry_wire::ControlMessage;

use self::channel::{Channel, Message};
use self::silence::Silence;
use crate::dial::Dial;
use crate::host::Host;
use crate::plan::{Fault, Plan, Where};
use crate::witness::{Asking, Witness};

/// A channel's number.
pub type ChannelId = usize;

/// An event at a simulated time.
#[derive(Debug)]
pub enum Event {
    /// Bytes arrive at a host.
    Deliver {
        /// The channel.
        channel: ChannelId,
        /// The receiving host.
        to: Host,
        /// The bytes of one message.
        bytes: Vec<u8>,
    },
    /// A host notices that a channel has ended.
    Closed {
        /// The channel.
        channel: ChannelId,
        /// The host.
        at: Host,
    },
    /// An action of the source's process has a result. The number identifies the process.
    Source(u64, source::io::Input),
    /// An action of the destination's session has a result.
    Destination(u64, destination::io::Input),
    /// A process of the source dials the destination.
    Dial {
        /// The process.
        process: u64,
        /// The purpose of the attempt.
        dial: Dial,
    },
    /// The attempt has failed, if it is still waiting.
    DialFailed {
        /// The process.
        process: u64,
        /// The purpose of the attempt.
        dial: Dial,
        /// The reason.
        error: MigrateError,
    },
    /// A host receives a message that its peer was not allowed to send.
    Forged {
        /// The receiving host.
        to: Host,
        /// The message's number.
        number: u16,
    },
    /// A slow step of a host's process has ended. The number identifies the process.
    StepEnds(Host, u64),
    /// A host's process is in a slow step, and its other thread may send a keepalive.
    SignOfLife(Host, u64),
    /// A host's process dies.
    Crash(Host, Duration),
    /// It is started again.
    Restart(Host),
    /// The user cancels.
    Cancel(Host),
    /// An operator gives up the guest, which has died at the destination while it lacked pages.
    GiveUp,
    /// The guest at the destination crashes, if it lacks pages.
    GuestCrash,
    /// A request reaches the witness.
    Witness(Asking),
    /// An agent of the destination's host tells the witness what the journal there says.
    AgentReports,
    /// All faults end.
    Heal,
}

impl Event {
    /// The host whose process must listen for it.
    pub fn listener(&self) -> Option<Host> {
        match self {
            Self::Deliver { to: host, .. }
            | Self::Closed { at: host, .. }
            | Self::Forged { to: host, .. }
            | Self::Cancel(host) => Some(*host),
            Self::Source(..) | Self::DialFailed { .. } => Some(Host::Source),
            Self::Destination(..) => Some(Host::Destination),
            _ => None,
        }
    }
}

/// A cut that has happened.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// The time of the cut.
    pub at: Duration,
    /// By then the source has noticed it.
    pub noticed: Duration,
}

/// The time, the pending events, and the channels.
pub struct Network {
    now: Duration,
    events: BTreeMap<(Duration, u64), Event>,
    count: u64,
    channels: Vec<Channel>,
    silence: Option<Silence>,
    stranger_until: Duration,
    /// Until then no channel can be opened.
    away_until: Duration,
    /// Cuts that have happened.
    pub cuts: Vec<Cut>,
    faults: Vec<Fault>,
    /// Messages sent so far.
    pub messages: u64,
    /// Faults that have happened.
    pub struck: u64,
    /// The random generator for everything that is not in the plan.
    pub rng: Rng,
    /// The negotiated protocol version.
    pub protocol: u16,
    /// The session's witness.
    pub witness: Option<Witness>,
    /// The trace, if it was requested.
    pub trace: Option<Vec<String>>,
}

impl Network {
    /// A network without events at time 0.
    pub fn new(plan: &Plan, traced: bool) -> Self {
        Self {
            now: Duration::ZERO,
            events: BTreeMap::new(),
            count: 0,
            channels: Vec::new(),
            silence: None,
            stranger_until: Duration::ZERO,
            away_until: Duration::ZERO,
            cuts: Vec::new(),
            faults: plan.faults.clone(),
            messages: 0,
            struck: 0,
            rng: Rng::with_seed(plan.rng),
            protocol: plan.protocol,
            witness: plan.witness.then(|| Witness::new(plan.sabotage)),
            trace: traced.then(Vec::new),
        }
    }

    /// The simulated time.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Adds a line to the trace.
    pub fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>12.6} {}", self.now.as_secs_f64(), text()));
        }
    }

    /// Schedules an event after a delay.
    pub fn after(&mut self, delay: Duration, event: Event) {
        self.at(self.now + delay, event);
    }

    fn at(&mut self, time: Duration, event: Event) {
        self.count += 1;
        self.events.insert((time.max(self.now), self.count), event);
    }

    /// The time of the next event.
    pub fn next_time(&self) -> Option<Duration> {
        self.events.first_key_value().map(|((time, _), _)| *time)
    }

    /// The next event up to `limit`. Time advances to the event, or to `limit`.
    pub fn next(&mut self, limit: Option<Duration>) -> Option<Event> {
        match (self.next_time(), limit) {
            (Some(time), limit) if limit.is_none_or(|limit| time <= limit) => {
                let (_, event) = self.events.pop_first()?;
                self.now = self.now.max(time);
                Some(event)
            }
            (_, Some(limit)) => {
                self.now = self.now.max(limit);
                None
            }
            (_, None) => None,
        }
    }

    /// Whether an event's channel still carries it.
    pub fn carries(&self, channel: ChannelId, to: Host) -> bool {
        let channel = &self.channels[channel];
        !self.is_cut(channel) && !channel.closed[to as usize]
    }

    fn is_cut(&self, channel: &Channel) -> bool {
        channel.cut.is_some_and(|at| at < self.now)
    }

    /// Opens a channel. Both ends exist at once, even if they never receive anything from each
    /// other.
    pub fn open(&mut self) -> ChannelId {
        self.channels.push(Channel::default());
        self.channels.len() - 1
    }

    /// Sends a control message to a host, as [`send`](Self::send).
    pub fn say(&mut self, id: ChannelId, to: Host, message: &ControlMessage) -> bool {
        let mut bytes = Vec::new();
        message.encode(self.protocol, &mut bytes);
        self.send(id, to, message.name(), bytes)
    }

    /// Sends bytes to a host. Returns `false` if the sender knows that the channel has ended.
    pub fn send(&mut self, id: ChannelId, to: Host, what: &'static str, bytes: Vec<u8>) -> bool {
        let channel = &self.channels[id];
        if channel.cut.is_some_and(|at| at <= self.now)
            || channel.closed[to.peer() as usize]
            || channel.closed[to as usize]
        {
            return false;
        }
        let number = self.messages;
        self.messages += 1;
        self.note(|| format!("message {number} to {to:?}: {what}"));
        let fetches = matches!(what, "request" | "page");
        let mut message = Message { bytes, delay: self.delay(), copies: 1, cut: None, fetches };
        let strikes: Vec<Fault> =
            self.faults.iter().copied().filter(|fault| fault.message() == Some(number)).collect();
        for fault in strikes {
            self.strike(fault, &mut message);
        }
        self.put(id, to, message);
        true
    }

    /// Applies a fault to its message and to everything else that it affects.
    fn strike(&mut self, fault: Fault, message: &mut Message) {
        self.struck += 1;
        self.note(|| format!("FAULT {fault:?}"));
        match fault {
            Fault::Cut { place, all, away, .. } => {
                message.cut = Some((place, all));
                self.away_until = self.away_until.max(self.now + away);
            }
            Fault::Silence { ways, lasts, lost, .. } => {
                let before = self.silence.take();
                self.silence = Some(Silence::begin(self.now, lasts, (ways, lost), before));
            }
            Fault::Repeat { .. } => message.copies = 2,
            Fault::Delay { by, .. } => message.delay += by,
            Fault::Damage { bit, .. } => {
                let bits = message.bytes.len() as u32 * 8;
                let bit = bit % bits.max(1);
                if let Some(byte) = message.bytes.get_mut((bit / 8) as usize) {
                    *byte ^= 1 << (bit % 8);
                }
            }
            Fault::Crash { host, back_after, .. } => {
                self.after(Duration::ZERO, Event::Crash(host, back_after));
            }
            Fault::GuestCrash { .. } => self.after(Duration::ZERO, Event::GuestCrash),
            Fault::Cancel { host, .. } => self.after(Duration::ZERO, Event::Cancel(host)),
            Fault::Forge { to, number, .. } => {
                let delay = self.delay();
                self.after(delay, Event::Forged { to, number });
            }
            Fault::Stranger { lasts, .. } => self.stranger_until = self.now + lasts,
            Fault::WitnessCut { .. } | Fault::WitnessSlow { .. } | Fault::WitnessLost { .. } => {
                let now = self.now;
                if let Some(witness) = &mut self.witness {
                    witness.strike(now, fault);
                }
            }
            Fault::Write { .. } | Fault::Vm { .. } | Fault::Slow { .. } => {}
        }
    }

    fn put(&mut self, id: ChannelId, to: Host, message: Message) {
        let Message { mut bytes, delay, copies, cut, fetches } = message;
        if let Some((Where::Within, _)) = cut {
            bytes.truncate(bytes.len() / 2);
        }
        let mut arrives = (self.now + delay).max(self.channels[id].last[to as usize]);
        let swallowed = self.silenced(to);
        let loses = |silence: &Silence| silence.loses(fetches);
        if let Some(silence) = swallowed.filter(|silence| !loses(silence)) {
            arrives = arrives.max(silence.until + delay);
        }
        let lost = swallowed.is_some_and(loses)
            || matches!(cut, Some((Where::Before, _)))
            || self.channels[id].cut.is_some_and(|at| at < arrives);
        self.channels[id].last[to as usize] = arrives;
        if !lost {
            for _ in 0..copies {
                self.at(arrives, Event::Deliver { channel: id, to, bytes: bytes.clone() });
            }
        }
        match cut {
            Some((Where::Before, all)) => self.cut(id, all, self.now),
            // What arrives before the end is still delivered.
            Some((_, all)) => self.cut(id, all, arrives),
            None => {}
        }
    }

    fn cut(&mut self, id: ChannelId, all: bool, when: Duration) {
        let cut: Vec<ChannelId> = if all { (0..self.channels.len()).collect() } else { vec![id] };
        let mut noticed = when;
        for channel in cut {
            let ends: Vec<Host> = [Host::Source, Host::Destination]
                .into_iter()
                .filter(|end| !self.channels[channel].closed[*end as usize])
                .collect();
            let at = if channel == id { when } else { self.now };
            if let Some(cut) = &mut self.channels[channel].cut {
                // Nothing arrives after a message that is lost.
                *cut = at.min(*cut);
                continue;
            }
            if ends.is_empty() {
                continue;
            }
            self.channels[channel].cut = Some(at);
            for at in ends {
                let notices = when + self.delay();
                noticed = noticed.max(notices);
                self.at(notices, Event::Closed { channel, at });
            }
        }
        self.cuts.push(Cut { at: self.now, noticed });
    }

    /// A host closes its end: the bytes it sent before still arrive, and then the end.
    pub fn close(&mut self, id: ChannelId, by: Host) {
        let to = by.peer();
        if std::mem::replace(&mut self.channels[id].closed[by as usize], true)
            || self.channels[id].cut.is_some()
        {
            return;
        }
        let lost = self.silenced(to).is_some_and(|silence| silence.lost);
        if !lost {
            let held = self.silenced(to).map_or(Duration::ZERO, |silence| silence.until);
            let delay = self.delay();
            let arrives = (self.now + delay).max(self.channels[id].last[to as usize]).max(held);
            self.at(arrives, Event::Closed { channel: id, at: to });
        }
    }

    fn silenced(&self, to: Host) -> Option<&Silence> {
        self.silence.as_ref().filter(|silence| silence.covers(to, self.now))
    }

    /// Whether a new connection can be opened; an unanswered attempt ends by its timeout.
    pub fn reaches(&self) -> bool {
        self.silenced(Host::Source).is_none() && self.silenced(Host::Destination).is_none()
    }

    /// Whether every connection is refused at once.
    pub fn is_away(&self) -> bool {
        self.now < self.away_until
    }

    /// Whether another host answers at the destination's address now.
    pub fn is_stranger(&self) -> bool {
        self.now < self.stranger_until
    }

    /// All faults end.
    pub fn heal(&mut self) {
        self.faults.clear();
        self.silence = None;
        self.stranger_until = Duration::ZERO;
        self.away_until = Duration::ZERO;
        if let Some(witness) = &mut self.witness {
            witness.heal();
        }
    }

    /// A random network delay.
    pub fn delay(&mut self) -> Duration {
        Duration::from_micros(if self.rng.u32(..20) == 0 {
            self.rng.u64(1_000..200_000)
        } else {
            self.rng.u64(50..1_000)
        })
    }
}
