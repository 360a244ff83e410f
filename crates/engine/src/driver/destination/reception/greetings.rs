//! The places for connections in their handshake and greeting: limited in number, and taken from
//! connections that are slow while others wait.

use std::time::{Duration, Instant};

use vmferry_transport::ChannelCloser;

use super::room::{Origin, most};

/// Connections that may be in their handshake and greeting at the same time: enough for the
/// channels of one migration, so that it need not wait for itself. At 0.6 MB of buffers each they
/// take at most 11 MB. They keep their places until the engine has accepted them or they are turned
/// away.
const MAX_GREETING: usize = 18;

/// Age after which a handshake may be aborted for another connection that is ready. A normal
/// handshake takes two round trips and some milliseconds of computation.
const GRACE: Duration = Duration::from_secs(1);

/// The connections that have a place.
#[derive(Default)]
pub struct Greetings {
    places: Vec<Greeting>,
    next_number: u64,
}

/// A connection in its handshake and greeting.
struct Greeting {
    number: u64,
    origin: Origin,
    since: Instant,
    closer: ChannelCloser,
    /// The reason, if the connection is being closed for taking too long.
    cut: Option<&'static str>,
    /// Whether it is greeted and waits for the engine.
    done: bool,
}

impl Greetings {
    /// Whether a place is free.
    pub fn has_place(&self) -> bool {
        self.places.len() < MAX_GREETING
    }

    /// Whether a place is free, or can be freed now.
    pub fn may_admit(&self, now: Instant) -> bool {
        self.has_place() || self.victim_from().is_some_and(|from| now >= from)
    }

    /// The number of connections from an origin.
    pub fn count_of(&self, origin: Origin) -> usize {
        self.places.iter().filter(|greeting| greeting.origin == origin).count()
    }

    /// Gives a connection a place, and returns its number.
    pub fn begin(&mut self, origin: Origin, closer: ChannelCloser, now: Instant) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        self.places.push(Greeting { number, origin, since: now, closer, cut: None, done: false });
        number
    }

    /// A connection was greeted or has failed, and keeps its place. Returns the reason if it was
    /// aborted.
    pub fn finish(&mut self, number: u64) -> Option<&'static str> {
        let greeting = self.get(number)?;
        greeting.done = true;
        greeting.cut
    }

    /// The engine has refused a connection, which occupies a place that others may need.
    pub fn reopen(&mut self, number: u64, now: Instant) {
        if let Some(greeting) = self.get(number) {
            (greeting.done, greeting.since) = (false, now);
        }
    }

    /// Frees a connection's place.
    pub fn end(&mut self, number: u64) {
        self.places.retain(|greeting| greeting.number != number);
    }

    /// Closes all connections.
    pub fn close_all(&self) {
        self.places.iter().for_each(|greeting| greeting.closer.close());
    }

    /// Aborts greetings that take too long.
    pub fn cut_slow(&mut self, now: Instant, patience: Duration) {
        for greeting in &mut self.places {
            if now.saturating_duration_since(greeting.since) >= patience {
                greeting.cut("its handshake and greeting took too long");
            }
        }
    }

    /// Aborts a greeting that has exceeded the grace period, since a place is needed.
    pub fn cut_victim(&mut self, now: Instant) {
        if let Some(victim) = self.next_victim()
            && now.saturating_duration_since(self.places[victim].since) >= GRACE
        {
            self.places[victim].cut("its handshake and greeting took long, and others waited");
        }
    }

    /// When [`cut_slow`](Self::cut_slow) has a greeting to abort.
    pub fn next_deadline(&self, patience: Duration) -> Option<Instant> {
        let open = self.places.iter().filter(|greeting| !greeting.done && greeting.cut.is_none());
        open.map(|greeting| greeting.since + patience).min()
    }

    /// From when on [`cut_victim`](Self::cut_victim) has a greeting to abort.
    pub fn victim_from(&self) -> Option<Instant> {
        self.next_victim().map(|victim| self.places[victim].since + GRACE)
    }

    /// The handshake to abort first if a place is needed: the oldest of the address that has the
    /// most.
    fn next_victim(&self) -> Option<usize> {
        // A handshake that is being aborted frees a place already.
        if self.places.iter().any(|greeting| greeting.cut.is_some()) {
            return None;
        }
        let open = self.places.iter().filter(|greeting| !greeting.done);
        let crowd = most(open.map(|greeting| greeting.origin))?;
        self.places.iter().position(|greeting| !greeting.done && greeting.origin == crowd)
    }

    fn get(&mut self, number: u64) -> Option<&mut Greeting> {
        self.places.iter_mut().find(|greeting| greeting.number == number)
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
