//! Accepts connections. A connection waits in a room until it sends data. One of a few threads then
//! authenticates it and reads its greeting, and it arrives at the engine according to its role.
//!
//! ```text
//! listener --accept--> room (silent, 128) --doorman--> greeting (18 threads) --arrivals--> session
//!                                                          ^                                  |
//!                                                          +------- refused arrivals ---------+
//! ```
//! A peer that has not sent anything costs a socket and nothing else. A connection that is slow, or
//! whose address has many connections, is closed to make room for others. So silent or slow peers,
//! or large numbers of them, can't exclude a legitimate source. The threads of a running migration
//! only see a bounded queue.

mod complaints;
mod greetings;
mod room;

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vmferry_transport::{Listener, ListenerCloser, Pending};

use self::complaints::Complaints;
use self::greetings::Greetings;
use self::room::{Origin, Room, Waiting};
use super::arrivals::{Arrival, Probes, compare, receive_greeting};
use super::notice::Notice;
use crate::causes::chain;
use crate::config::DestinationConfig;
use crate::config::policy::Admission;
use crate::error::MigrateError;
use crate::probe::Gate;
use crate::vmm::GuestDescription;

/// Connections that may be silent at the same time. A source's channels send data at once, so they
/// are hardly ever among these.
const SEATS: usize = 128;

/// Greeted connections and notices that the engine has not processed yet.
const MAX_ARRIVED: usize = 64;

/// Consecutive failures to accept, 100 ms apart, after which listening ends.
const MAX_ACCEPT_FAILURES: u32 = 600;

/// Accepts and greets connections.
pub struct Reception {
    /// The connections that were greeted.
    pub arrivals: Receiver<Arrival>,
    closer: ListenerCloser,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// Wakes the doorman thread.
    bell: OwnedFd,
    policy: Option<Arc<dyn Admission>>,
    versions: RangeInclusive<u16>,
    patience: Duration,
    probes: Probes,
}

struct State {
    room: Room<Arc<Pending>>,
    greetings: Greetings,
    complaints: Complaints,
    /// None once no more connections can arrive.
    arrivals: Option<Sender<Arrival>>,
    closed: bool,
}

impl Reception {
    /// Starts accepting connections.
    ///
    /// # Errors
    /// The system can't create a thread or descriptor.
    pub fn open(listener: Listener, config: &DestinationConfig) -> std::io::Result<Self> {
        let (sender, arrivals) = crossbeam_channel::bounded(MAX_ARRIVED);
        let closer = listener.closer();
        let state = State {
            room: Room::new(SEATS),
            greetings: Greetings::default(),
            complaints: Complaints::default(),
            arrivals: Some(sender),
            closed: false,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            policy: config.policy.clone(),
            versions: config.protocol.range().clone(),
            patience: config.greeting_timeout,
            probes: Probes { gate: Gate::default(), host: config.host.clone() },
        });
        // On an error, the threads started so far end when this is dropped.
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

    /// Reports a connection that the engine has turned away. As for all refused connections, there
    /// is one notice for each address and second, which arrives as [`Arrival::TurnedAway`].
    pub fn tell_of(&self, notice: &Notice) {
        let Notice::TurnedAway { peer, reason } = notice else { return };
        let address = peer.parse::<SocketAddr>().ok().map(|address| address.ip());
        self.shared.complain(Origin::of(address), peer.clone(), reason.clone());
    }
}

impl Drop for Reception {
    fn drop(&mut self) {
        self.closer.close();
        let mut state = self.shared.state.lock();
        state.closed = true;
        state.greetings.close_all();
        drop(state);
        self.shared.ring();
        for thread in self.threads.drain(..) {
            // A panic there has already ended it.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn ring(&self) {
        // Writing to the counter only fails when it is full, and then it is already readable.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Reports a connection that was turned away, now or later together with others of its address.
    fn complain(&self, origin: Origin, peer: String, reason: String) {
        let notice = self.state.lock().complaints.note(origin, peer, reason, Instant::now());
        match notice {
            Some(notice) => self.tell(notice),
            None => self.ring(),
        }
    }

    fn tell(&self, notice: Notice) {
        // If the engine is behind with arrivals, losing a notice does the least harm.
        if let Some(arrivals) = &self.state.lock().arrivals {
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
                    // Most likely out of descriptors: accepting again at once would spin.
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
        // Without a listener no more connections arrive. The engine notices that after the last
        // queued arrival.
        let mut state = self.state.lock();
        state.closed = true;
        state.arrivals = None;
        drop(state);
        self.ring();
    }

    fn let_in(&self, pending: Pending) {
        let origin = Origin::of(pending.peer_ip());
        let displaced = self.state.lock().room.enter(origin, Instant::now(), Arc::new(pending));
        self.ring();
        if let Some(Waiting { origin, guest, .. }) = displaced {
            let reason = format!(
                "it said nothing, and {SEATS} connections wait already, most of them from its \
                 address"
            );
            self.complain(origin, guest.peer_address(), reason);
        }
    }

    /// Admits connections that have sent data, and closes those that are silent or too slow.
    fn serve_room(self: &Arc<Self>) {
        loop {
            let (call, silent, due, wake) = {
                let now = Instant::now();
                let mut state = self.state.lock();
                if state.closed {
                    // Waiting connections are closed with the room.
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

    /// Waits until a connection that can be admitted has sent data, or something else is due.
    fn wait(&self, wake: Option<Instant>) {
        let sockets: Vec<Arc<Pending>> = {
            let state = self.state.lock();
            // Polling connections that can't be admitted would wake this thread again and again. It
            // is notified when a place becomes free.
            match state.greetings.may_admit(Instant::now()) {
                true => state.room.waiting().iter().map(|w| Arc::clone(&w.guest)).collect(),
                false => Vec::new(),
            }
        };
        let mut polled = Vec::with_capacity(sockets.len() + 1);
        polled.push(PollFd::new(&self.bell, PollFlags::IN));
        polled.extend(sockets.iter().map(|socket| PollFd::new(&**socket, PollFlags::IN)));
        let timeout = wake.map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            // Rounded up, since otherwise the last millisecond would be a busy loop.
            Timespec::try_from(left + Duration::from_millis(1)).unwrap_or_default()
        });
        // Whether interrupted or not, everything is checked again.
        let _ = poll(&mut polled, timeout.as_ref());
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }

    /// Authenticates and greets a connection in a thread of its own.
    fn greet(self: &Arc<Self>, number: u64, origin: Origin, pending: Pending) {
        let peer = pending.peer_address();
        let (shared, name) = (Arc::clone(self), peer.clone());
        let spawned = std::thread::Builder::new().name("greet".into()).spawn(move || {
            let policy = shared.policy.as_deref();
            let (patience, versions) = (shared.patience, &shared.versions);
            let comparer = |guest: GuestDescription, timeout: Duration| {
                let arrivals = shared.state.lock().arrivals.clone();
                compare(arrivals.as_ref(), guest, timeout)
            };
            let probes = &shared.probes;
            let greeted = receive_greeting(pending, patience, versions, policy, probes, &comparer);
            shared.finish(number, origin, name, greeted);
        });
        if let Err(error) = spawned {
            self.state.lock().greetings.end(number);
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
        let cut = self.state.lock().greetings.finish(number);
        match (greeted, cut) {
            (Ok(None), None) => {}
            (Ok(Some(mut arrival)), None) => {
                // Blocks while the engine is busy, and keeps its place meanwhile.
                let (back, given_back) = crossbeam_channel::bounded(1);
                arrival.give_back_to(back);
                let arrivals = self.state.lock().arrivals.clone();
                if let Some(arrivals) = arrivals {
                    let _ = arrivals.send(arrival);
                }
                if let Ok((connection, words)) = given_back.recv() {
                    // From now on it occupies a place that others may need.
                    self.state.lock().greetings.reopen(number, Instant::now());
                    self.ring();
                    // A peer that does not wait for the answer loses nothing.
                    let _ = connection.dismiss(&words, self.patience);
                }
            }
            (_, Some(why)) => self.complain(origin, peer, why.to_owned()),
            (Err(error), None) => self.complain(origin, peer, chain(&error)),
        }
        self.state.lock().greetings.end(number);
        self.ring();
    }
}

impl State {
    /// Aborts greetings that take too long, and takes a connection that has sent data out of the
    /// room, if there is a place for it.
    fn serve(&mut self, now: Instant, patience: Duration) -> Option<(u64, Origin, Pending)> {
        self.greetings.cut_slow(now, patience);
        let speaking = speaking(self.room.waiting());
        if !self.greetings.has_place() {
            if speaking.contains(&true) {
                self.greetings.cut_victim(now);
            }
            return None;
        }
        let busy = |origin| self.greetings.count_of(origin);
        let Waiting { origin, guest, .. } = self.room.call(&speaking, busy)?;
        // Only this thread has other references to it, and none at this point.
        let pending = Arc::into_inner(guest)?;
        Some((self.greetings.begin(origin, pending.closer(), now), origin, pending))
    }

    /// The time of the next action if nothing happens before.
    fn next_wake(&self, now: Instant, patience: Duration) -> Option<Instant> {
        // When a place can be freed for a waiting connection. From then on the waiting connections
        // are polled.
        let grace = match self.greetings.has_place() || self.room.waiting().is_empty() {
            true => None,
            false => self.greetings.victim_from().filter(|at| *at > now),
        };
        let deadline = self.greetings.next_deadline(patience);
        let expiry = self.room.next_expiry(patience);
        [deadline, grace, expiry, self.complaints.next_due()].into_iter().flatten().min()
    }
}

/// Whether each waiting connection has sent data or was closed.
fn speaking(waiting: &[Waiting<Arc<Pending>>]) -> Vec<bool> {
    let mut polled: Vec<PollFd<'_>> =
        waiting.iter().map(|waiting| PollFd::new(&*waiting.guest, PollFlags::IN)).collect();
    // A failure is retried at the next check.
    let _ = poll(&mut polled, Some(&Timespec::default()));
    polled.iter().map(|socket| !socket.revents().is_empty()).collect()
}
