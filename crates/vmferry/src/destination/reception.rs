//! The open door: who comes waits in a room until it speaks, is authenticated and greeted by one of a few
//! threads, and arrives at the engine by its role.
//!
//! ```text
//! listener --accept--> room (silent, 128) --doorman--> greeting (18 threads) --arrivals--> session
//!                                                          ^                                  |
//!                                                          +------- refused arrivals ---------+
//! ```
//! For a peer that has not begun to speak there is a socket and nothing else. One that is slow, or of an
//! address that has many, makes room for others. So neither silence nor slowness nor a crowd keeps an honest
//! source out, and nothing of it reaches the threads of a migration that is under way but a bounded queue.

mod complaints;
mod room;

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vmferry_transport::{ChannelCloser, Listener, ListenerCloser, Pending};

use self::complaints::Complaints;
use self::room::{Origin, Room, Waiting, most};
use super::arrivals::{Arrival, Probes, receive_greeting};
use super::receive::Notice;
use crate::config::DestinationConfig;
use crate::error::{MigrateError, chain};
use crate::policy::Admission;
use crate::probe::Gate;

/// Connections that may be silent at the same time. A source's channels speak at once, so that an honest one
/// is hardly ever among them.
const SEATS: usize = 128;

/// Connections that may be in their handshake and greeting at the same time: the channels of one
/// migration, so that it need not wait for itself, and at 0.6 MB of buffers each no more than 11
/// MB. They keep their places until the engine has taken them, or they are turned away.
const MAX_GREETING: usize = 18;

/// Greeted connections and notices that the engine has not taken yet.
const MAX_ARRIVED: usize = 64;

/// After so long a handshake may be ended for another connection that is ready to speak. A good one takes two
/// round trips and some milliseconds of work.
const GRACE: Duration = Duration::from_secs(1);

/// Failures to accept in a row, 100 ms apart, after which the door is given up.
const MAX_ACCEPT_FAILURES: u32 = 600;

/// The open door.
pub struct Reception {
    /// Who has come.
    pub arrivals: Receiver<Arrival>,
    closer: ListenerCloser,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// Wakes the doorman.
    bell: OwnedFd,
    policy: Option<Arc<dyn Admission>>,
    versions: RangeInclusive<u16>,
    patience: Duration,
    probes: Probes,
}

struct State {
    room: Room<Arc<Pending>>,
    greeting: Vec<Greeting>,
    next_number: u64,
    complaints: Complaints,
    /// None once nobody can come any more.
    arrivals: Option<Sender<Arrival>>,
    closed: bool,
}

/// A connection in its handshake and greeting.
struct Greeting {
    number: u64,
    origin: Origin,
    since: Instant,
    closer: ChannelCloser,
    /// It is being closed for taking too long, and why.
    cut: Option<&'static str>,
    /// It is greeted, and waits for the engine.
    done: bool,
}

impl Reception {
    /// Opens the door.
    ///
    /// # Errors
    /// If the system has no thread or descriptor left.
    pub fn open(listener: Listener, config: &DestinationConfig) -> std::io::Result<Self> {
        let (sender, arrivals) = crossbeam_channel::bounded(MAX_ARRIVED);
        let closer = listener.closer();
        let state = State {
            room: Room::new(SEATS),
            greeting: Vec::with_capacity(MAX_GREETING),
            next_number: 0,
            complaints: Complaints::default(),
            arrivals: Some(sender),
            closed: false,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            policy: config.policy.clone(),
            versions: config.protocol.clone(),
            patience: config.greeting_timeout,
            probes: Probes { gate: Gate::default(), host: config.host.clone() },
        });
        // What is begun already is ended when this is dropped.
        let mut reception = Self { arrivals, closer, shared, threads: Vec::new() };
        let shared = Arc::clone(&reception.shared);
        let doorman = move || shared.serve_room();
        let thread = std::thread::Builder::new().name("doorman".into()).spawn(doorman)?;
        reception.threads.push(thread);
        let shared = Arc::clone(&reception.shared);
        let accept = move || shared.accept(&listener);
        let thread = std::thread::Builder::new().name("accept".into()).spawn(accept)?;
        reception.threads.push(thread);
        Ok(reception)
    }

    /// Tells that the engine has turned somebody away: like all that is said of those who come, a line for each
    /// address and second, which arrives as [`Arrival::TurnedAway`].
    pub fn tell_of(&self, notice: &Notice) {
        let Notice::TurnedAway { peer, reason } = notice else { return };
        let address = peer.parse::<SocketAddr>().ok().map(|address| address.ip());
        self.shared.complain(Origin::of(address), peer.clone(), reason.clone());
    }
}

impl Drop for Reception {
    fn drop(&mut self) {
        self.closer.close();
        let mut state = self.shared.state();
        state.closed = true;
        for greeting in &state.greeting {
            greeting.closer.close();
        }
        drop(state);
        self.shared.ring();
        for thread in self.threads.drain(..) {
            // A panic there has closed the door already.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        // Adding to a counter fails only when it is full, and so has rung.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Tells that somebody was turned away, now or with others of its address.
    fn complain(&self, origin: Origin, peer: String, reason: String) {
        let notice = self.state().complaints.note(origin, peer, reason, Instant::now());
        match notice {
            Some(notice) => self.tell(notice),
            None => self.ring(),
        }
    }

    fn tell(&self, notice: Notice) {
        // Where the engine has not taken what arrived before, one line less is the least evil.
        if let Some(arrivals) = &self.state().arrivals {
            let _ = arrivals.try_send(Arrival::TurnedAway(notice));
        }
    }

    fn accept(&self, listener: &Listener) {
        let mut failures = 0;
        loop {
            match listener.accept() {
                Ok(Some(pending)) => {
                    failures = 0;
                    self.let_in(pending);
                }
                Ok(None) => break,
                Err(error) => {
                    let peer = "the listening socket".to_owned();
                    self.complain(Origin::of(None), peer, chain(&error));
                    failures += 1;
                    if failures > MAX_ACCEPT_FAILURES {
                        break;
                    }
                    // Out of descriptors, most likely: accepting again at once would spin.
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
        // Without a listener there is nobody to wait for, which the engine hears when the last of those who
        // have come has arrived.
        let mut state = self.state();
        state.closed = true;
        state.arrivals = None;
        drop(state);
        self.ring();
    }

    fn let_in(&self, pending: Pending) {
        let origin = Origin::of(pending.peer_ip());
        let displaced = self.state().room.enter(origin, Instant::now(), Arc::new(pending));
        self.ring();
        if let Some(Waiting { origin, guest, .. }) = displaced {
            let reason = format!(
                "it said nothing, and {SEATS} connections wait already, most of them from its address"
            );
            self.complain(origin, guest.peer_address(), reason);
        }
    }

    /// Calls those who speak, and sends those away who don't or who take too long.
    fn serve_room(self: &Arc<Self>) {
        loop {
            let (call, silent, due, wake) = {
                let now = Instant::now();
                let mut state = self.state();
                if state.closed {
                    // Whoever waits is closed with the room.
                    state.room = Room::new(0);
                    return;
                }
                let silent = state.room.expire(now, self.patience);
                let due = state.complaints.due(now);
                let call = state.serve(now, self.patience);
                (call, silent, due, state.next_wake(now, self.patience))
            };
            for Waiting { origin, guest, .. } in silent {
                let text = format!("it said nothing for {} s", self.patience.as_secs_f64());
                self.complain(origin, guest.peer_address(), text);
            }
            due.into_iter().for_each(|notice| self.tell(notice));
            match call {
                Some((number, origin, pending)) => self.greet(number, origin, pending),
                None => self.wait(wake),
            }
        }
    }

    /// Waits until somebody speaks who could be called, or something else is to be done.
    fn wait(&self, wake: Option<Instant>) {
        let sockets: Vec<Arc<Pending>> = {
            let state = self.state();
            // Somebody who can't be called would wake this thread again and again. Whoever makes a place rings.
            match state.has_place() || state.victim(Instant::now()).is_some() {
                true => state.room.waiting().iter().map(|w| Arc::clone(&w.guest)).collect(),
                false => Vec::new(),
            }
        };
        let mut polled = Vec::with_capacity(sockets.len() + 1);
        polled.push(PollFd::new(&self.bell, PollFlags::IN));
        polled.extend(sockets.iter().map(|socket| PollFd::new(&**socket, PollFlags::IN)));
        let timeout = wake.map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            // Rounded up, or the last moment would be waited for in vain many times.
            Timespec::try_from(left + Duration::from_millis(1)).unwrap_or_default()
        });
        // Interrupted or not: everything is looked at again.
        let _ = poll(&mut polled, timeout.as_ref());
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }

    /// Authenticates and greets in a thread of its own.
    fn greet(self: &Arc<Self>, number: u64, origin: Origin, pending: Pending) {
        let peer = pending.peer_address();
        let (shared, name) = (Arc::clone(self), peer.clone());
        let spawned = std::thread::Builder::new().name("greet".into()).spawn(move || {
            let policy = shared.policy.as_deref();
            let (patience, versions) = (shared.patience, &shared.versions);
            let greeted = receive_greeting(pending, patience, versions, policy, &shared.probes);
            shared.finish(number, origin, name, greeted);
        });
        if let Err(error) = spawned {
            self.state().greeting.retain(|greeting| greeting.number != number);
            self.complain(origin, peer, format!("there is no thread for it: {error}"));
        }
    }

    fn finish(
        &self,
        number: u64,
        origin: Origin,
        peer: String,
        greeted: Result<Option<Arrival>, MigrateError>,
    ) {
        let cut = {
            let mut state = self.state();
            state.greeting_of(number).and_then(|greeting| {
                greeting.done = true;
                greeting.cut
            })
        };
        match (greeted, cut) {
            (Ok(None), None) => {}
            (Ok(Some(mut arrival)), None) => {
                // Waits while the engine is at something else, and keeps its place meanwhile.
                let (back, given_back) = crossbeam_channel::bounded(1);
                arrival.give_back_to(back);
                let arrivals = self.state().arrivals.clone();
                if let Some(arrivals) = arrivals {
                    let _ = arrivals.send(arrival);
                }
                if let Ok((connection, words)) = given_back.recv() {
                    // From now on it takes a place that others may need.
                    if let Some(greeting) = self.state().greeting_of(number) {
                        (greeting.done, greeting.since) = (false, Instant::now());
                    }
                    self.ring();
                    // A peer that does not wait for the answer loses nothing.
                    let _ = connection.dismiss(&words, self.patience);
                }
            }
            (_, Some(why)) => self.complain(origin, peer, why.to_owned()),
            (Err(error), None) => self.complain(origin, peer, chain(&error)),
        }
        self.state().greeting.retain(|greeting| greeting.number != number);
        self.ring();
    }
}

impl State {
    fn greeting_of(&mut self, number: u64) -> Option<&mut Greeting> {
        self.greeting.iter_mut().find(|greeting| greeting.number == number)
    }

    /// Ends greetings that take too long, and takes somebody out of the room who has begun to speak, if there
    /// is a place for it.
    fn serve(&mut self, now: Instant, patience: Duration) -> Option<(u64, Origin, Pending)> {
        for greeting in &mut self.greeting {
            if now.saturating_duration_since(greeting.since) >= patience {
                greeting.cut("its handshake and greeting took too long");
            }
        }
        let speaking = speaking(self.room.waiting());
        if !self.has_place() {
            if speaking.contains(&true)
                && let Some(victim) = self.victim(now)
            {
                self.greeting[victim]
                    .cut("its handshake and greeting took long, and others waited");
            }
            return None;
        }
        let greeting = &self.greeting;
        let busy = |origin| greeting.iter().filter(|greeting| greeting.origin == origin).count();
        let Waiting { origin, guest, .. } = self.room.call(&speaking, busy)?;
        // Only the thread that is here holds others of it, and not now.
        let pending = Arc::into_inner(guest)?;
        let number = self.next_number;
        self.next_number += 1;
        let closer = pending.closer();
        let fresh = Greeting { number, origin, since: now, closer, cut: None, done: false };
        self.greeting.push(fresh);
        Some((number, origin, pending))
    }

    fn has_place(&self) -> bool {
        self.greeting.len() < MAX_GREETING
    }

    /// Whose handshake is ended first if there must be a place: the oldest of the address that has most.
    fn next_victim(&self) -> Option<usize> {
        // One that is being ended makes a place already.
        if self.greeting.iter().any(|greeting| greeting.cut.is_some()) {
            return None;
        }
        let open = self.greeting.iter().filter(|greeting| !greeting.done);
        let crowd = most(open.map(|greeting| greeting.origin))?;
        self.greeting.iter().position(|greeting| !greeting.done && greeting.origin == crowd)
    }

    /// The same, if it has had its time.
    fn victim(&self, now: Instant) -> Option<usize> {
        let victim = self.next_victim()?;
        let age = now.saturating_duration_since(self.greeting[victim].since);
        (age >= GRACE).then_some(victim)
    }

    /// When there is something to do though nothing happens.
    fn next_wake(&self, now: Instant, patience: Duration) -> Option<Instant> {
        let open = self.greeting.iter().filter(|greeting| !greeting.done && greeting.cut.is_none());
        let deadline = open.map(|greeting| greeting.since + patience).min();
        // When a place may be made for whoever waits; from then on it is looked at whether they speak.
        let grace = match self.has_place() || self.room.waiting().is_empty() {
            true => None,
            false => self.next_victim().map(|victim| self.greeting[victim].since + GRACE),
        };
        let expiry = self.room.next_expiry(patience);
        let complaints = self.complaints.next_due();
        [deadline, grace.filter(|at| *at > now), expiry, complaints].into_iter().flatten().min()
    }
}

impl Greeting {
    fn cut(&mut self, why: &'static str) {
        if !self.done && self.cut.is_none() {
            self.cut = Some(why);
            self.closer.close();
        }
    }
}

/// Who has begun to speak, or has left.
fn speaking(waiting: &[Waiting<Arc<Pending>>]) -> Vec<bool> {
    let mut polled: Vec<PollFd<'_>> =
        waiting.iter().map(|waiting| PollFd::new(&*waiting.guest, PollFlags::IN)).collect();
    // What fails is tried again at the next look.
    let _ = poll(&mut polled, Some(&Timespec::default()));
    polled.iter().map(|socket| !socket.revents().is_empty()).collect()
}
